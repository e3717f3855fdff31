"""Models in remote stores: fetch one to inspect it, pull them into a local store, push a store to a registry."""

from __future__ import annotations

import filecmp
import json
import os
import stat
import tempfile
from collections.abc import Collection, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository.onnx_file import external_files
from graphkiln_backend.repository.remote_copy import Listing, Unit, by_unit
from graphkiln_backend.repository.stores import StoredModel, scan_stores, walk
from graphkiln_backend.repository.version_folders import is_version, version_number
from graphkiln_backend.storage.address import RemoteAddress, RemoteStoreError
from graphkiln_backend.storage.files import RemoteFile, RemoteFiles, translate
from graphkiln_backend.storage.oci import (
    ARTIFACT_TYPE,
    MANIFEST_TYPE,
    TITLE,
    OciRegistry,
    digest_of,
    digest_of_file,
)

_GRAPH_SUFFIX = ".onnx"


def fetch_path(address: RemoteAddress, folder: Path) -> Path:
    """Fetch what an address names: a model, a version of it, or a graph by itself.

    Args:
        address: `STORE/NAME`, `STORE/NAME/VERSION`, the graph of one, or any `FILE.onnx`.
        folder: Where to put it.

    Returns:
        The model's folder, the version's, or the file.

    Raises:
        RemoteStoreError: There is nothing, or it cannot be read.
    """
    if not address.root.endswith(_GRAPH_SUFFIX):
        return fetch_model(address, folder)
    above, _ = address.split()
    in_version = is_version(above.root.rpartition("/")[2])
    return fetch_model(above, folder) if in_version else fetch_file(address, folder)


def fetch_file(address: RemoteAddress, folder: Path) -> Path:
    """Fetch one file; of a graph, the files of its weights, too.

    Args:
        address: Of the file.
        folder: Where to put it.

    Returns:
        The file.

    Raises:
        RemoteStoreError: It cannot be read.
        RepositoryError: It is named like a graph and is not one.
    """
    above, name = address.split()
    files = RemoteFiles(above)
    path = folder / name
    files.fetch(name, path)
    for weights in external_files(path) if path.suffix == _GRAPH_SUFFIX else ():
        if ".." not in PurePosixPath(weights).parts and not weights.startswith("/"):  # else its reader refuses them
            (folder / weights).parent.mkdir(parents=True, exist_ok=True)
            files.fetch(weights, folder / weights)
    return path


def fetch_model(address: RemoteAddress, folder: Path) -> Path:
    """Fetch a model's newest version, or the named one, and the files beside its versions.

    Args:
        address: `STORE/NAME`, or `STORE/NAME/VERSION`.
        folder: Where to put it.

    Returns:
        The model's folder, or the version's.

    Raises:
        RemoteStoreError: There is no such model, or it cannot be read.
    """
    above, name = address.split()
    version = name if version_number(name) is not None else ""
    files = RemoteFiles(above if version else address)
    listing = files.list()
    numbers = {path: version_number(path.partition("/")[0]) for path in listing if "/" in path}
    chosen = version or str(max((number for number in numbers.values() if number is not None), default=""))
    wanted = [path for path in listing if numbers.get(path) is None or path.startswith(f"{chosen}/")]
    if not any(path.startswith(f"{chosen}/") for path in wanted):
        there = {number for number in numbers.values() if number is not None}
        raise _absent(address, above.root.rpartition("/")[2], there)
    model = folder / files.address.root.rpartition("/")[2]
    for path in wanted:
        (model / path).parent.mkdir(parents=True, exist_ok=True)
        files.fetch(path, model / path)
    return model / version


def is_model(listing: Collection[str]) -> bool:
    """Return true for the files of a model or of one version, rather than of a store.

    Args:
        listing: Their paths in it.
    """
    models = {path.partition("/")[0] for path in listing if "/" in path}
    return "config.pbtxt" in listing or (bool(models) and all(map(is_version, models)))


