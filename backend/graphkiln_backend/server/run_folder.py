"""The temporary folder of one server run: the assembled backend directory, linked stores, and status files.

In `/tmp/graphkiln-XXXX/`:

- `owner.json`: says that the folder has an owner (graphkiln_backend.system.owned_folder)
- `address.json`: where its server listens (graphkiln_backend.server.served_address)
- `backends/python/`: Triton's Python backend with the stub of the running Python
- `backends/graphkiln/`: model.py, which imports graphkiln_backend.triton.model
- `backends/onnxruntime/`: the same, where no C++ backend of that name is installed
- `backends/oneflow/`: the same, for repositories of oneflow-serving
- `stores/0`, `1`, ...: links to model stores whose paths Triton cannot take
- `cache`: a link to the artifact cache, where its path is not ASCII
- `overlay/0`, `1`, ...: mirrors of the stores with complete configurations (graphkiln_backend.repository.overlay)
- `instances/`: a link to `/dev/shm/graphkiln-XXXX-instances/`, status files (graphkiln_backend.triton.instance_status)
- `shared/`: graphs whose weights several instances map (graphkiln_backend.engines.onnxruntime.shared_weights)
- `tmp/`: TMPDIR of the server and its stubs, so that what runtimes leave there goes with the run

What Triton makes beside it, in /tmp, goes with it, too: see graphkiln_backend.server.triton_folders.

The run's regions in /dev/shm have an owner of their own, the locked file `/dev/shm/graphkiln-XXXX-owner`: containers
may share /dev/shm and have a /tmp each.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.repository.config import BACKEND, DROP_IN_BACKEND, ONEFLOW_BACKEND
from graphkiln_backend.server.installation import Installation
from graphkiln_backend.server.shared_memory import SHARED_MEMORY, region_owner
from graphkiln_backend.server.triton_folders import remove_environments, remove_sent_models, rename_environments
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.owned_folder import OTHER_PARENTS, OwnedFolder, create_locked

_log = logging.getLogger("graphkiln.server")

BACKEND_NAMES = frozenset({BACKEND, DROP_IN_BACKEND, ONEFLOW_BACKEND})
"""All names that graphkiln's backend can have in a configuration."""
_MODEL_FILE = '''"""Loads graphkiln's Triton backend."""

import gc
import sys

gc.disable()  # what is imported stays: to look for garbage in it took a twentieth of its time
sys.path.sort(key=lambda folder: not folder)  # a stub looks first in the working folder, the empty one
from graphkiln_backend.triton.model import TritonPythonModel

gc.freeze()
gc.enable()
'''
_ROOM_BYTES = 16 << 20
"""What a run needs for Triton's Python backend (3 MB), and something more."""
_SAFE_PATH = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


class RunFolder(Closeable):
    """The folder of a run; closing it removes it, and every shared-memory region of the run.

    Its path never holds a space: Triton (as of 24.10) starts its stubs through a shell without quoting.

    Attributes:
        path: The folder.
        backends: The assembled backend directory.
        instances: Status files.
        overlay: Mirrors of model stores.
        shared: What instances of a model share.
        temporary: TMPDIR of the server.
        shared_memory_prefix: What the names of the run's shared-memory regions begin with.

    Raises:
        ServerSetupError: No temporary folder can be made.
    """

    def __init__(self) -> None:
        self._resources = ExitStack()
        self.path = self._resources.enter_context(OwnedFolder(temporary_parent())).path
        self.backends = self.path / "backends"
        self.instances = self.path / "instances"
        self.overlay = self.path / "overlay"
        self.shared = self.path / "shared"
        self.temporary = self.path / "tmp"
        self.shared_memory_prefix = f"{self.path.name}-"
        self._resources.callback(self._remove_regions)
        self._resources.callback(remove_sent_models, self.path)
        try:
            with _explained_errors(self.path):
                for folder in (self.shared, self.temporary):
                    folder.mkdir()
                self._own_regions()
                self._make_instances()
        except BaseException:
            self.close()
            raise

    def _make_instances(self) -> None:
        """Status files lie in memory: a disk that is full must not keep a model from being loaded."""
        folder = SHARED_MEMORY / f"{self.shared_memory_prefix}instances"
        folder.mkdir(mode=0o700)
        self.instances.symlink_to(folder)

    def _own_regions(self) -> None:
        """Makes the file whose lock says that the run lives, among its regions."""
        owner = region_owner(self.path.name)
        try:
            self._resources.callback(os.close, create_locked(owner))
        except OSError as error:
            raise ServerSetupError(
                f"cannot make a file in {SHARED_MEMORY}, which Triton needs for tensors: {error.strerror}",
                hint="mount a tmpfs there that can be written; in a container: docker run --shm-size=1g",
            ) from error

    def assemble_backends(
        self, installation: Installation, extra: Path | None, *, replace_onnxruntime: bool = False
    ) -> frozenset[str]:
        """Links the installation's backends and the user's own, copies its Python backend, and adds graphkiln's.

        Args:
            installation: The server to assemble for.
            extra: The user's own backend folder, which goes before the installation's.
            replace_onnxruntime: Whether graphkiln's backend replaces an installed C++ `onnxruntime` backend, too.

        Returns:
            The names under which graphkiln's backend is installed.

        Raises:
            ServerSetupError: The user's backend folder does not exist, the run folder cannot be written, or the working
                folder holds a module that Triton would run as graphkiln's backend.
        """
        if extra and not extra.is_dir():
            raise ServerSetupError(f"--backend-directory {extra} is not a folder")
        _refuse_other_model_file()
        folders = [folder for folder in (extra, installation.backends) if folder]
        names = backend_names(folders, replace_onnxruntime=replace_onnxruntime)
        with _explained_errors(self.path):
            self.backends.mkdir()
            self._copy_python_backend(installation)
            for name in names:
                (self.backends / name).mkdir()
                (self.backends / name / "model.py").write_text(_MODEL_FILE)
            for backend in (backend for folder in folders for backend in folder.iterdir()):
                link = self.backends / backend.name
                if not link.exists():
                    link.symlink_to(backend.absolute())
        return names

    def _copy_python_backend(self, installation: Installation) -> None:
        """Triton refuses a backend library whose real path lies outside the backend's folder: a link does not do."""
        python = self.backends / "python"
        shutil.copytree(installation.backends / "python", python)  # with what is compiled: each stub would do it anew
        shutil.copy2(installation.stub, python / installation.stub.name)
        for library in python.glob("*.so"):
            rename_environments(library, self.path.name)

    def link_stores(self, stores: Sequence[Path]) -> list[Path]:
        """The stores under paths that Triton can take: their own where possible, else links."""
        paths = []
        for index, store in enumerate(stores):
            path = store.absolute()
            if not _SAFE_PATH.fullmatch(str(path)):
                link = self.path / "stores" / str(index)
                link.parent.mkdir(exist_ok=True)
                link.symlink_to(path)
                path = link
            paths.append(path)
        return paths

    def readable(self, path: Path) -> Path:
        """A path that a stub can read: Triton starts its Python without the user's locale, so it knows ASCII only."""
        if str(path).isascii():
            return path
        link = self.path / "cache"
        link.unlink(missing_ok=True)
        link.symlink_to(path.absolute())
        return link

    def close(self) -> None:
        """Removes the folder and what a killed server left in shared memory."""
        self._resources.close()

    def _remove_regions(self) -> None:
        remove_regions(self.path.name)
        remove_environments(self.path.name)


