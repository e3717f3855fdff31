"""Push a model store to a container registry as an artifact of CNCF ModelPack, a layer for each file.

Source: ModelPack, "Model Format Specification", "Model Artifact Configuration" and "Annotations".
"""

from __future__ import annotations

import json
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphkiln_backend.graph.errors import ManifestError, RepositoryError
from graphkiln_backend.graph.manifest import MANIFEST_FILE, Manifest
from graphkiln_backend.repository.stores import StoredModel, scan_stores, walk
from graphkiln_backend.storage.address import RemoteAddress
from graphkiln_backend.storage.files import translate
from graphkiln_backend.storage.oci import FILEPATH, MANIFEST_TYPE, TITLE, OciRegistry, digest_of, digest_of_file

ARTIFACT_TYPE = "application/vnd.cncf.model.manifest.v1+json"
CONFIG_TYPE = "application/vnd.cncf.model.config.v1+json"
_METADATA = "org.cncf.model.file.metadata+json"
# Constant, so that equal files give an equal digest, as the specification advises.
_CONSTANT = {"mode": 0o644, "uid": 0, "gid": 0, "mtime": "1970-01-01T00:00:00Z", "typeflag": ord("0")}
_KINDS = {
    "code": {".py", ".so", ".sh"},
    "dataset": {".npz"},
    "doc": {".md", ".rst", ".pdf", ".html"},
    "weight.config": {".pbtxt", ".json", ".txt", ".yaml", ".yml", ".sig", ".csv"},
}
_FORMATS = {".onnx": "onnx", ".xml": "openvino", ".plan": "tensorrt", ".pt": "pt"}
_ELEMENTS = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "int8": "int8"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed:
    """Result of a push.

    Attributes:
        digest: Digest of the manifest, for an immutable address `REPOSITORY@DIGEST`.
        files: Number of files.
        size_bytes: Size of all files.
    """

    digest: str
    files: int
    size_bytes: int


def push_store(store: Path, address: RemoteAddress) -> Pushed:
    """Push every visible file of a store's models to a container registry, as one artifact.

    The manifest holds no timestamps and no address, so that equal files give an equal digest. Files that the registry
    has are not uploaded again. The tag is set last, so that it never refers to an incomplete store.

    Args:
        store: The store.
        address: `oci://HOST/REPOSITORY:TAG`.

    Raises:
        RepositoryError: The store holds no model or an invalid one, or the address is not an `oci://` tag.
        RemoteStoreError: The upload failed.
        OSError: A file cannot be read.
    """
    if address.scheme != "oci" or address.root != address.options["artifact"] or "@" in address.root:
        raise RepositoryError(f"{address} is not the tag of an artifact", hint="expected oci://HOST/REPOSITORY:TAG")
    models = scan_stores([store])
    if not models:
        raise RepositoryError(f"{store} holds no model", hint="expected a model store, or a model in one")
    for model in models.values():
        if problem := model.problem or next(iter(model.faults.values()), ""):
            raise RepositoryError(f"cannot push {model.name}: {problem}")
    walked = (found for model in models.values() for found in walk(model.folder))
    files = [path for path, status in walked if stat.S_ISREG(status.st_mode)]
    try:
        registry = OciRegistry(address.root, address.options["protocol"])
        layers = [_upload_layer(registry, path, path.relative_to(store).as_posix()) for path in files]
        with tempfile.NamedTemporaryFile() as file:
            document = _configuration(models.values(), [layer["digest"] for layer in layers])
            Path(file.name).write_text(json.dumps(document))
            config = _upload(registry, Path(file.name), CONFIG_TYPE)
        head = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "artifactType": ARTIFACT_TYPE}
        manifest = json.dumps({**head, "config": config, "layers": layers}, separators=(",", ":")).encode()
        registry.publish(manifest)
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:  # a local file
            raise
        raise translate(error, address) from error
    return Pushed(digest=digest_of(manifest), files=len(layers), size_bytes=sum(layer["size"] for layer in layers))


def _configuration(models: Iterable[StoredModel], digests: list[str]) -> dict[str, Any]:
    """Describe the models, by what all of them have in common."""
    names = sorted(model.name for model in models)
    versions = [(model.folder / str(number), number) for model in models for number in model.versions]
    descriptor = {"name": names[0]} if len(names) == 1 else {"title": ", ".join(names)}
    if len(versions) == 1:
        descriptor["version"] = str(versions[0][1])
    technical: dict[str, str] = {}
    formats = {_FORMATS[path.suffix] for folder, _ in versions for path in folder.iterdir() if path.suffix in _FORMATS}
    if len(formats) == 1:
        technical["format"] = formats.pop()
    precisions = set()
    for folder, _ in versions:
        with suppress(OSError, ManifestError):  # of another tool
            manifest = Manifest.read(folder / MANIFEST_FILE)
            if made := manifest.conversion or manifest.adoption:
                precisions.add(_ELEMENTS[made.precision])
    if precisions:
        technical["precision"] = ",".join(sorted(precisions))
    modelfs = {"type": "layers", "diffIds": digests}
    return {"descriptor": descriptor, "config": technical, "modelfs": modelfs}


def _upload_layer(registry: OciRegistry, path: Path, name: str) -> dict[str, Any]:
    """Upload a file of a store and return its descriptor."""
    kind = next((kind for kind, suffixes in _KINDS.items() if path.suffix in suffixes), "weight")
    layer = _upload(registry, path, f"application/vnd.cncf.model.{kind}.v1.raw")
    metadata = {"name": name, "size": layer["size"], **_CONSTANT}
    # Other tools for files in registries, and graphkiln before it wrote ModelPack, read the title.
    return {**layer, "annotations": {FILEPATH: name, TITLE: name, _METADATA: json.dumps(metadata)}}


def _upload(registry: OciRegistry, path: Path, media_type: str) -> dict[str, Any]:
    """Upload a file and return its descriptor."""
    digest, size = digest_of_file(path), path.stat().st_size
    registry.upload(path, digest, size)
    return {"mediaType": media_type, "digest": digest, "size": size}
