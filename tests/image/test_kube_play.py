"""The manifests of deploy/kubernetes, run by podman with the image: as near to a cluster as one machine comes.

podman ignores what it does not know (Service, NetworkPolicy, PodDisruptionBudget, some kinds of probes), and runs
one pod. What it takes is real: the user, the read-only root, the capabilities, the volumes, the command line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml
from containers import ENGINE, IMAGE
from kinds import kustomize, needs_kubectl
from running import free_ports, run_command

from rolling.pods import Pod, on_this_machine

pytestmark = [
    pytest.mark.image,
    needs_kubectl,
    pytest.mark.skipif(ENGINE != "podman", reason="kube play is podman's; GRAPHKILN_CONTAINER_ENGINE=podman"),
]


@pytest.fixture
def ports() -> dict[str, int]:
    return dict(zip(("http", "grpc", "metrics"), free_ports(3), strict=True))


@pytest.fixture
def pod(repository: Path, tmp_path: Path, ports: dict[str, int]) -> Iterator[Pod]:
    name = f"graphkiln-test-{ports['http']}"
    manifests = on_this_machine(kustomize(repository / "deploy/kubernetes/overlays/cpu"), name, ports, IMAGE)
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

    assert pod.end() == "exited 0"
