"""Pulls a remote store's models into a store of this machine: the way back of `oci_push`, and of an upload to S3.

Everything is fetched into a hidden folder of the store first, where it can be judged as a whole. Then versions that are
new appear, each at once; what is there already stays what it is, and something else under the same name is refused. A
file that the store has, as a registry's digests tell, does not travel again.
"""

from __future__ import annotations

import filecmp
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository.oci_registry import digest_of_file
from graphkiln_backend.repository.remote_address import RemoteAddress, RemoteStoreError
from graphkiln_backend.repository.remote_copy import Listing, Unit, by_unit
from graphkiln_backend.repository.remote_files import RemoteFile, RemoteFiles
from graphkiln_backend.repository.remote_model import is_model
from graphkiln_backend.repository.stores import walk


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulled:
    """What a store got.

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
    """Models that were fetched, and are not in the store yet.

    Attributes:
        folder: Where they lie, as in a store.
        store: Where they belong.
        units: Their files: versions as wholes, and of each model what lies beside its versions.
    """

    folder: Path
    store: Path
    units: Mapping[Unit, Listing]

    def versions(self) -> list[Path]:
        """The folders of all versions that were fetched."""
        return [self.folder / model / version for model, version in sorted(self.units) if version]

    def place(self) -> Pulled:
        """Puts into the store what it does not have.

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
        """What the store has in the place of a version, or beside versions, and is not the same."""
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
    """The models of a remote store, of which nothing was fetched yet.

    Attributes:
        files: The remote store.
        units: Its files: versions as wholes, and of each model what lies beside its versions.
    """

    files: RemoteFiles
    units: Mapping[Unit, Listing]

    def fetch(self, store: Path, folder: Path) -> FetchedStore:
        """Fetches all of it, to be placed into a store of this machine.

        Args:
            store: Where it belongs.
            folder: Where it lies until then, empty; on the same file system.

        Raises:
            RemoteStoreError: It cannot be read.
            OSError: It cannot be written.
        """
        wanted = {path: file for listing in self.units.values() for path, file in listing.items()}
        missing = {path: file for path, file in wanted.items() if not _link(path, file, store, folder)}
        self.files.fetch_all(missing, folder)
        return FetchedStore(folder, store, self.units)


def list_store(address: RemoteAddress) -> ListedStore:
    """Lists the models of a remote store.

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
    """Links a file that the store has already, if its digest says so; whether it did."""
    here = store / path
    with suppress(OSError):  # no links on this file system, or the file cannot be read: it is fetched
        if here.is_file() and here.stat().st_size == file.size and digest_of_file(here) == file.stamp:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            os.link(here.resolve(), folder / path)
            return True
    return False