def _absent(address: RemoteAddress, model: str, there: Set[int]) -> RemoteStoreError:
    """Error for an address without a version.

    Args:
        address: `STORE/NAME/VERSION`, or `STORE/NAME`, which has none.
        model: Name of the model.
        there: Its versions.
    """
    if there:
        versions = ", ".join(map(str, sorted(there)))
        return RemoteStoreError(f"{address}: model '{model}' has no such version", hint=f"it has {versions}")
    return RemoteStoreError(f"there is no model at {address}", hint="STORE/NAME, or STORE/NAME/VERSION")


# Pulling: everything is fetched into a hidden folder of the store first and checked as a whole. Then new versions
# appear, each by one rename. Existing files are never replaced: a difference refuses the whole pull. A file that the
# store has already, by the registry's digest, is not fetched again.


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulled:
    """Result of a pull.

    Attributes:
        models: The names of all models that were asked for.
        files: How many files are new.
        size_bytes: These together.
    """

    models: tuple[str, ...]
    files: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FetchedStore:
    """Fetched models that are not in the store yet.

    Attributes:
        folder: Staging folder with the layout of a store.
        store: Target store.
        units: Their files, by version; without a version, files beside the versions.
    """

    folder: Path
    store: Path
    units: Mapping[Unit, Listing]

    def versions(self) -> list[Path]:
        """The folders of all versions that were fetched."""
        return [self.folder / model / version for model, version in sorted(self.units) if version]

    def place(self) -> Pulled:
        """Put into the store what it does not have.

        Raises:
            RepositoryError: It has something else under the same name; nothing was changed.
            OSError: It cannot be written.
        """
        if different := [path for unit in sorted(self.units) for path in self._different(unit)]:
            more = f", nor are {len(different) - 1} more" if len(different) > 1 else ""
            raise RepositoryError(
                f"{self.store / different[0]} is not what was pulled{more}; nothing was changed",
                hint="pull into another folder, or take the model or version out of this one",
            )
        new = {path: file for files in self.units.values() for path, file in files.items() if self._is_new(path)}
        for model in sorted({model for model, _ in self.units}):
            self._place_model(model)
        names = tuple(sorted({model for model, _ in self.units}))
        return Pulled(models=names, files=len(new), size_bytes=sum(file.size for file in new.values()))

    def _place_model(self, model: str) -> None:
        if not (self.store / model).exists():
            (self.folder / model).rename(self.store / model)
            return
        for unit in sorted((unit for unit in self.units if unit[0] == model), reverse=True):
            self._place_unit(unit)  # versions before the configuration that may select them

    def _place_unit(self, unit: Unit) -> None:
        model, version = unit
        if version and self._is_new(f"{model}/{version}"):
            (self.folder / model / version).rename(self.store / model / version)
            return
        for path in filter(self._is_new, self.units[unit]):
            (self.store / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).rename(self.store / path)

    def _is_new(self, path: str) -> bool:
        return not (self.store / path).exists()

    def _different(self, unit: Unit) -> list[str]:
        """Paths of a unit whose content in the store differs from the fetched one."""
        model, version = unit
        if version and self._is_new(f"{model}/{version}"):
            return []
        files = list(self.units[unit])
        if version:  # a version is the same when all of it is
            there = {str(path.relative_to(self.store)) for path, _ in walk(self.store / model / version)}
            files += sorted(path for path in there if (self.store / path).is_file() and path not in self.units[unit])
        return [path for path in files if not self._is_same(path, may_be_new=not version)]

    def _is_same(self, path: str, *, may_be_new: bool) -> bool:
        if self._is_new(path):
            return may_be_new
        fetched = self.folder / path
        return fetched.is_file() and filecmp.cmp(fetched, self.store / path, shallow=False)


