"""The Helm chart, by Helm itself: the objects of the Kustomize overlays, and refused values."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from kinds import Manifest, kustomize, needs_kubectl

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(
        importlib.util.find_spec("helm_sdkpy") is None,
        reason="no Helm: .venv/bin/pip install --ignore-requires-python helm-sdkpy==0.1.32, as scripts/test does",
    ),
]

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "graphkiln"
OVERLAYS = CHART.parents[1] / "kubernetes" / "overlays"
NAMES = sorted(path.stem for path in (CHART / "ci").glob("*.yaml"))
S3, IMAGE = {"address": "s3://bucket/models"}, {"repository": "models"}
GATEWAY = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateway"}}}
TAINT = {"key": "models", "operator": "Exists"}
PROXY = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
SECRET = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"replicaz": 3}, "additional properties 'replicaz' not allowed"),
    ({"server": {"drian": 3}}, "'drian' not allowed"),
    ({"replicas": 0}, "at '/replicas': minimum"),
    ({"replicas": 3, "autoscaling": {"kind": "hpa"}}, "at '/replicas'"),
    (
        {"autoscaling": {"kind": "keda", "min": 5, "max": 2}},
        "autoscaling.min is 5, more than autoscaling.max, which is 2",
    ),
    ({"autoscaling": {"kind": "both"}}, "at '/autoscaling/kind'"),
    ({"store": {"kind": "remote"}}, "at '/store/remote/address'"),
    ({"store": {"kind": "remote", "remote": {"address": "/models"}}}, "at '/store/remote/address'"),
    ({"store": {"remote": S3}}, "at '/store/remote/address'"),
    ({"store": {"kind": "image"}}, "at '/store/image/repository'"),
    ({"store": {"kind": "remote", "remote": S3, "image": IMAGE}}, "at '/store/image/repository'"),
    ({"store": {"kind": "image", "image": IMAGE, "volume": {"claim": "mine"}}}, "at '/store/volume/claim'"),
    ({"resources": {"limits": {"memory": None}}}, "missing property 'memory'"),
    ({"resources": {"requests": {"cpu": None}}}, "missing property 'cpu'"),
    ({"sharedMemory": "1 GB"}, "at '/sharedMemory'"),
    ({"server": {"extraArguments": ["--drain=3"]}}, "at '/server/extraArguments/0'"),
    ({"server": {"extraArguments": ["log-verbose=1"]}}, "at '/server/extraArguments/0'"),
    ({"server": {"preStop": 2}}, "at '/server/preStop'"),
    ({"server": {"extraArguments": ["--tls-cert=a"]}}, "at '/server/extraArguments/0'"),  # probes have no TLS
    ({"store": {"volume": {"accessModes": ["ReadWriteOncePod"]}}}, "at '/store/volume/accessModes/0'"),
    ({"store": {"remote": {"dockerConfig": "mine"}}}, "at '/store/remote/dockerConfig'"),
    ({"autoscaling": {"busy": 70}}, "at '/autoscaling/busy'"),
    ({"pod": {"hostNetwork": True}}, "'hostNetwork' not allowed"),
    ({"server": {"host": "127.0.0.1"}}, "at '/server/host'"),
    ({"server": {"extraArguments": ["--allow-http=false"]}}, "at '/server/extraArguments/0'"),  # probes use it
    ({"server": {"extraArguments": ["--http-restricted-api=model-repository,health:key=1"]}}, "extraArguments/0"),
    ({"artifactSize": "20G"}, "artifactSize is 20G, no less than cacheSize, which is 20Gi"),
    ({"server": {"extraArguments": ["--cache-size=30G"]}}, "at '/server/extraArguments/0'"),
    ({"sharedMemory": "5Gi"}, "sharedMemory is 5Gi, more than resources.limits.memory, which is 4Gi"),
    (
        {"resources": {"requests": {"memory": "4097Mi"}}},
        "resources.requests.memory is 4097Mi, more than resources.limits.memory, which is 4Gi",
    ),
    ({"page": {"names": ["models.example.org"]}}, "at '/page/names'"),
    ({"page": {"enabled": True, "names": ["models.example.org:443"]}}, "at '/page/names/0'"),
    ({"server": {"extraArguments": ["--page"]}}, "at '/server/extraArguments/0'"),
    ({"server": {"tlsSecret": "No Name"}}, "at '/server/tlsSecret'"),
    ({"networkPolicy": {"from": [{}]}}, "at '/networkPolicy/from/0'"),  # no peer
    ({"networkPolicy": {"egress": [{"port": 4318}]}}, "at '/networkPolicy/egress/0'"),
    (
        {"server": {"adminKeySecret": "mine", "extraArguments": ["--admin-key-file=off"]}},
        "server.extraArguments has --admin-key-file=off, and server.adminKeySecret is mine",
    ),
    (
        {"resources": {"limits": {"cpu": "1500m"}}},
        "resources.requests.cpu is 2, more than resources.limits.cpu, which is 1500m",
    ),
    (
        {"server": {"extraEnvironment": [{"name": "GRAPHKILN_CORES", "value": "4"}]}},
        "at '/server/extraEnvironment/0/name'",
    ),
    ({"server": {"extraEnvironment": [{"name": "WORKERS", "value": 4}]}}, "at '/server/extraEnvironment/0/value'"),
    ({"server": {"extraEnvironment": [{"name": "WORKERS"}]}}, "at '/server/extraEnvironment/0'"),
    ({"pod": {"labels": {"app.kubernetes.io/name": "mine"}}}, "at '/pod/labels/app.kubernetes.io~1name'"),
    ({"serviceAccount": {"name": "mine", "annotations": {"role": "r"}}}, "at '/serviceAccount/annotations'"),
    ({"user": 0}, "at '/user'"),
]
TAKEN: list[dict[str, Any]] = [
    {"server": {"drain": 60, "loadDeadline": 1200, "preStop": 20, "extraArguments": ["--log-verbose=1"]}},
    {
        "store": {"volume": {"claim": "mine"}},
        "replicas": 5,
        "image": {"tag": "sha256:" + 64 * "a"},
        "sharedMemory": "4096Mi",  # all of it, and no more
        "server": {"extraArguments": ["--http-restricted-api=model-repository:key=1"]},
        "resources": {"requests": {"cpu": 2}, "limits": {"cpu": "2000m"}},  # a number, as --set makes one
    },
    {
        "user": 1000680000,
        "cacheClaim": "lowered",
        "pod": {"labels": {"azure.workload.identity/use": "true"}, "annotations": {"prometheus.io/scrape": "true"}},
        "serviceAccount": {"name": "with-a-role"},
        "server": {"extraEnvironment": [PROXY, SECRET]},
        "resources": {"requests": {"memory": "64Gi"}, "limits": {"memory": "64Gi"}},
    },
    {
        "name": "other",
        "store": {
            "kind": "remote",
            "remote": {
                "address": "oci://registry:5000/m:1",
                "dockerConfig": "pull",
                "ports": [5000],
                "copyDeadline": 60,
            },
        },
        "pod": {"nodeSelector": {"disk": "fast"}, "imagePullSecrets": [{"name": "pull"}], "tolerations": [TAINT]},
        "gpu": {"enabled": True},
        "monitoring": {"enabled": True, "labels": {"release": "prometheus"}},
        "autoscaling": {"kind": "keda", "busy": 0.55},
        "page": {"enabled": True, "names": ["models.example.org"]},
        "networkPolicy": {"from": [GATEWAY], "egress": [{"ports": [{"port": 4318, "protocol": "TCP"}]}]},
        "server": {"host": "::", "tlsSecret": "cert", "extraArguments": ["--admin-key-file=off"]},
    },
]


@cache
def helm_results() -> dict[str, Any]:
    """Results of Helm: `lint`, and objects or error of each case, in the order of the lists."""
    shipped = [yaml.safe_load((CHART / "ci" / f"{name}.yaml").read_text()) for name in NAMES]
    asked = {"chart": str(CHART), "cases": [*shipped, *(values for values, _ in REFUSED), *TAKEN]}
    program = Path(__file__).parent / "helm_install.py"
    done = subprocess.run(
        [sys.executable, program], input=json.dumps(asked), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def plain(manifest: Manifest) -> Manifest:
    """An object without the annotations and labels that Helm adds."""
    metadata = dict(manifest["metadata"])
    metadata.pop("namespace")
    for key in ("annotations", "labels"):
        found = metadata.pop(key, {}).items()
        kept = {name: each for name, each in found if not name.startswith(("meta.helm.sh/", "helm.sh/"))}
        kept.pop("app.kubernetes.io/managed-by", None)
        metadata |= {key: kept} if kept else {}
    return {**manifest, "metadata": metadata}


def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    return {(each["kind"], each["metadata"]["name"]): each for each in manifests}


def test_there_is_a_case_for_every_overlay() -> None:
    assert sorted(path.name for path in OVERLAYS.iterdir()) == NAMES


@needs_kubectl
@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_helm_sends_what_kustomize_renders(index: int) -> None:
    case = helm_results()["cases"][index]
    sent = by_name([plain(each) for each in case["objects"]])
    rendered = by_name(kustomize(OVERLAYS / NAMES[index]))
    assert sent.keys() == rendered.keys()
    for key, manifest in sent.items():
        assert manifest == rendered[key]


@pytest.mark.parametrize("index", range(len(REFUSED)), ids=[message for _, message in REFUSED])
def test_wrong_and_contradictory_values_are_refused(index: int) -> None:
    case = helm_results()["cases"][len(NAMES) + index]
    assert REFUSED[index][1] in case["error"]


def test_probes_and_grace_follow_the_servers_limits() -> None:
    case = helm_results()["cases"][len(NAMES) + len(REFUSED)]
    (deployment,) = (each for each in case["objects"] if each["kind"] == "Deployment")
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert {"--drain=60", "--load-deadline=1200", "--log-verbose=1"} <= set(container["args"])
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["periodSeconds"] * container[probe]["failureThreshold"] > 1200
    assert deployment["spec"]["progressDeadlineSeconds"] > 1260
    assert spec["terminationGracePeriodSeconds"] >= 20 + 60 + 10


def test_another_release_gets_its_own_names_labels_and_secrets() -> None:
    case = helm_results()["cases"][-1]
    found = {each["kind"]: each for each in case["objects"] if each["metadata"]["name"] != "other-page"}
    alerts = [rule for group in found["PrometheusRule"]["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    assert {rule["alert"]: rule["expr"] for rule in alerts}["GraphkilnDown"].startswith('up{job="other"} == 0 or')
    for kind in ("ServiceMonitor", "PrometheusRule"):
        assert found[kind]["metadata"]["labels"]["release"] == "prometheus"
    queries = [trigger["metadata"]["query"] for trigger in found["ScaledObject"]["spec"]["triggers"]]
    assert all('{namespace="models",service="other"}' in query for query in queries)
    assert [trigger["metadata"]["threshold"] for trigger in found["ScaledObject"]["spec"]["triggers"]] == ["1", "0.55"]
    spec = found["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert (spec["nodeSelector"], spec["imagePullSecrets"]) == ({"disk": "fast"}, [{"name": "pull"}])
    assert [each["key"] for each in spec["tolerations"]] == ["models", "nvidia.com/gpu"]
    assert {"name": "DOCKER_CONFIG", "value": "/docker"} in container["env"]
    assert {"name": "docker", "mountPath": "/docker", "readOnly": True} in container["volumeMounts"]
    names = [each for each in container["args"] if each.startswith("--page")]
    assert names == ["--page", "--page-name=other-page", "--page-name=models.example.org"]
    assert {"name": "GRAPHKILN_PAGE_HOST", "value": "[::]"} in container["env"]
    (page,) = (each["spec"] for each in case["objects"] if each["metadata"]["name"] == "other-page")
    assert (page["selector"], page["ports"][0]["appProtocol"]) == ({"app.kubernetes.io/name": "other"}, "https")
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] == 600 + 60 + 60
    assert found["NetworkPolicy"]["spec"]["egress"][1] == {"ports": [{"port": 5000, "protocol": "TCP"}]}
    requests = found["NetworkPolicy"]["spec"]["ingress"][0]
    assert requests["from"] == [{"podSelector": {}}, GATEWAY]
    assert found["NetworkPolicy"]["spec"]["egress"][-1] == {"ports": [{"port": 4318, "protocol": "TCP"}]}


def test_pods_get_labels_users_environment_and_claims() -> None:
    case = helm_results()["cases"][-2]
    assert "ServiceAccount" not in {each["kind"] for each in case["objects"]}
    (deployment,) = (each for each in case["objects"] if each["kind"] == "Deployment")
    metadata, spec = (deployment["spec"]["template"][key] for key in ("metadata", "spec"))
    assert metadata["annotations"] == {"prometheus.io/scrape": "true"}
    assert metadata["labels"] == {"app.kubernetes.io/name": "graphkiln", "azure.workload.identity/use": "true"}
    assert not {"labels", "annotations"} & spec.keys()
    assert spec["serviceAccountName"] == "with-a-role"
    assert {spec["securityContext"][key] for key in ("runAsUser", "runAsGroup", "fsGroup")} == {1000680000}
    assert spec["containers"][0]["env"][-2:] == [PROXY, SECRET]
    sizes = {each["name"]: each["emptyDir"].get("sizeLimit") for each in spec["volumes"] if "emptyDir" in each}
    assert sizes["tmp"] == "64Gi", "weights that fit into memory fit into temporary files"
    (cache,) = (each for each in spec["volumes"] if each["name"] == "cache")
    assert cache == {"name": "cache", "persistentVolumeClaim": {"claimName": "lowered"}}


def test_an_existing_claim_is_used() -> None:
    case = helm_results()["cases"][len(NAMES) + len(REFUSED) + 1]
    assert "PersistentVolumeClaim" not in {each["kind"] for each in case["objects"]}
    (deployment,) = (each for each in case["objects"] if each["kind"] == "Deployment")
    claims = [
        each["persistentVolumeClaim"]["claimName"]
        for each in deployment["spec"]["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in each
    ]
    assert (claims, deployment["spec"]["replicas"]) == (["mine"], 5)
    resources = deployment["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert (resources["requests"]["cpu"], resources["limits"]["cpu"]) == (2, "2000m")
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == f"graphkiln@sha256:{64 * 'a'}"


def test_uninstalling_keeps_the_models() -> None:
    case = helm_results()["cases"][NAMES.index("cpu")]
    (claim,) = (each for each in case["objects"] if each["kind"] == "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_lint_finds_nothing_worse_than_a_hint() -> None:
    assert all(message["Severity"] <= 1 for message in helm_results()["lint"])
