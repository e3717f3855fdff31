"""Models in remote stores: fetch one to inspect it, pull them into a local store."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository.onnx_file import external_files
from graphkiln_backend.repository.openvino_ir import is_ir, weights_of
from graphkiln_backend.repository.remote_copy import Listing, Unit, by_unit
from graphkiln_backend.repository.stores import walk
from graphkiln_backend.repository.version_folders import is_version, version_number
from graphkiln_backend.storage.address import RemoteAddress, RemoteStoreError
from graphkiln_backend.storage.files import RemoteFile, RemoteFiles
from graphkiln_backend.storage.oci import digest_of_file

_GRAPH_SUFFIX = ".onnx"
_GRAPH_SUFFIXES = (_GRAPH_SUFFIX, ".xml")


def fetch_path(address: RemoteAddress, folder: Path) -> Path:
    """Fetch a model, a version of it, or a single graph.

    Args:
        address: `STORE/NAME`, `STORE/NAME/VERSION`, the graph of a version, or any `FILE.onnx` or `FILE.xml`.
        folder: Target folder.

    Returns:
        The local folder of the model or version, or the local file.

    Raises:
        RemoteStoreError: The address does not exist or cannot be read.
    """
    if not address.root.endswith(_GRAPH_SUFFIXES):
        return fetch_model(address, folder)
    above, _ = address.split()
    in_version = is_version(above.root.rpartition("/")[2])
    return fetch_model(above, folder) if in_version else fetch_file(address, folder)


def fetch_file(address: RemoteAddress, folder: Path) -> Path:
    """Fetch one file and, if it is a graph, its external weights.

    Args:
        address: Address of the file.
        folder: Target folder.

    Returns:
        The local file.

    Raises:
        RemoteStoreError: The file cannot be read.
        RepositoryError: The file has the suffix of a graph but is not an ONNX graph.
    """
    above, name = address.split()
    files = RemoteFiles(above)
    path = folder / name
    files.fetch(name, path)
    if is_ir(path):
        files.fetch(weights_of(path).name, weights_of(path))
    for weights in external_files(path) if path.suffix == _GRAPH_SUFFIX else ():
        if ".." not in PurePosixPath(weights).parts and not weights.startswith(
            "/"
        ):  # other paths are refused when the graph is read
            (folder / weights).parent.mkdir(parents=True, exist_ok=True)
            files.fetch(weights, folder / weights)
    return path


def fetch_model(address: RemoteAddress, folder: Path) -> Path:
    """Fetch one version of a model (the newest by default) and the files that its versions share.

    Args:
        address: `STORE/NAME` or `STORE/NAME/VERSION`.
        folder: Target folder.

    Returns:
        The local folder of the model, or of the version if the address names one.

    Raises:
        RemoteStoreError: The model does not exist or cannot be read.
    """
    above, name = address.split()
    version = name if version_number(name) is not None else ""
    files = RemoteFiles(above if version else address)
    listing = files.list()
    numbers = {path: version_number(path.partition("/")[0]) for path in listing if "/" in path}
    chosen = version or str(max((number for number in numbers.values() if number is not None), default=""))
    wanted = [path for path in listing if numbers.get(path) is None or path.startswith(f"{chosen}/")]
    if not any(path.startswith(f"{chosen}/") for path in wanted):
        if existing := sorted({number for number in numbers.values() if number is not None}):
            raise RemoteStoreError(
                f"{address}: model '{above.root.rpartition('/')[2]}' has no such version",
                hint=f"existing versions: {', '.join(map(str, existing))}",
            )
        raise RemoteStoreError(f"there is no model at {address}", hint="STORE/NAME, or STORE/NAME/VERSION")
    model = folder / files.address.root.rpartition("/")[2]
    for path in wanted:
        (model / path).parent.mkdir(parents=True, exist_ok=True)
        files.fetch(path, model / path)
    return model / version


def is_model(listing: Collection[str]) -> bool:
    """Return true if these paths are the files of one model rather than of a store."""
    models = {path.partition("/")[0] for path in listing if "/" in path}
    return "config.pbtxt" in listing or (bool(models) and all(map(is_version, models)))


# A pull fetches everything into a hidden staging folder of the store and checks it as a whole. Then each new version is
# moved into place by one rename. Existing files are never replaced: if one differs, the whole pull is refused. Files
# that the store has already, according to the registry's digest, are not fetched again.


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulled:
    """Result of a pull.

    Attributes:
        models: Names of all requested models.
        files: Number of new files.
        size_bytes: Total size of the new files.
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
        units: Files by version, or by model for files that its versions share.
    """

    folder: Path
    store: Path
    units: Mapping[Unit, Listing]

    def versions(self) -> list[Path]:
        """Staging folders of all fetched versions."""
        return [self.folder / model / version for model, version in sorted(self.units) if version]

    def place(self) -> Pulled:
        """Move the files that the store does not have yet into it.

        Raises:
            RepositoryError: An existing file of the store differs; nothing was changed.
            OSError: The store cannot be written.
        """
        if different := [path for unit in sorted(self.units) for path in self._different(unit)]:
            more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
            raise RepositoryError(
                f"{self.store / different[0]}{more} differs from the pulled file; nothing was changed",
                hint="pull into another folder, or remove the model or version from this one",
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
        if version:  # local files that were not pulled are a difference, too
            local = {str(path.relative_to(self.store)) for path, _ in walk(self.store / model / version)}
            files += sorted(path for path in local if (self.store / path).is_file() and path not in self.units[unit])
        return [path for path in files if not self._is_same(path, may_be_new=not version)]

    def _is_same(self, path: str, *, may_be_new: bool) -> bool:
        if self._is_new(path):
            return may_be_new
        fetched = self.folder / path
        return fetched.is_file() and filecmp.cmp(fetched, self.store / path, shallow=False)


@dataclass(frozen=True, slots=True)
class ListedStore:
    """Models of a remote store that are listed, but not fetched yet.

    Attributes:
        files: The remote store.
        units: Files by version, or by model for files that its versions share.
    """

    files: RemoteFiles
    units: Mapping[Unit, Listing]

    def fetch(self, store: Path, folder: Path) -> FetchedStore:
        """Fetch all models into a staging folder.

        Args:
            store: Target store.
            folder: Empty staging folder on the same file system.

        Raises:
            RemoteStoreError: The remote store cannot be read.
            OSError: The staging folder cannot be written.
        """
        wanted = {path: file for listing in self.units.values() for path, file in listing.items()}
        missing = {path: file for path, file in wanted.items() if not _link(path, file, store, folder)}
        self.files.fetch_all(missing, folder)
        return FetchedStore(folder, store, self.units)


def list_store(address: RemoteAddress) -> ListedStore:
    """List the models of a remote store.

    Args:
        address: A store or a model in it.

    Raises:
        RemoteStoreError: The store holds no model or cannot be read.
    """
    files = RemoteFiles(address)
    listing = files.list()
    if is_model(listing):
        above, name = address.split()
        files, listing = RemoteFiles(above), {f"{name}/{path}": file for path, file in listing.items()}
    units = by_unit(listing)
    if not any(version for _, version in units):
        raise RemoteStoreError(f"there is no model at {address}", hint="expected a model store, or a model in one")
    return ListedStore(files, units)


def _link(path: str, file: RemoteFile, store: Path, folder: Path) -> bool:
    """Link a file that the store has already, with the same digest; return true on success."""
    local = store / path
    with suppress(OSError):  # the file cannot be read, or the file system has no links: fetch the file
        if local.is_file() and local.stat().st_size == file.size and digest_of_file(local) == file.stamp:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            os.link(local.resolve(), folder / path)
            return True
    return False
