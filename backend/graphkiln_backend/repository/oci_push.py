"""Pushes a model store to a container registry, as one artifact with a layer for each file.

The same files make the same manifest, and so the same digest, whoever pushes them: it holds no time and no name.
Files that the registry has already are not sent again, and the tag appears last: nobody sees half a store.
"""

from __future__ import annotations

import json
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository.oci_registry import (
    ARTIFACT_TYPE,
    MANIFEST_TYPE,
    TITLE,
    OciRegistry,
    digest_of,
    digest_of_file,
)
from graphkiln_backend.repository.remote_address import RemoteAddress
from graphkiln_backend.repository.remote_files import translate
from graphkiln_backend.repository.stores import StoredModel, scan_stores, walk

_EMPTY = b"{}"
_EMPTY_TYPE = "application/vnd.oci.empty.v1+json"
_FILE_TYPE = "application/octet-stream"
_HEAD = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "artifactType": ARTIFACT_TYPE}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed:
    """What was pushed.

    Attributes:
        digest: Of the manifest: `REPOSITORY@DIGEST` names it for ever.
        files: How many.
        size_bytes: All together.
    """

    digest: str
    files: int
    size_bytes: int


def push_store(store: Path, address: RemoteAddress) -> Pushed:
    """Pushes every file of a store's models, but for hidden ones.

    Args:
        store: The store.
        address: `oci://HOST/REPOSITORY:TAG`.

    Raises:
        RepositoryError: There is no model, one has a problem, or the address is that of another service.
        RemoteStoreError: The registry does not take them.
        OSError: A file cannot be read.
    """
    if address.scheme != "oci" or address.root != address.options["artifact"] or "@" in address.root:
        raise RepositoryError(f"{address} is no artifact's tag", hint="oci://HOST/REPOSITORY:TAG")
    files = _files_of(store)
    try:
        registry = OciRegistry(address.root, address.options["protocol"])
        layers = [_upload(registry, path, title) for title, path in files.items()]
        manifest = _manifest(_upload_empty(registry), layers)
        registry.publish(manifest)
    except OSError as error:
        if error.filename is not None:  # of this machine
            raise
        raise translate(error, address) from error
    except Exception as error:
        raise translate(error, address) from error
    return Pushed(digest=digest_of(manifest), files=len(layers), size_bytes=sum(layer["size"] for layer in layers))


def _files_of(store: Path) -> dict[str, Path]:
    """Path in the store -> file, of every model.

    Raises:
        RepositoryError: There is no model, or one has a problem.
    """
    models = scan_stores([store])
    if not models:
        raise RepositoryError(f"{store} holds no model", hint="name a model store, or a model of one")
    return {path.relative_to(store).as_posix(): path for model in models.values() for path in _files_of_model(model)}


def _files_of_model(model: StoredModel) -> list[Path]:
    if problem := model.problem or next(iter(model.faults.values()), ""):
        raise RepositoryError(f"{model.name} is not pushed: {problem}")
    return [path for path, status in walk(model.folder) if stat.S_ISREG(status.st_mode)]


def _upload(registry: OciRegistry, path: Path, title: str) -> dict[str, Any]:
    """Uploads a file; its descriptor."""
    return {**_upload_blob(registry, path, _FILE_TYPE), "annotations": {TITLE: title}}


def _upload_blob(registry: OciRegistry, path: Path, media_type: str) -> dict[str, Any]:
    digest, size = digest_of_file(path), path.stat().st_size
    registry.upload(path, digest, size)
    return {"mediaType": media_type, "digest": digest, "size": size}


def _upload_empty(registry: OciRegistry) -> dict[str, Any]:
    """Uploads what artifacts have for a configuration. Source: OCI Image Format, "Guidance for an Empty Descriptor"."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(_EMPTY)
        return _upload_blob(registry, Path(file.name), _EMPTY_TYPE)


def _manifest(config: dict[str, Any], layers: list[dict[str, Any]]) -> bytes:
    return json.dumps({**_HEAD, "config": config, "layers": layers}, separators=(",", ":")).encode()