@dataclass(frozen=True, slots=True)
class ListedStore:
    """Models of a remote store, listed and not fetched yet.

    Attributes:
        files: The remote store.
        units: Its files, by version; without a version, files beside the versions.
    """

    files: RemoteFiles
    units: Mapping[Unit, Listing]

    def fetch(self, store: Path, folder: Path) -> FetchedStore:
        """Fetch all of it into a staging folder.

        Args:
            store: Target store.
            folder: Empty staging folder on the same file system.

        Raises:
            RemoteStoreError: It cannot be read.
            OSError: It cannot be written.
        """
        wanted = {path: file for listing in self.units.values() for path, file in listing.items()}
        missing = {path: file for path, file in wanted.items() if not _link(path, file, store, folder)}
        self.files.fetch_all(missing, folder)
        return FetchedStore(folder, store, self.units)


def list_store(address: RemoteAddress) -> ListedStore:
    """List the models of a remote store.

    Args:
        address: The store, or a model in it.

    Raises:
        RemoteStoreError: There is no model, or it cannot be read.
    """
    files = RemoteFiles(address)
    listing = files.list()
    if is_model(listing):
        above, name = address.split()
        files, listing = RemoteFiles(above), {f"{name}/{path}": file for path, file in listing.items()}
    units = by_unit(listing)
    if not any(version for _, version in units):
        raise RemoteStoreError(f"there is no model at {address}", hint="name a model store, or a model of one")
    return ListedStore(files, units)


def _link(path: str, file: RemoteFile, store: Path, folder: Path) -> bool:
    """Link a file that the store has already, if its digest says so; whether it did."""
    here = store / path
    with suppress(OSError):  # no links on this file system, or the file cannot be read: it is fetched
        if here.is_file() and here.stat().st_size == file.size and digest_of_file(here) == file.stamp:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            os.link(here.resolve(), folder / path)
            return True
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Pushed:
    """Result of a push.

    Attributes:
        digest: Digest of the manifest: `REPOSITORY@DIGEST` names it for ever.
        files: Number of files.
        size_bytes: Size of all files.
    """

    digest: str
    files: int
    size_bytes: int


def push_store(store: Path, address: RemoteAddress) -> Pushed:
    """Push every visible file of a store's models to a container registry, as one artifact with a layer for each file.

    Equal files give an equal manifest and digest, since it holds no time and no name. Files that the registry has are
    not sent again, and the tag is moved last, so that it never names half a store.

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
    models = scan_stores([store])
    if not models:
        raise RepositoryError(f"{store} holds no model", hint="name a model store, or a model of one")
    files = [path for model in models.values() for path in _files_of_model(model)]
    try:
        registry = OciRegistry(address.root, address.options["protocol"])
        layers = []
        for path in files:
            title = path.relative_to(store).as_posix()
            layers.append({**_upload(registry, path, "application/octet-stream"), "annotations": {TITLE: title}})
        with tempfile.NamedTemporaryFile() as file:  # OCI Image Format, "Guidance for an Empty Descriptor"
            Path(file.name).write_bytes(b"{}")
            config = _upload(registry, Path(file.name), "application/vnd.oci.empty.v1+json")
        head = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "artifactType": ARTIFACT_TYPE}
        manifest = json.dumps({**head, "config": config, "layers": layers}, separators=(",", ":")).encode()
        registry.publish(manifest)
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:  # of this machine
            raise
        raise translate(error, address) from error
    return Pushed(digest=digest_of(manifest), files=len(layers), size_bytes=sum(layer["size"] for layer in layers))


def _files_of_model(model: StoredModel) -> list[Path]:
    if problem := model.problem or next(iter(model.faults.values()), ""):
        raise RepositoryError(f"{model.name} is not pushed: {problem}")
    return [path for path, status in walk(model.folder) if stat.S_ISREG(status.st_mode)]


def _upload(registry: OciRegistry, path: Path, media_type: str) -> dict[str, Any]:
    """Upload a file and return its descriptor."""
    digest, size = digest_of_file(path), path.stat().st_size
    registry.upload(path, digest, size)
    return {"mediaType": media_type, "digest": digest, "size": size}
