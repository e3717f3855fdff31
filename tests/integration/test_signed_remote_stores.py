"""Signatures survive S3 and, as OCI artifacts, a real registry; altered versions do not go live."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest
import zoo
from factors import factor
from object_store import CREDENTIALS, ObjectStore
from oci_server import OciServer, needs_registry
from running import StartServer, run_command
from signed import make_key

pytestmark = [pytest.mark.server, pytest.mark.slow]

# Uploads a store and returns the address to serve it from.
Upload = Callable[[Path], str]


@pytest.fixture(params=["s3", pytest.param("oci", marks=needs_registry)])
def upload(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Upload]:
    monkeypatch.setenv("GRAPHKILN_CACHE", str(tmp_path / "cache"))
    if request.param == "oci":
        with OciServer(tmp_path / "registry") as registry:
            yield lambda store: push(store, f"oci://{registry.host}/team/models:live")
        return
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with ObjectStore() as objects:
        yield lambda store: copy(store, objects)


def push(store: Path, address: str) -> str:
    done = run_command("push", store, address)
    assert done.returncode == 0, done.stderr
    return address


def copy(store: Path, objects: ObjectStore) -> str:
    for path in sorted(path for path in store.rglob("*") if path.is_file()):
        objects.bucket("models").upload_file(str(path), f"signed/{path.relative_to(store)}")
    return f"s3://{objects.address}/models/signed"


def test_signature_is_uploaded_with_its_version(upload: Upload, start_server: StartServer, tmp_path: Path) -> None:
    _, public = make_key(tmp_path / "release")
    store = tmp_path / "store"
    zoo.add(store, "swap", zoo.scale(("batch", 3), 2))
    sign = ("sign", store / "swap", "--key", tmp_path / "release")
    assert run_command(*sign).returncode == 0
    address = upload(store)
    flags = ("--model-control-mode=poll", "--repository-poll-secs=1")
    server = start_server("--model-store", address, "--trusted-keys", public, *flags)
    server.wait_ready()
    assert factor(server) == 2

    zoo.add(store, "swap", zoo.scale(("batch", 3), 3), version=2)
    assert run_command(*sign).returncode == 0
    onnx.save(zoo.scale(("batch", 3), 9), store / "swap" / "2" / "model.onnx")
    upload(store)
    server.wait_until(
        lambda: "swap version 2 is not served: 2/model.onnx is not the file that was signed" in server.log
    )
    assert factor(server) == 2

    onnx.save(zoo.scale(("batch", 3), 3), store / "swap" / "2" / "model.onnx")
    upload(store)
    server.wait_until(lambda: factor(server) == 3)
