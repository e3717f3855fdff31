"""The manifests under deploy/, by the real kustomize, Kubernetes' own schemas and those of the custom resources."""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from kinds import Manifest, check, kustomize, needs_kubectl, only, with_containers
from typer.main import get_command

from graphkiln.cli.cache import parse_size
from graphkiln.cli.main import app

OVERLAYS = (
    "cpu", "gpu", "s3", "image", "ipv6", "openshift", "autoscaling", "keda", "monitoring", "signed", "page", "secured",
)  # fmt: skip
KUSTOMIZATIONS = [*(f"kubernetes/overlays/{name}" for name in OVERLAYS), "kserve"]
_PLAIN = ("score/rayjob.yaml",)
_CORE = {"ServiceAccount", "Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"}


@pytest.fixture(scope="module")
def deploy(repository: Path) -> Path:
    return repository / "deploy"


def _container(manifest: Manifest) -> dict[str, Any]:
    return manifest["spec"]["template"]["spec"]["containers"][0]  # type: ignore[no-any-return]


def _option(arguments: list[str], name: str) -> str:
    (value,) = (each.partition("=")[2] for each in arguments if each.startswith(f"--{name}="))
    return value


@needs_kubectl
@pytest.mark.parametrize("folder", KUSTOMIZATIONS)
def test_every_object_fits_the_schema_of_its_kind(deploy: Path, folder: str) -> None:
    manifests = kustomize(deploy / folder)
    for manifest in manifests:
        check(manifest)
    if folder != "kserve":
        assert {each["kind"] for each in manifests} >= _CORE


@pytest.mark.parametrize("path", _PLAIN)
def test_every_plain_manifest_fits_the_schema_of_its_kind(deploy: Path, path: str) -> None:
    for manifest in yaml.safe_load_all((deploy / path).read_text()):
        check(manifest)


