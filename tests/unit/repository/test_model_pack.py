"""Push a store as an artifact of ModelPack, and read those of others: a real registry, and another tool."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.request import Request, urlopen

import jsonschema
import pytest
from modelpack_client import ModelLayer, ModelPackClient, ModelPackConfig
from modelpack_client.schema import CONFIG_SCHEMA
from oci_server import OciServer, needs_registry
from tiny import convert

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository.model_pack import push_store
from graphkiln_backend.storage.address import RemoteAddress, RemoteStoreError
from graphkiln_backend.storage.files import RemoteFiles
from graphkiln_backend.storage.oci import MANIFEST_TYPE, OciRegistry, digest_of


def address(text: str) -> RemoteAddress:
    parsed = RemoteAddress.parse(text)
    assert parsed
    return parsed


@pytest.fixture
def local_store(tmp_path: Path) -> Path:
    for model, content in (("a", b"one"), ("b", b"one")):
        (tmp_path / model / "1").mkdir(parents=True)
        (tmp_path / model / "1" / "model.onnx").write_bytes(content)
    return tmp_path


def get(oci_registry: OciServer, path: str) -> bytes:
    with urlopen(Request(f"http://{oci_registry.host}/v2/models/{path}", headers={"Accept": MANIFEST_TYPE})) as answer:
        content: bytes = answer.read()
        return content


@needs_registry
class TestSpecification:
    """Of "Model Format Specification"; the configuration by its JSON schema."""

    def test_manifest(self, oci_registry: OciServer, local_store: Path) -> None:
        pushed = push_store(local_store, address(f"oci://{oci_registry.host}/models:1"))
        assert (pushed.files, pushed.size_bytes) == (2, 6)
        content = get(oci_registry, "manifests/1")
        assert pushed.digest == digest_of(content)
        manifest = json.loads(content)
        assert (manifest["schemaVersion"], manifest["mediaType"]) == (2, "application/vnd.oci.image.manifest.v1+json")
        assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
        assert manifest["config"]["mediaType"] == "application/vnd.cncf.model.config.v1+json"
        assert [layer["annotations"]["org.cncf.model.filepath"] for layer in manifest["layers"]] == [
            "a/1/model.onnx",
            "b/1/model.onnx",
        ]
        assert {layer["digest"] for layer in manifest["layers"]} == {digest_of(b"one")}
        metadata = json.loads(manifest["layers"][0]["annotations"]["org.cncf.model.file.metadata+json"])
        assert metadata == {
            "name": "a/1/model.onnx", "mode": 0o644, "uid": 0, "gid": 0, "size": 3,
            "mtime": "1970-01-01T00:00:00Z", "typeflag": 48,
        }  # fmt: skip

    def test_media_types(self, oci_registry: OciServer, local_store: Path) -> None:
        names = ("config.pbtxt", "labels.txt", "1/model.py", "1/golden.npz", "1/model.sig", "README.md", "1/w.data")
        for name in names:
            (local_store / "a" / name).write_text("x")
        push_store(local_store, address(f"oci://{oci_registry.host}/models:kinds"))
        layers = json.loads(get(oci_registry, "manifests/kinds"))["layers"]
        kinds = {Path(each["annotations"]["org.cncf.model.filepath"]).name: each["mediaType"] for each in layers}
        assert {name: kind.removeprefix("application/vnd.cncf.model.") for name, kind in kinds.items()} == {
            "config.pbtxt": "weight.config.v1.raw", "labels.txt": "weight.config.v1.raw",
            "model.sig": "weight.config.v1.raw", "model.py": "code.v1.raw", "golden.npz": "dataset.v1.raw",
            "README.md": "doc.v1.raw", "w.data": "weight.v1.raw", "model.onnx": "weight.v1.raw",
        }  # fmt: skip

    def test_configuration(
        self, oci_registry: OciServer, local_store: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        version = convert(tmp_path_factory.mktemp("converted"))
        for store, tag in ((local_store, "two"), (version.parent.parent, "one")):
            push_store(store, address(f"oci://{oci_registry.host}/models:{tag}"))
            manifest = json.loads(get(oci_registry, f"manifests/{tag}"))
            found = json.loads(get(oci_registry, f"blobs/{manifest['config']['digest']}"))
            jsonschema.validate(found, CONFIG_SCHEMA)
            assert found["modelfs"]["diffIds"] == [layer["digest"] for layer in manifest["layers"]]
            if tag == "two":
                assert (found["descriptor"], found["config"]) == ({"title": "a, b"}, {"format": "onnx"})
        assert found["descriptor"] == {"name": version.parent.name, "version": "1"}
        assert found["config"] == {"format": "onnx", "precision": "float32"}


@needs_registry
class TestAnotherTool:
    """Tool: modelpack-client."""

    @pytest.fixture
    def tool(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelPackClient:
        monkeypatch.setenv("HOME", str(tmp_path))
        return ModelPackClient(insecure=True)

    def test_reads_ours(self, tool: ModelPackClient, oci_registry: OciServer, local_store: Path) -> None:
        (local_store / "a" / "config.pbtxt").write_text("max_batch_size: 8\n")
        push_store(local_store, address(f"oci://{oci_registry.host}/models:theirs"))
        pulled = local_store / "pulled"
        tool.pull(f"{oci_registry.host}/models:theirs", pulled)
        files = {path.relative_to(pulled).as_posix() for path in pulled.rglob("*") if path.is_file()}
        assert files == {"a/1/model.onnx", "a/config.pbtxt", "b/1/model.onnx"}
        assert all((pulled / name).read_bytes() == (local_store / name).read_bytes() for name in files)

    def test_writes_for_us(self, tool: ModelPackClient, oci_registry: OciServer, local_store: Path) -> None:
        layer = ModelLayer(local_store / "a" / "1" / "model.onnx", artifact_path="m/1/model.onnx")
        tool.push(f"{oci_registry.host}/models:ours", [layer], ModelPackConfig())
        files = RemoteFiles(address(f"oci://{oci_registry.host}/models:ours"))
        assert list(files.list()) == ["m/1/model.onnx"]
        files.fetch("m/1/model.onnx", local_store / "fetched")
        assert (local_store / "fetched").read_bytes() == b"one"

    @pytest.mark.parametrize("kind", ["tar", "tar+gzip", "tar+zstd"])
    def test_archives(self, tool: ModelPackClient, oci_registry: OciServer, local_store: Path, kind: str) -> None:
        media_type = f"application/vnd.cncf.model.weight.v1.{kind}"
        layer = ModelLayer(local_store / "a", media_type=media_type, artifact_path="a")
        tool.push(f"{oci_registry.host}/models:archive", [layer], ModelPackConfig())
        with pytest.raises(RemoteStoreError, match=r"has archives \(.*expected files as they are \(modctl build --raw"):
            RemoteFiles(address(f"oci://{oci_registry.host}/models:archive")).list()


@needs_registry
def test_artifacts_of_before(oci_registry: OciServer, tmp_path: Path) -> None:
    """With `application/vnd.graphkiln.model-store.v1`, titles and an empty configuration."""
    registry = OciRegistry(f"{oci_registry.host}/models:before", "http")
    for content in (b"one", b"{}"):
        (tmp_path / "blob").write_bytes(content)
        registry.upload(tmp_path / "blob", digest_of(content), len(content))
    title = {"org.opencontainers.image.title": "m/1/model.onnx"}
    layer = {"mediaType": "application/octet-stream", "digest": digest_of(b"one"), "size": 3, "annotations": title}
    config = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": digest_of(b"{}"), "size": 2}
    head = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "artifactType": "application/vnd.graphkiln.model-store.v1"}
    registry.publish(json.dumps({**head, "config": config, "layers": [layer]}).encode())
    files = RemoteFiles(address(f"oci://{oci_registry.host}/models:before"))
    assert list(files.list()) == ["m/1/model.onnx"]
    files.fetch("m/1/model.onnx", tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == b"one"


@needs_registry
def test_equal_files_give_an_equal_digest(oci_registry: OciServer, local_store: Path) -> None:
    first = push_store(local_store, address(f"oci://{oci_registry.host}/models:first"))
    (local_store / "a" / "1" / "model.onnx").touch()
    assert push_store(local_store, address(f"oci://{oci_registry.host}/other:second")) == first
    (local_store / "a" / "1" / "model.onnx").write_bytes(b"two")
    assert push_store(local_store, address(f"oci://{oci_registry.host}/models:first")).digest != first.digest


@pytest.mark.parametrize("text", ["s3://bucket/models", f"oci://h/r@sha256:{'0' * 64}", "oci://h/r:1/model"])
def test_push_to_another_address_is_refused(local_store: Path, text: str) -> None:
    with pytest.raises(RepositoryError, match="is not the tag of an artifact"):
        push_store(local_store, address(text))


def test_faulty_model_is_not_pushed(local_store: Path) -> None:
    (local_store / "a" / "1" / "pipe").symlink_to("/dev/null")
    with pytest.raises(RepositoryError, match=r"cannot push a: .*neither a file nor a folder"):
        push_store(local_store, address("oci://127.0.0.1:1/r:1"))


def test_unreachable_registry(local_store: Path) -> None:
    with pytest.raises(RepositoryError, match="cannot be reached"):
        push_store(local_store, address("oci://127.0.0.1:1/r:1"))
