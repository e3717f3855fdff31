"""The manifests of deploy/kubernetes, run by podman with the image: see `rolling.pods`."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import trustme
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


def test_the_manifest_serves_a_model_that_is_copied_into_its_claim(
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


def test_the_secured_manifest_uses_tls_and_its_admin_key(repository: Path, tmp_path: Path) -> None:
    """Also for the page."""
    secrets, authority = make_secrets(tmp_path)
    ports = dict(zip(("http", "grpc", "metrics", "page"), free_ports(4), strict=True))
    name = f"graphkiln-test-{ports['http']}"
    rendered = kustomize(repository / "deploy/kubernetes/overlays/secured")
    manifests = on_this_machine(rendered, name, ports, IMAGE, secrets)
    (tmp_path / "manifest.yaml").write_text(yaml.safe_dump_all(manifests))
    connection = ("--url", f"https://127.0.0.1:{ports['http']}", "--ca-file", authority)
    with Pod(tmp_path / "manifest.yaml", name, tmp_path) as pod:
        waited = run_command("health", *connection, "--wait", "100")
        assert waited.returncode == 0, waited.stderr + pod.podman("logs", pod.name, fails=True)
        key = ("--admin-key-file", secrets["graphkiln-admin-key"] / "key")
        assert run_command("models", *connection, *key).returncode == 0
        (tmp_path / "wrong").write_text("wrong")
        refused = run_command("models", *connection, "--admin-key-file", tmp_path / "wrong")
        assert refused.returncode != 0
        context = ssl.create_default_context(cafile=authority)
        with urlopen(f"https://127.0.0.1:{ports['page']}/", context=context) as answer:
            assert b"<title>graphkiln</title>" in answer.read()
        assert pod.end() == "exited 0"


def make_secrets(folder: Path) -> tuple[dict[str, Path], Path]:
    """Folders of the Secrets of the overlay, and the certificate of the authority."""
    authority = trustme.CA()
    pair = authority.issue_cert("127.0.0.1")
    secrets = {name: folder / name for name in ("graphkiln-tls", "graphkiln-admin-key")}
    for each in secrets.values():
        each.mkdir()
    pair.cert_chain_pems[0].write_to_path(str(secrets["graphkiln-tls"] / "tls.crt"))
    pair.private_key_pem.write_to_path(str(secrets["graphkiln-tls"] / "tls.key"))
    (secrets["graphkiln-admin-key"] / "key").write_text("0123456789abcdef" * 4)
    authority.cert_pem.write_to_path(str(folder / "authority.pem"))
    return secrets, folder / "authority.pem"