@needs_kubectl
def test_a_misspelt_key_is_refused(deploy: Path) -> None:
    manifests = kustomize(deploy / "kubernetes/overlays/keda")
    deployment = copy.deepcopy(only(manifests, "Deployment"))
    _container(deployment)["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        check(deployment)
    scaled = copy.deepcopy(only(manifests, "ScaledObject"))
    scaled["spec"]["maxReplicas"] = 3
    with pytest.raises(jsonschema.ValidationError, match="maxReplicas"):
        check(scaled)


@needs_kubectl
@pytest.mark.parametrize("name", OVERLAYS)
def test_references_between_objects_resolve(deploy: Path, name: str) -> None:
    manifests = kustomize(deploy / f"kubernetes/overlays/{name}")
    deployment = only(manifests, "Deployment")
    pod = deployment["spec"]["template"]
    labels, spec = pod["metadata"]["labels"], pod["spec"]

    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    services = [each for each in manifests if each["kind"] == "Service"]
    assert all(each["spec"]["selector"].items() <= labels.items() for each in services)
    assert only(manifests, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"].items() <= labels.items()
    policy = only(manifests, "NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert spec["serviceAccountName"] == only(manifests, "ServiceAccount")["metadata"]["name"]

    volumes = {each["name"] for each in spec["volumes"]}
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        assert {each["name"] for each in container["volumeMounts"]} <= volumes
    ports = {each["name"] for each in _container(deployment)["ports"]}
    assert {port["targetPort"] for each in services for port in each["spec"]["ports"]} == ports
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == ports

    claims = [each["persistentVolumeClaim"]["claimName"] for each in spec["volumes"] if "persistentVolumeClaim" in each]
    assert claims == [each["metadata"]["name"] for each in manifests if each["kind"] == "PersistentVolumeClaim"]
    for kind in ("HorizontalPodAutoscaler", "ScaledObject"):
        for scaler in (each for each in manifests if each["kind"] == kind):
            assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
            assert "replicas" not in deployment["spec"], "the next apply would undo what the autoscaler did"
    for monitor in (each for each in manifests if each["kind"] == "ServiceMonitor"):
        selected = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = (each for each in services if selected <= each["metadata"]["labels"].items())
        assert monitor["spec"]["endpoints"][0]["port"] in {each["name"] for each in service["spec"]["ports"]}


@needs_kubectl
@pytest.mark.parametrize("name", OVERLAYS)
def test_containers_are_confined(deploy: Path, name: str) -> None:
    spec = only(kustomize(deploy / f"kubernetes/overlays/{name}"), "Deployment")["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]
    (container,) = spec["containers"]
    caches = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "cache"]
    assert [_option(container["args"], "cache")] == caches
    named = {each["name"]: each.get("value") for each in container["env"]}
    assert [named["GRAPHKILN_TRUSTED_VOLUME"]] == caches, (
        "otherwise nothing is cached: volumes of Kubernetes are writable by all"
    )
    cores = {"name": "GRAPHKILN_CORES", "valueFrom": {"resourceFieldRef": {"resource": "requests.cpu"}}}
    assert cores in container["env"]
    assert "cpu" in container["resources"]["requests"], "otherwise it has as many threads as the node has cores"
    memory = [each for each in spec["volumes"] if each.get("emptyDir", {}).get("medium") == "Memory"]
    mounts = {each["name"]: each["mountPath"] for each in spec["containers"][0]["volumeMounts"]}
    assert [mounts[each["name"]] for each in memory] == ["/dev/shm"]
    assert not {"/", "/opt", "/home"} & set(mounts.values())


@needs_kubectl
@pytest.mark.parametrize("name", OVERLAYS)
def test_probes_and_grace_fit_the_servers_limits(deploy: Path, name: str) -> None:
    deployment = only(kustomize(deploy / f"kubernetes/overlays/{name}"), "Deployment")
    spec, container = deployment["spec"]["template"]["spec"], _container(deployment)
    arguments = container["args"]
    load_s, drain_s = float(_option(arguments, "load-deadline")), float(_option(arguments, "drain"))

    def window_s(probe: str) -> float:
        return container[probe]["periodSeconds"] * container[probe]["failureThreshold"]  # type: ignore[no-any-return]

    assert container["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"
    for probe in ("startupProbe", "livenessProbe"):  # a restart of the supervisor loads all models again
        assert container[probe]["httpGet"]["path"] == "/v2/health/live"
        assert window_s(probe) > load_s
    if "//" in _option(arguments, "model-store"):  # it is copied before the port opens
        assert window_s("startupProbe") >= load_s + 1200
    assert container["startupProbe"]["periodSeconds"] <= 2, "the period delays readiness"
    assert deployment["spec"]["progressDeadlineSeconds"] > window_s("startupProbe")

    before, pause = container["lifecycle"]["preStop"]["exec"]["command"]
    assert before == "sleep"
    assert float(pause) > 2 * window_s("readinessProbe"), "routers notice it within that time"
    assert spec["terminationGracePeriodSeconds"] >= float(pause) + drain_s + 10
    # A GPU is rarely there twice: the new pod would wait for the one that the old pod has.
    surge = {"maxSurge": 0, "maxUnavailable": 1} if name == "gpu" else {"maxSurge": 1, "maxUnavailable": 0}
    assert deployment["spec"]["strategy"]["rollingUpdate"] == surge


@needs_kubectl
@pytest.mark.parametrize("name", OVERLAYS)
def test_the_server_accepts_all_options(deploy: Path, name: str) -> None:
    from graphkiln_backend.server.flags import TritonFlags
    from graphkiln_backend.server.installation import find_installation

    arguments = _container(only(kustomize(deploy / f"kubernetes/overlays/{name}"), "Deployment"))["args"]
    assert arguments[:2] == ["graphkiln", "serve"]
    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    context = command.make_context("serve", [*arguments[2:]])
    host = "::" if name == "ipv6" else "0.0.0.0"
    assert context.params["host"] == host
    TritonFlags.parse(context.args, find_installation().flags, host)


@needs_kubectl
def test_stores_of_the_overlays(deploy: Path) -> None:
    stores = {}
    for name in OVERLAYS:
        deployment = only(kustomize(deploy / f"kubernetes/overlays/{name}"), "Deployment")
        stores[name] = _option(_container(deployment)["args"], "model-store")
        mounted = any(each["mountPath"] == "/models" for each in _container(deployment)["volumeMounts"])
        assert mounted is (stores[name] == "/models")
    assert stores == {**dict.fromkeys(OVERLAYS, "/models"), "s3": "s3://YOUR-BUCKET/models"}


@needs_kubectl
def test_the_operator_gets_the_same_rules(deploy: Path) -> None:
    rule = only(kustomize(deploy / "kubernetes/overlays/monitoring"), "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((deploy / "prometheus/rules.yml").read_text())


@needs_kubectl
def test_kserve_gets_the_probes_and_the_confinement_of_the_deployment(deploy: Path) -> None:
    manifests = kustomize(deploy / "kserve")
    runtime, service = only(manifests, "ClusterServingRuntime"), only(manifests, "InferenceService")
    (container,) = runtime["spec"]["containers"]
    plain = _container(only(kustomize(deploy / "kubernetes/overlays/cpu"), "Deployment"))
    assert container["name"] == "kserve-container"
    assert container["image"] == plain["image"]
    ports = {"http": 8080, "grpc": 9000, "metrics": 8002}
    assert {name: int(_option(container["args"], f"{name}-port")) for name in ports} == ports
    assert _option(container["args"], "model-store") == "/mnt/models"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = {**plain[probe], "httpGet": {**plain[probe]["httpGet"], "port": 8080}}
        assert container[probe] == asked
    assert container["securityContext"].items() >= plain["securityContext"].items()
    assert container["lifecycle"] == plain["lifecycle"]
    assert {"name": "GRAPHKILN_TRUSTED_VOLUME", "value": "/tmp"} in container["env"]
    assert _option(container["args"], "cache").startswith("/tmp/")
    predictor = service["spec"]["predictor"]
    assert predictor["deploymentStrategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert predictor["terminationGracePeriodSeconds"] == 45
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in {each["name"] for each in runtime["spec"]["supportedModelFormats"]}
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]


@needs_kubectl
def test_trusted_keys_are_mounted(deploy: Path) -> None:
    container = _container(only(kustomize(deploy / "kubernetes/overlays/signed"), "Deployment"))
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert _option(container["args"], "trusted-keys") == mounts["trusted-keys"]


@needs_kubectl
def test_s3_and_its_credentials_can_be_reached(deploy: Path) -> None:
    policy = only(kustomize(deploy / "kubernetes/overlays/s3"), "NetworkPolicy")["spec"]
    open_ports = {port["port"] for rule in policy["egress"] if "to" not in rule for port in rule["ports"]}
    assert open_ports == {53, 443}
    metadata = [block["ipBlock"]["cidr"] for rule in policy["egress"] for block in rule.get("to", ())]
    assert metadata == ["169.254.169.254/32", "169.254.170.23/32", "fd00:ec2::254/128", "fd00:ec2::23/128"]


@needs_kubectl
@pytest.mark.parametrize("folder", KUSTOMIZATIONS)
def test_lowered_graphs_leave_room_for_copies_in_their_volume(deploy: Path, folder: str) -> None:
    (pod,) = (pod for each in kustomize(deploy / folder) for pod in with_containers(each))
    (container,) = pod["containers"]
    cache, size = _option(container["args"], "cache"), parse_size(_option(container["args"], "cache-size"))
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    (name,) = (mounts[path] for path in mounts if cache == path or cache.startswith(f"{path}/"))
    (volume,) = (each for each in pod["volumes"] if each["name"] == name)
    assert 2 * size <= parse_size(volume["emptyDir"]["sizeLimit"].removesuffix("i"))


@needs_kubectl
@pytest.mark.parametrize("folder", KUSTOMIZATIONS)
def test_weights_that_fit_into_memory_fit_into_temporary_files(deploy: Path, folder: str) -> None:
    """Several instances of a model map one copy of its weights in the run's folder."""
    (pod,) = (pod for each in kustomize(deploy / folder) for pod in with_containers(each))
    (volume,) = (each for each in pod["volumes"] if each["name"] == "tmp")
    memory = pod["containers"][0]["resources"]["limits"]["memory"]
    assert parse_size(volume["emptyDir"]["sizeLimit"].removesuffix("i")) >= parse_size(memory.removesuffix("i"))


@needs_kubectl
@pytest.mark.parametrize("folder", KUSTOMIZATIONS)
def test_memory_requests_are_the_limits(deploy: Path, folder: str) -> None:
    """A node short of memory first ends pods that use more than they requested."""
    (pod,) = (pod for each in kustomize(deploy / folder) for pod in with_containers(each))
    resources = pod["containers"][0]["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    (shared,) = (each["emptyDir"] for each in pod["volumes"] if each.get("emptyDir", {}).get("medium") == "Memory")
    memory = parse_size(resources["limits"]["memory"].removesuffix("i"))
    assert 4 * parse_size(shared["sizeLimit"].removesuffix("i")) <= memory


@needs_kubectl
def test_the_page_has_its_service(deploy: Path) -> None:
    manifests = kustomize(deploy / "kubernetes/overlays/page")
    services = {each["metadata"]["name"]: each["spec"] for each in manifests if each["kind"] == "Service"}
    assert services.keys() == {"graphkiln", "graphkiln-page"}
    page = services["graphkiln-page"]
    assert [port["port"] for port in page["ports"]] == [8003, 8000]
    assert page["sessionAffinity"] == "ClientIP"
    assert 8003 not in {port["port"] for port in services["graphkiln"]["ports"]}
    container = _container(only(manifests, "Deployment"))
    assert {"--page", "--page-name=graphkiln-page"} <= set(container["args"])
    inside, metrics = only(manifests, "NetworkPolicy")["spec"]["ingress"]
    assert inside["from"] == [{"podSelector": {}}]
    assert {"port": "page"} in inside["ports"]
    assert metrics["ports"] == [{"port": "metrics"}]


@needs_kubectl
def test_probes_and_services_use_the_servers_tls(deploy: Path) -> None:
    manifests = kustomize(deploy / "kubernetes/overlays/secured")
    spec = only(manifests, "Deployment")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    ports = [port for each in manifests if each["kind"] == "Service" for port in each["spec"]["ports"]]
    assert {(port["name"], port["appProtocol"]) for port in ports} == {
        *((name, "https") for name in ("http", "grpc", "page")),
        ("metrics", "http"),
    }
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in spec["volumes"]}
    for option, name, file in (
        ("tls-cert", "tls", "tls.crt"),
        ("tls-key", "tls", "tls.key"),
        ("admin-key-file", "admin-key", "key"),
    ):
        assert _option(container["args"], option) == f"{mounts[name]}/{file}"
        assert volumes[name]["secret"]["secretName"] == f"graphkiln-{name}"
    assert volumes["admin-key"]["secret"]["defaultMode"] == 0o440


@needs_kubectl
def test_the_manuals_patch_makes_a_claim_for_one_node(deploy: Path, repository: Path, tmp_path: Path) -> None:
    manual = (repository / "docs" / "deploying.md").read_text()
    (patch,) = re.findall(r"--kind PersistentVolumeClaim --patch '([^']*)'", manual)
    kustomization = {
        "resources": [os.path.relpath(deploy / "kubernetes/overlays/cpu", tmp_path)],
        "patches": [{"target": {"kind": "PersistentVolumeClaim"}, "patch": patch}],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    claim = only(kustomize(tmp_path), "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    check(claim)


@needs_kubectl
@pytest.mark.parametrize("name", OVERLAYS)
def test_a_node_can_be_drained(deploy: Path, name: str) -> None:
    """`minAvailable: 1` would block the drain of a single pod forever."""
    budget = only(kustomize(deploy / f"kubernetes/overlays/{name}"), "PodDisruptionBudget")["spec"]
    assert (budget["maxUnavailable"], "minAvailable" in budget) == (1, False)
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


@needs_kubectl
@pytest.mark.parametrize("name", OVERLAYS)
def test_openshift_chooses_the_user(deploy: Path, name: str) -> None:
    """Its profile restricted-v2 refuses users outside of the namespace's range."""
    security = only(kustomize(deploy / f"kubernetes/overlays/{name}"), "Deployment")["spec"]["template"]["spec"]
    chosen = {key: security["securityContext"].get(key) for key in ("runAsUser", "runAsGroup", "fsGroup")}
    assert set(chosen.values()) == ({None} if name == "openshift" else {1000})


@needs_kubectl
def test_the_startup_probe_fits_the_number_of_models_in_the_manual(deploy: Path, repository: Path) -> None:
    rows = json.loads((repository / "docs" / "benchmarks" / "start.json").read_text())["rows"]
    (ready,) = (row for row in rows if row["phase"] == "ready s")
    probe = _container(only(kustomize(deploy / "kubernetes/overlays/cpu"), "Deployment"))["startupProbe"]
    window_s = probe["periodSeconds"] * probe["failureThreshold"]
    mixed_s, large_s, kept_s = ready["forty, cold"], ready["vit_b_16, cold"], ready["vit_b_16, warm"]
    assert window_s > 20 * large_s > 5 * mixed_s, "twenty of the largest that was measured, one after the other"
    manual = " ".join((repository / "docs" / "deploying.md").read_text().split())
    found = re.search(
        r"mixed size are ready after ([\d.]+) s, and one ViT-B after ([\d.]+) s.*? (\d+) s suffice for (\d+) ViT-B"
        r".* persistent cache \(a ViT-B: ([\d.]+) s\)",
        manual,
    )
    assert found
    assert (int(found[3]), int(found[4])) == (window_s, int(window_s / float(found[2])))
    # A run on another day gives other figures: the manual need not follow each of them.
    assert [float(found[at]) for at in (1, 2, 5)] == pytest.approx([mixed_s, large_s, kept_s], rel=0.3)


def test_skipped_rules_of_checkov_have_reasons(deploy: Path, repository: Path) -> None:
    text = (deploy / "checkov.yaml").read_text()
    skipped = yaml.safe_load(text)["skip-check"]
    assert len(skipped) == 6
    assert len(re.findall(r"^  # .*\n(?:  # .*\n)*  - CKV_K8S_\d+$", text, re.MULTILINE)) == len(skipped)
    manual = " ".join((repository / "docs" / "deploying.md").read_text().split())
    assert "explains the six exceptions" in manual