def _refuse_other_model_file() -> None:
    """A stub (24.10) imports `model`, and looks for it in the working folder before the backend's own folder."""
    found = PathFinder.find_spec("model", [""])
    if found and found.has_location:
        raise ServerSetupError(
            f"Triton would run {found.origin} in place of graphkiln's backend, as a server's working folder goes first",
            hint="start the server from a folder without a Python module of the name model",
        )


def temporary_parent() -> Path:
    """The folder that run folders are made in: TMPDIR's, or the first other one where there is room.

    Raises:
        ServerSetupError: No folder for temporary files can be written, or programs cannot be started from it.
    """
    try:
        parent = tempfile.gettempdir()
    except OSError as error:
        raise ServerSetupError(
            f"cannot make a temporary folder: {error.strerror or error}",
            hint="set TMPDIR to a folder that can be written; in a container: docker run --tmpfs /tmp:exec",
        ) from error
    places = [Path(parent), *OTHER_PARENTS]
    refused = {place: reason for place in places if (reason := _find_unfit(place))}
    usable = [place for place in places if place not in refused]
    if not usable:
        raise ServerSetupError(
            refused[places[0]],
            hint="set TMPDIR to a folder that can be written; in a container: docker run --tmpfs /tmp:exec",
        )
    chosen = next((place for place in usable if _free_bytes(place) >= _ROOM_BYTES), usable[0])
    if chosen != places[0]:
        reason = refused.get(places[0], f"{places[0]} is full")
        _log.warning("%s: %s is used for temporary files", reason, chosen)
    return chosen


def _find_unfit(place: Path) -> str:
    """Why no run folder can be made in a folder, or empty."""
    if not _SAFE_PATH.fullmatch(str(place)):
        return f"{place} has letters in its path that Triton cannot take"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"cannot make a temporary folder: {place} {'cannot be written' if place.exists() else 'is missing'}"
    if os.statvfs(place).f_flag & os.ST_NOEXEC:
        return f"{place} is mounted noexec: Triton's Python backend is started from there"
    return ""


def _free_bytes(place: Path) -> int:
    stats = os.statvfs(place)
    return stats.f_bavail * stats.f_frsize


def remove_regions(run: str) -> None:
    """Removes the shared-memory regions of a run, as far as they can be.

    Args:
        run: The name of its folder.
    """
    owner = region_owner(run)
    for region in set(SHARED_MEMORY.glob(f"{run}-*")) - {owner}:
        if region.is_dir() and not region.is_symlink():
            shutil.rmtree(region, ignore_errors=True)
        else:
            with suppress(OSError):
                region.unlink(missing_ok=True)
    if set(SHARED_MEMORY.glob(f"{run}-*")) <= {owner}:  # what is left still has an owner: the next start tries again
        with suppress(OSError):
            owner.unlink(missing_ok=True)


@contextmanager
def _explained_errors(folder: Path) -> Iterator[None]:
    """Says of a file system's error which folder it hit, and what to do.

    Raises:
        ServerSetupError: There was one.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        raise ServerSetupError(
            f"the temporary folder {folder} {'is full' if full else 'cannot be written'}: {error.strerror or error}",
            hint=f"{'make room there, or ' if full else ''}set TMPDIR to another folder",
        ) from error


def backend_names(folders: Sequence[Path], *, replace_onnxruntime: bool) -> frozenset[str]:
    """The names under which graphkiln's backend is installed beside the backends of some folders."""
    installed = {path.name for folder in folders for path in folder.iterdir()}
    kept = installed & {ONEFLOW_BACKEND, *(() if replace_onnxruntime else (DROP_IN_BACKEND,))}
    return BACKEND_NAMES - kept
