"""Local copy of a remote store to serve from. Only changes are fetched, and versions appear atomically.

The unit of copying is a version, or all files of a model that its versions share. Uploads are not atomic, so a version
is accepted only after two consecutive listings of it are equal and all files that its manifest names exist. `fetch`
uses the network and does not touch files that are served; `take_over` applies the changes. Files that were fetched
before an interruption are not fetched again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.repository.version_folders import version_number
from graphkiln_backend.storage.address import RemoteStoreError
from graphkiln_backend.storage.files import RemoteFile, RemoteFiles

_log = logging.getLogger("graphkiln.repository")

SETTLE_S = 1.0  # between the first two listings
_MANIFEST = "manifest.json"

Listing = Mapping[str, RemoteFile]
# Model and version number, or an empty string for the files that all versions of the model share.
Unit = tuple[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """Fetched files that are not served yet.

    Attributes:
        folder: Staging folder; holds `MODEL/VERSION` and `MODEL`.
        listing: Files of the remote store.
        changed: New and changed units.
        gone: Units that were removed from the remote store.
        waiting: Units that are incomplete or still changing.
    """

    folder: Path
    listing: Listing
    changed: frozenset[Unit] = frozenset()
    gone: frozenset[Unit] = frozenset()
    waiting: frozenset[Unit] = frozenset()


@dataclass(slots=True)
class RemoteCopy:
    """A local copy, used by one process at a time.

    Args:
        files: The remote store.
        folder: Folder for the copy and for staging; created if missing.
    """

    files: RemoteFiles
    folder: Path
    _seen: Listing | None = None
    _held: dict[str, RemoteFile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store.mkdir(parents=True, exist_ok=True)
        self._staging.mkdir(exist_ok=True)
        for folder in self._staging.iterdir():  # left by processes that were interrupted
            if folder != self._whole:
                shutil.rmtree(folder, ignore_errors=True)
        self._held = {path: file for path, file in self._read_stamps().items() if self._is_here(path, file)}

    @property
    def store(self) -> Path:
        """The model store to serve."""
        return self.folder / "models"

    @property
    def is_empty(self) -> bool:
        """True until a file was copied."""
        return not self._held

    def size_bytes(self) -> int:
        """Total size of all files."""
        return sum(file.size for file in self._held.values())

    def fetch(self, *, settled: bool = False) -> Changes:
        """Fetch changed files into a staging folder.

        Args:
            settled: Accept changes in the first call, after a second listing, instead of waiting for the next call.

        Raises:
            RemoteStoreError: The remote store cannot be read; the copy is unchanged.
            OSError: The disk is full.
        """
        listing = self.files.list()
        before, self._seen = self._seen, listing
        wanted, held = by_unit(listing), by_unit(self._held)
        changed = {unit for unit, files in wanted.items() if files != held.get(unit)}
        known = wanted if before is None and settled else by_unit(before or {})
        stable = {unit for unit in changed if known.get(unit) == wanted[unit]}
        folder = Path(tempfile.mkdtemp(dir=self._staging))
        try:
            self._fetch_units({unit: wanted[unit] for unit in stable}, folder)
            if stable and before is None:
                time.sleep(SETTLE_S)
            after = by_unit(self.files.list()) if stable else {}
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):  # the disk may be full
                shutil.rmtree(self._whole, ignore_errors=True)
            raise
        whole = {unit for unit in stable if after.get(unit) == wanted[unit] and _is_complete(folder, unit)}
        return Changes(
            folder=folder,
            listing=listing,
            changed=frozenset(whole),
            gone=frozenset(held.keys() - wanted.keys()),
            waiting=frozenset(changed - whole),
        )

    def take_over(self, changes: Changes) -> None:
        """Apply fetched changes to the copy; each version is replaced atomically.

        Raises:
            OSError: The copy cannot be written.
        """
        for unit in sorted(changes.gone):
            self._keep_only(unit, {}, changes.folder)
        for unit in sorted(changes.changed, reverse=True):  # versions before the configuration that may select them
            self._replace(unit, changes)
        models = {path.partition("/")[0] for path in self._held}
        for model in [model for model in self.store.iterdir() if model.name not in models]:
            shutil.rmtree(model, ignore_errors=True)
        self._write_stamps()
        shutil.rmtree(changes.folder, ignore_errors=True)

    @property
    def _staging(self) -> Path:
        return self.folder / "staging"

    @property
    def _whole(self) -> Path:
        """Completely fetched files that are not part of the copy yet; they survive an interruption."""
        return self._staging / "whole"

    @property
    def _stamps(self) -> Path:
        return self.folder / "stamps.json"

    def _fetch_units(self, units: Mapping[Unit, Listing], folder: Path) -> None:
        files = {path: file for listing in units.values() for path, file in listing.items()}
        changed = {path: file for path, file in files.items() if self._held.get(path) != file}
        for path in files.keys() - changed.keys():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            os.link(self.store / path, folder / path)  # safe: files of the copy are never modified
        missing = {path: file for path, file in changed.items() if not self._link_whole(path, file, folder)}
        self._check_room(sum(file.size for file in missing.values()))
        if missing:
            self._copy(missing, folder)
        shutil.rmtree(self._whole, ignore_errors=True)  # all files are linked into the folder

    def _whole_file(self, path: str, file: RemoteFile) -> Path:
        return self._whole / hashlib.sha256(repr((path, file.stamp, file.size)).encode()).hexdigest()

    def _link_whole(self, path: str, file: RemoteFile, folder: Path) -> bool:
        """Link a file that was fetched before an interruption into a folder; return true if there is one."""
        whole = self._whole_file(path, file)
        if not whole.exists():
            return False
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        os.link(whole, folder / path)
        return True

    def _copy(self, files: Listing, folder: Path) -> None:
        start, megabytes = time.monotonic(), sum(file.size for file in files.values()) / 1e6
        _log.info("%s: copying %d files, %.1f MB", self.files.address, len(files), megabytes)
        self._whole.mkdir(exist_ok=True)
        try:
            self.files.fetch_all(
                files, folder, lambda path: os.link(folder / path, self._whole_file(path, files[path]))
            )
        except SystemExit:  # raised by a signal: log the progress, since a startup probe may be too short
            paths = [folder / path for path in files]
            fetched = sum(path.stat().st_size for path in paths if path.exists()) / 1e6
            seconds = time.monotonic() - start
            _log.warning("%s: %.1f of %.1f MB copied in %.0f s", self.files.address, fetched, megabytes, seconds)
            raise

    def _check_room(self, needed_bytes: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if needed_bytes > free:
            raise RemoteStoreError(
                f"{self.files.address}: {needed_bytes / 1e6:.0f} MB do not fit into {self.folder}, "
                f"which has {free / 1e6:.0f} MB left",
                hint="free disk space, or use another folder: --cache DIR",
                passing=True,
            )

    def _replace(self, unit: Unit, changes: Changes) -> None:
        model, version = unit
        files = {path: file for path, file in changes.listing.items() if unit_of(path) == unit}
        self._keep_only(unit, files, changes.folder)
        (self.store / model).mkdir(exist_ok=True)
        if version:
            (changes.folder / model / version).rename(self.store / model / version)
        else:
            for path in files:
                (self.store / path).parent.mkdir(parents=True, exist_ok=True)
                (changes.folder / path).replace(self.store / path)
        self._held |= files

    def _keep_only(self, unit: Unit, files: Listing, aside: Path) -> None:
        """Remove a version atomically, or those shared files of a model that are not in `files`."""
        model, version = unit
        held = [path for path in self._held if unit_of(path) == unit]
        if version and (self.store / model / version).exists():
            (self.store / model / version).rename(Path(tempfile.mkdtemp(dir=aside)) / version)
        elif not version:
            for path in held:
                if path not in files:
                    (self.store / path).unlink(missing_ok=True)
        self._held = {path: file for path, file in self._held.items() if path not in held}

    def _is_here(self, path: str, file: RemoteFile) -> bool:
        try:
            return (self.store / path).stat().st_size == file.size
        except OSError:
            return False

    def _read_stamps(self) -> dict[str, RemoteFile]:
        """Read the stamps of copied files. If they cannot be read, return none, so that everything is fetched again."""
        try:
            document = json.loads(self._stamps.read_text())
            return {str(path): RemoteFile(str(stamp), int(size)) for path, (stamp, size) in document.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def _write_stamps(self) -> None:
        new = self._stamps.with_suffix(".new")
        new.write_text(json.dumps({path: (file.stamp, file.size) for path, file in self._held.items()}))
        new.replace(self._stamps)


def by_unit(listing: Listing) -> dict[Unit, dict[str, RemoteFile]]:
    """Group the files of a store by unit. Files outside of models are left out."""
    units: dict[Unit, dict[str, RemoteFile]] = {}
    for path, file in listing.items():
        if unit := unit_of(path):
            units.setdefault(unit, {})[path] = file
    return units


def unit_of(path: str) -> Unit | None:
    """Return the unit of a file; None for a file outside of models."""
    parts = path.split("/")
    if len(parts) < 2:
        return None
    return parts[0], parts[1] if len(parts) > 2 and version_number(parts[1]) is not None else ""


def _is_complete(folder: Path, unit: Unit) -> bool:
    """Return true if all files that the manifest names exist. A damaged manifest is reported when the version loads."""
    version = folder / unit[0] / unit[1]
    if not unit[1] or not (version / _MANIFEST).exists():
        return True
    try:
        manifest = Manifest.read(version / _MANIFEST)
    except ManifestError:
        return True
    golden = [manifest.golden.file] if manifest.golden else []
    labels = [manifest.labels_file] if manifest.labels_file else []
    named = [manifest.graph_file, *manifest.weights, *golden, *labels]
    return all((version / name).is_file() for name in named)
