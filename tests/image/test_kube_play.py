"""The manifests of deploy/kubernetes, run by podman with the image: as near to a cluster as one machine comes.

podman ignores what it does not know (Service, NetworkPolicy, PodDisruptionBudget, some kinds of probes), and runs
one pod. What it takes is real: the user, the read-only root, the capabilities, the volumes, the command line.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml
from kinds import Manifest, kustomize, needs_kubectl, only
from running import free_ports, run_command

ENGINE = os.environ.get("GRAPHKILN_CONTAINER_ENGINE", "docker")
IMAGE = os.environ.get("GRAPHKILN_IMAGE", "graphkiln")
# As in test_image.py; `kube play` has no options for them.
CONFIGURATION = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
shm_size = "1g"
[engine]
runtime = "runc"
"""

pytestmark = [
    pytest.mark.image,
    needs_kubectl,
    pytest.mark.skipif(ENGINE != "podman", reason="kube play is podman's; GRAPHKILN_CONTAINER_ENGINE=podman"),
]


class Pod:
    """The pod of a deployment, in the network of this machine.

    Args:
        manifest: What to play.
        claim: The volume that it claims.
        folder: For podman's configuration.
    """

    def __init__(self, manifest: Path, claim: str, folder: Path) -> None:
        (folder / "containers.conf").write_text(CONFIGURATION)
        self._environment = {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf")}
        self._manifest, self._claim = manifest, claim
        self.name = ""

    def podman(self, *arguments: str, send: bytes = b"", fails: bool = False) -> str:
        done = subprocess.run(
            ["podman", *arguments], env=self._environment, input=send, capture_output=True, timeout=200, check=False
        )
        assert fails or done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    def exec(self, *command: str, fails: bool = False) -> str:
        return self.podman("exec", self.name, *command, fails=fails)

    def fill(self, store: Path) -> None:
        """Copies a store into the claim, while the server runs."""
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as tar:
            tar.add(store, ".")
        self.podman("volume", "import", self._claim, "-", send=content.getvalue())

    def __enter__(self) -> Pod:
        played = self.podman("kube", "play", str(self._manifest)).split()
        self.name = played[-1]
        return self

    def __exit__(self, *_: object) -> None:
        self.podman("kube", "down", str(self._manifest), fails=True)
        self.podman("volume", "rm", self._claim, fails=True)


def on_this_machine(manifests: list[Manifest], name: str, ports: dict[str, int]) -> list[Manifest]:
    """The manifests for one pod of the image under test, with names and ports that nobody else has here."""
    text = yaml.safe_dump_all(manifests).replace("claimName: graphkiln-models", f"claimName: {name}")
    found = [each for each in yaml.safe_load_all(text) if each]
    only(found, "PersistentVolumeClaim")["metadata"]["name"] = name
    deployment = only(found, "Deployment")
    deployment["metadata"]["name"] = name
    deployment["spec"]["replicas"] = 1
    spec = deployment["spec"]["template"]["spec"]
    spec["hostNetwork"] = True
    (container,) = spec["containers"]
    container["image"] = f"localhost/{IMAGE}"
    container["args"] += [f"--{service}-port={port}" for service, port in ports.items()]
    del container["ports"]  # podman would map them, which takes a network of its own
    # It knows neither the memory medium nor fsGroup; what it gives every container is as large as CONFIGURATION says.
    spec["volumes"] = [each for each in spec["volumes"] if each["name"] != "shm"]
    container["volumeMounts"] = [each for each in container["volumeMounts"] if each["name"] != "shm"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        container[probe]["httpGet"]["port"] = ports["http"]
    return found


@pytest.fixture
def ports() -> dict[str, int]:
    return dict(zip(("http", "grpc", "metrics"), free_ports(3), strict=True))


@pytest.fixture
def pod(repository: Path, tmp_path: Path, ports: dict[str, int]) -> Iterator[Pod]:
    name = f"graphkiln-test-{ports['http']}"
    manifests = on_this_machine(kustomize(repository / "deploy/kubernetes/overlays/cpu"), name, ports)
    (tmp_path / "manifest.yaml").write_text(yaml.safe_dump_all(manifests))
    with Pod(tmp_path / "manifest.yaml", name, tmp_path) as playing:
        yield playing


def test_the_manifest_serves_what_is_copied_into_its_claim_and_stops_cleanly(
    pod: Pod, repository: Path, ports: dict[str, int]
) -> None:
    url = f"http://127.0.0.1:{ports['http']}"
    waited = run_command("health", "--url", url, "--wait", "100")
    assert waited.returncode == 0, waited.stderr + pod.podman("logs", pod.name, fails=True)
    with urlopen(f"{url}/v2/health/ready") as answer:
        assert answer.status == 200

    pod.fill(repository / "model_repository")
    sample = repository / "docs" / "digits" / "seven.png"
    deadline = time.monotonic() + 120
    while (asked := run_command("classify", sample, "--model", "digits", "--url", url, "--json")).returncode:
        assert time.monotonic() < deadline, asked.stderr + pod.podman("logs", pod.name)
    assert json.loads(asked.stdout)[0]["classifications"][0]["label"] == "seven"

    assert pod.exec("id", "-u") == "1000\n"
    status = pod.exec("cat", "/proc/1/status")
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status
    assert pod.exec("sh", "-c", "touch /opt/x 2>&1 || true").endswith("Read-only file system\n")

    pod.podman(
        "stop", "--time", "60", pod.name
    )  # a plain SIGTERM would have it started again, as a deployment's pods are
    assert pod.podman("inspect", pod.name, "--format", "{{.State.Status}} {{.State.ExitCode}}").strip() == "exited 0"
