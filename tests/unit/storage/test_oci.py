"""Model stores as OCI artifacts: manifests, and reading from a real registry (Debian's docker-registry)."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import trustme
from faulty_registry import FaultyRegistry
from oci_server import OciServer, needs_registry

from graphkiln_backend.repository.model_pack import push_store
from graphkiln_backend.storage import oci as module
from graphkiln_backend.storage.address import RemoteAddress, RemoteStoreError
from graphkiln_backend.storage.files import RemoteFiles
from graphkiln_backend.storage.oci import OciRegistry, digest_of, read_layers, split_root

# The password is `secret`.
PASSWORDS = "ann:$2b$04$1ZcQ4Eeq1e0mz9jqkMhKIesMpmkF0bAOH8VSv8daH2a4ou8OpnSSy\n"
LAYER = {"digest": "sha256:" + "0" * 64, "size": 3, "annotations": {"org.opencontainers.image.title": "m/1/model.onnx"}}


def address(text: str) -> RemoteAddress:
    parsed = RemoteAddress.parse(text)
    assert parsed
    return parsed


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    (folder / "m" / "1").mkdir(parents=True)
    (folder / "m" / "config.pbtxt").write_text("max_batch_size: 8\n")
    (folder / "m" / "1" / "model.onnx").write_bytes(b"one")
    (folder / "m" / "1" / ".hidden").write_bytes(b"no")
    return folder


class TestManifest:
    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"no JSON", "its manifest is damaged"),
            (json.dumps({"layers": [LAYER]}).encode()[:-9], "its manifest is damaged"),
            (b"[]", "its manifest is damaged"),
            (b"{}", "its type is unknown"),
            (b'{"layers": [1]}', "its type is unknown"),
            (b'{"layers": [{"digest": "sha256:00"}]}', "its type is unknown"),
            (b'{"manifests": [], "mediaType": "application/vnd.oci.image.index.v1+json"}', "type is .*image.index"),
            (b'{"layers": [], "config": {"mediaType": "application/vnd.oci.image.config.v1+json"}}', "image.config"),
            (b'{"layers": [], "config": {"mediaType": "application/vnd.cncf.helm.config.v1+json"}}', "cncf.helm"),
        ],
    )
    def test_manifest_without_files(self, content: bytes, words: str) -> None:
        with pytest.raises(RemoteStoreError, match=rf"oci://h/r:1 is not an artifact with files: .*{words}") as raised:
            read_layers(content, "h/r:1")
        assert raised.value.hint.startswith("graphkiln push STORE")

    @pytest.mark.parametrize("kind", ["cncf.model.weight.v1.tar", "kitops.modelkit.model.v1.tar+gzip"])
    def test_archives(self, kind: str) -> None:
        layers = [LAYER, {**LAYER, "mediaType": f"application/vnd.{kind}"}]
        with pytest.raises(RemoteStoreError, match=r"has archives \(application/vnd"):
            read_layers(json.dumps({"layers": layers}).encode(), "h/r:1")

    @pytest.mark.parametrize("changed", [{"digest": "md5:0"}, {"digest": 7}, {"size": -1}, {"size": "3"}])
    def test_invalid_layer(self, changed: dict[str, object]) -> None:
        with pytest.raises(RemoteStoreError):
            read_layers(json.dumps({"layers": [{**LAYER, **changed}]}).encode(), "h/r:1")


def test_split_root() -> None:
    assert split_root("h:5000/a/b:7") == ("h:5000/a/b:7", "")
    assert split_root("h/a:7/m/1") == ("h/a:7", "m/1")
    with pytest.raises(RemoteStoreError, match="is not an artifact"):
        split_root("h/a")


@needs_registry
class TestReading:
    def test_list_and_fetch(self, oci_registry: OciServer, store: Path, tmp_path: Path) -> None:
        pushed = push_store(store, address(f"oci://{oci_registry.host}/team/models:1"))
        files = RemoteFiles(address(f"oci://{oci_registry.host}/team/models:1"))
        listed = files.list()
        assert {path: file.size for path, file in listed.items()} == {"m/config.pbtxt": 18, "m/1/model.onnx": 3}
        assert listed["m/1/model.onnx"].stamp == digest_of(b"one")
        files.fetch("m/1/model.onnx", tmp_path / "fetched")
        assert (tmp_path / "fetched").read_bytes() == b"one"
        pinned = RemoteFiles(address(f"oci://{oci_registry.host}/team/models@{pushed.digest}"))
        assert pinned.list() == listed

    def test_folder_of_an_artifact(self, oci_registry: OciServer, store: Path, tmp_path: Path) -> None:
        push_store(store, address(f"oci://{oci_registry.host}/models:folder"))
        files = RemoteFiles(address(f"oci://{oci_registry.host}/models:folder/m/1"))
        files.fetch("model.onnx", tmp_path / "before it was listed")
        assert (tmp_path / "before it was listed").read_bytes() == b"one"
        assert list(files.list()) == ["model.onnx"]

    def test_moved_tag(self, oci_registry: OciServer, store: Path, tmp_path: Path) -> None:
        there = address(f"oci://{oci_registry.host}/models:moving")
        push_store(store, there)
        files = RemoteFiles(there)
        before = files.list()
        (store / "m" / "1" / "model.onnx").write_bytes(b"two")
        push_store(store, there)
        files.fetch("m/1/model.onnx", tmp_path / "fetched")
        assert (tmp_path / "fetched").read_bytes() == b"one"
        assert files.list() != before

    def test_altered_blob_is_refused(self, oci_registry: OciServer, store: Path, tmp_path: Path) -> None:
        (store / "m" / "1" / "model.onnx").write_bytes(b"good")
        push_store(store, address(f"oci://{oci_registry.host}/models:altered"))
        oci_registry.blob(digest_of(b"good")).write_bytes(b"evil")
        files = RemoteFiles(address(f"oci://{oci_registry.host}/models:altered"))
        with pytest.raises(RemoteStoreError, match="sent other bytes than sha256:"):
            files.fetch("m/1/model.onnx", tmp_path / "fetched")

    def test_missing_file(self, oci_registry: OciServer, store: Path, tmp_path: Path) -> None:
        push_store(store, address(f"oci://{oci_registry.host}/models:files"))
        with pytest.raises(RemoteStoreError, match="there is no such"):
            RemoteFiles(address(f"oci://{oci_registry.host}/models:files")).fetch("m/2/model.onnx", tmp_path / "x")


def test_unreachable_registry() -> None:
    with pytest.raises(RemoteStoreError, match="cannot be reached") as raised:
        RemoteFiles(address("oci://127.0.0.1:1/models:1")).list()
    assert raised.value.passing


@needs_registry
@pytest.mark.parametrize("variable", ["", "DOCKER_CONFIG"])
def test_credentials_of_docker(variable: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DOCKER_CONFIG", raising=False)
    with OciServer(tmp_path / "registry", PASSWORDS) as server:
        there = address(f"oci://{server.host}/models:1")
        for act in (lambda: push_store(store, there), RemoteFiles(there).list):
            with pytest.raises(RemoteStoreError, match=r"access is denied \(.*docker login") as raised:
                act()
            assert not raised.value.passing
        folder = tmp_path / ("elsewhere" if variable else ".docker")
        folder.mkdir()
        if variable:
            monkeypatch.setenv(variable, str(folder))
        entry = {"auth": base64.b64encode(b"ann:secret").decode()}
        (folder / "config.json").write_text(json.dumps({"auths": {server.host: entry}}))
        push_store(store, there)
        assert "m/1/model.onnx" in RemoteFiles(there).list()


class TestFaults:
    """Faults of a registry are one line that names them, and transient where they may be."""

    @pytest.fixture
    def faulty(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyRegistry]:
        monkeypatch.setattr(module, "_TIMEOUTS_S", (10, 0.2))
        with FaultyRegistry({"m/1/model.onnx": b"the content of a file"}) as registry:
            yield registry

    @pytest.mark.parametrize(
        ("fault", "words"),
        [
            ("missing", "the registry has lost sha256:"),
            ("altered", "the registry sent other bytes than sha256:"),
            ("cut", "cannot be reached|other bytes than sha256:"),
            ("broken", "500 Server Error"),
            ("hang", "cannot be reached"),
            ("hang half way", "cannot be reached"),
        ],
    )
    def test_faults_of_a_file(self, faulty: FaultyRegistry, tmp_path: Path, fault: str, words: str) -> None:
        faulty.fault = fault
        files = RemoteFiles(address(faulty.address))
        with pytest.raises(RemoteStoreError, match=words) as raised:
            files.fetch_all(files.list(), tmp_path)
        assert raised.value.passing
        assert "\n" not in str(raised.value)

    def test_silent_registry(self, faulty: FaultyRegistry) -> None:
        faulty.fault = "silent"
        with pytest.raises(RemoteStoreError, match="cannot be reached") as raised:
            RemoteFiles(address(faulty.address)).list()
        assert raised.value.passing


@pytest.mark.parametrize(
    ("artifact", "asked"),
    [
        ("registry/models:1", "http://registry/v2/models/manifests/1"),
        ("registry/team.a/models:1", "http://registry/v2/team.a/models/manifests/1"),
        ("h.example:5000/team/models:1", "http://h.example:5000/v2/team/models/manifests/1"),
        (f"h/models:1@sha256:{'0' * 64}", f"http://h/v2/models/manifests/sha256:{'0' * 64}"),
    ],
)
def test_manifest_url(artifact: str, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def answer(url: str, **_: object) -> SimpleNamespace:
        seen.append(url)
        return SimpleNamespace(status_code=200, content=b"{}", raise_for_status=lambda: None)

    registry = OciRegistry(artifact, "http")
    monkeypatch.setattr(registry, "_once", answer)
    registry.manifest()
    assert seen == [asked]


class TestTls:
    FILES: ClassVar = {"m/1/model.onnx": b"content"}

    @pytest.fixture(autouse=True)
    def _no_proxy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
        monkeypatch.delenv("CURL_CA_BUNDLE", raising=False)

    def test_private_certificate_authority(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        authority = trustme.CA()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        with FaultyRegistry(self.FILES, context) as registry:
            files = RemoteFiles(address(registry.address.replace("oci://", "oci://https://")))
            with pytest.raises(RemoteStoreError, match="its certificate is not trusted") as raised:
                files.list()
            assert raised.value.hint.startswith("REQUESTS_CA_BUNDLE ")
            monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "ca.pem"))
            assert list(files.list()) == ["m/1/model.onnx"]
