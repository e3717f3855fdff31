"""The temporary folder of one server run (backends, links to stores, status files), and removal of those of dead runs.

Contents of `/tmp/graphkiln-XXXX/`:

- `owner.json`: owner of the folder (graphkiln_backend.system.owned_folder)
- `address.json`: address of the server (graphkiln_backend.server.ports)
- `backends/python/`: Triton's Python backend with the stub of the running Python
- `backends/graphkiln/`: model.py, which imports graphkiln_backend.triton.instance
- `backends/onnxruntime/`: the same, if no C++ backend of that name is installed
- `backends/openvino/`: the same, if no C++ backend of that name is installed
- `backends/oneflow/`: the same, for repositories of oneflow-serving
- `stores/0`, `1`, ...: links to model stores whose paths Triton does not accept
- `cache`: link to the artifact cache, if its path is not ASCII
- `overlay/models/`: mirror of the stores, with complete configurations (graphkiln_backend.server.mirror); in explicit
  mode `overlay/images/models/`: models that take images
- `instances/`: link to `/dev/shm/graphkiln-XXXX-instances/`, status files (graphkiln_backend.triton.instance_status)
- `shared/`: graphs whose weights several instances map (graphkiln_backend.engines.onnxruntime)
- `tmp/`: TMPDIR of the server and its stubs, removed with the run

The run's shared-memory regions in /dev/shm have another owner file, because containers may share /dev/shm but not /tmp.

A run is dead if the locks of its supervisor are free (`owned_folder`). Files of other users, and files without a lock,
are never touched. Simultaneous starts do not interfere, because each check holds a lock.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.graph.modules import LazyModule
from graphkiln_backend.repository.config import BACKEND, DROP_IN_BACKEND, ONEFLOW_BACKEND, OPENVINO_BACKEND
from graphkiln_backend.server import installation
from graphkiln_backend.server.installation import Installation
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.owned_folder import (
    OTHER_PARENTS,
    PREFIX,
    OwnedFolder,
    create_locked,
    locked_if_dead,
    owned_folders,
    remove_owned,
)
from graphkiln_backend.triton.environment import RUN_FOLDER_VARIABLE
from graphkiln_backend.triton.sent_models import NOTES, remove_sent

if TYPE_CHECKING:
    import psutil
else:
    psutil = LazyModule("psutil")

_log = logging.getLogger("graphkiln.server")


# Names of graphkiln's backend in configurations.
BACKEND_NAMES = frozenset({BACKEND, DROP_IN_BACKEND, ONEFLOW_BACKEND, OPENVINO_BACKEND})
_MODEL_FILE = '''"""Loads graphkiln's Triton backend."""

import gc
import sys

gc.disable()  # garbage collection during imports took 5% of their time
sys.path.sort(key=lambda folder: not folder)  # the stub puts the working folder ('') first
from graphkiln_backend.triton.instance import TritonPythonModel

gc.freeze()
gc.enable()
'''
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - Triton's place for regions, not a temporary file
OWNER_SUFFIX = "-owner"
# Reserved name prefix: since 25.08 Triton does not let clients register such regions.
# Source: Triton server, `kTritonSharedMemoryRegionPrefix`.
RESERVED_PREFIX = "triton_python_backend_shm_region_"
_ROOM_BYTES = 16 << 20  # needed by a run: Triton's Python backend (3 MB) and a reserve
_SAFE_PATH = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


class RunFolder(Closeable):
    """The folder of a run; closing it removes it and all shared-memory regions of the run.

    Its path never contains a space: Triton (24.10) starts its stubs through a shell without quoting.

    Attributes:
        path: The folder.
        backends: The assembled backend directory.
        instances: Folder of status files.
        overlay: Folder of mirrors of model stores.
        shared: Folder of files shared by instances of a model.
        temporary: TMPDIR of the server.
        shared_memory_prefix: Name prefix of its instances' shared-memory regions.

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
        self.shared_memory_prefix = f"{RESERVED_PREFIX}{self.path.name}-"
        self._resources.callback(remove_environments, self.path.name)
        self._resources.callback(remove_regions, self.path.name)
        self._resources.callback(remove_sent_models, self.path)
        try:
            with _explained_errors(self.path):
                for folder in (self.shared, self.temporary):
                    folder.mkdir()
                self._own_regions()
                # Status files are in memory, because a full disk must not prevent loading.
                status_files = SHARED_MEMORY / f"{self.path.name}-instances"
                status_files.mkdir(mode=0o700)
                self.instances.symlink_to(status_files)
        except BaseException:
            self.close()
            raise

    def _own_regions(self) -> None:
        """Create the owner file of the regions, locked while the run lives."""
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
        """Link the backends of the installation and the user, copy the Python backend, and add graphkiln's.

        Args:
            installation: The installed server.
            extra: The user's backend folder, which takes precedence.
            replace_onnxruntime: Whether graphkiln's backend replaces an installed C++ `onnxruntime` backend.

        Returns:
            Names under which graphkiln's backend is installed.

        Raises:
            ServerSetupError: The user's backend folder does not exist, the run folder cannot be written, or the working
                folder contains a module that Triton would run instead of graphkiln's backend.
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
        """Copy the backend, because Triton refuses a library whose real path is outside of the backend's folder."""
        python = self.backends / "python"
        shutil.copytree(installation.backends / "python", python)  # with its bytecode, for the stubs
        shutil.copy2(installation.stub, python / installation.stub.name)
        for library in python.glob("*.so"):
            rename_environments(library, self.path.name)

    def link_stores(self, stores: Sequence[Path]) -> list[Path]:
        """Paths of the stores that Triton accepts: links if necessary."""
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

    def readable(self, path: Path, name: str) -> Path:
        """An ASCII path, a link of a name if necessary: Triton starts stubs without the user's locale."""
        if str(path).isascii():
            return path
        link = self.path / name
        link.unlink(missing_ok=True)
        link.symlink_to(path.absolute())
        return link

    def close(self) -> None:
        """Remove the folder and the shared-memory regions of a killed server."""
        self._resources.close()


def _refuse_other_model_file() -> None:
    """Refuse a `model` module in the working folder, which stubs (24.10) import before the backend's."""
    found = PathFinder.find_spec("model", [""])
    if found and found.has_location:
        raise ServerSetupError(
            f"Triton would run {found.origin} instead of graphkiln's backend, because the working folder goes first",
            hint="start the server in a folder without a Python module named model",
        )


def temporary_parent() -> Path:
    """Parent of run folders: TMPDIR, or the first other place with enough space.

    Raises:
        ServerSetupError: No temporary folder is writable and allows execution.
    """
    hint = "set TMPDIR to a folder that can be written; in a container: docker run --tmpfs /tmp:exec"
    try:
        parent = tempfile.gettempdir()
    except OSError as error:
        raise ServerSetupError(f"cannot make a temporary folder: {error.strerror or error}", hint=hint) from error
    places = [Path(parent), *OTHER_PARENTS]
    refused = {place: reason for place in places if (reason := _find_unfit(place))}
    usable = [place for place in places if place not in refused]
    if not usable:
        raise ServerSetupError(refused[places[0]], hint=hint)
    chosen = next((place for place in usable if shutil.disk_usage(place).free >= _ROOM_BYTES), usable[0])
    if chosen != places[0]:
        reason = refused.get(places[0], f"{places[0]} is full")
        _log.warning("%s: using %s for temporary files", reason, chosen)
    return chosen


def _find_unfit(place: Path) -> str:
    """Explain why a folder cannot hold a run folder; return an empty string if it can."""
    if not _SAFE_PATH.fullmatch(str(place)):
        return f"{place} has characters in its path that Triton does not accept"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"cannot make a temporary folder: {place} {'cannot be written' if place.exists() else 'is missing'}"
    if os.statvfs(place).f_flag & os.ST_NOEXEC:
        return f"{place} is mounted noexec: Triton's Python backend is started from there"
    return ""


@contextmanager
def _explained_errors(folder: Path) -> Iterator[None]:
    """Translate file system errors.

    Raises:
        ServerSetupError: A file system error occurred.
    """
    try:
        yield
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        raise ServerSetupError(
            f"the temporary folder {folder} {'is full' if full else 'cannot be written'}: {error.strerror or error}",
            hint=f"{'make room there, or ' if full else ''}set TMPDIR to another folder",
        ) from error


def backend_folders(extra: Path | None = None) -> list[Path]:
    """Backend directories of `serve` in order of precedence: the user's, and that of Triton if it is installed."""
    folders = [extra] if extra else []
    with suppress(ServerSetupError):
        folders.append(installation.find_installation().backends)
    return folders


def installed_backend_names(extra: Path | None = None) -> frozenset[str]:
    """Names under which `serve` installs graphkiln's backend beside those of a user's folder and of Triton."""
    return backend_names(backend_folders(extra), replace_onnxruntime=False)


def backend_names(folders: Sequence[Path], *, replace_onnxruntime: bool) -> frozenset[str]:
    """Names under which graphkiln's backend is installed beside the backends of some folders."""
    installed = {path.name for folder in folders for path in folder.iterdir()}
    kept = installed & {ONEFLOW_BACKEND, OPENVINO_BACKEND, *(() if replace_onnxruntime else (DROP_IN_BACKEND,))}
    return BACKEND_NAMES - kept


# Shared-memory regions of a run.


def region_owner(run: str) -> Path:
    """Owner file of a run's regions, locked while the run lives."""
    return SHARED_MEMORY / f"{run}{OWNER_SUFFIX}"


def remove_regions(run: str) -> None:
    """Remove the shared-memory regions of a run, as far as possible."""
    owner = region_owner(run)
    for region in _regions(run) - {owner}:
        if region.is_dir() and not region.is_symlink():
            shutil.rmtree(region, ignore_errors=True)
        else:
            with suppress(OSError):
                region.unlink(missing_ok=True)
    if _regions(run) <= {owner}:  # otherwise keep the owner file, so that the next start tries again
        with suppress(OSError):
            owner.unlink(missing_ok=True)


def _regions(run: str) -> set[Path]:
    """Regions and folders of a run in /dev/shm, with the reserved prefix or, as before 28 November 2026, without it."""
    return {*SHARED_MEMORY.glob(f"{run}-*"), *SHARED_MEMORY.glob(f"{RESERVED_PREFIX}{run}-*")}


# Files that Triton (24.10) writes to /tmp, ignoring TMPDIR, and leaves there when it is killed; removed with the run.
#
# - `/tmp/gk-XXXXyyyyyy/`: packed environments of its Python backend. The path is patched in the copy of the backend
#   (`/tmp/python_env_yyyyyy` by default), so that the folder can be assigned to its run.
# - `/tmp/folderXXXXXX/`: models whose files were sent with the load request; their instances record them in the run
#   folder (graphkiln_backend.triton.sent_models).

# Constant in the backend's library; six random letters are appended.
_ENVIRONMENTS = b"/tmp/python_env_"


def rename_environments(library: Path, run: str) -> None:
    """Patch the folder for environments in a copied Python backend, so that its name contains the run's.

    Raises:
        OSError: It cannot be written.
    """
    content, own = library.read_bytes(), os.fsencode(_environments(run))
    if len(own) == len(_ENVIRONMENTS) and content.count(_ENVIRONMENTS) == 1:
        library.write_bytes(content.replace(_ENVIRONMENTS, own))


def environments_of(run: str) -> list[Path]:
    """Find the folders for packed environments of a run."""
    prefix = Path(_environments(run))
    return sorted(prefix.parent.glob(f"{prefix.name}??????"))


def remove_environments(run: str) -> None:
    """Remove the folders for packed environments of a run, as far as possible."""
    for folder in environments_of(run):
        shutil.rmtree(folder, ignore_errors=True)


def remove_sent_models(run: Path) -> None:
    """Remove the files of models that were sent with a load request, as far as possible."""
    for noting in ("shared", "overlay"):  # of instances, and of placeholders
        remove_sent(run / noting / NOTES)
    # Placeholders killed before they recorded their folder: their code contains its path (`server.mirror`).
    notes = repr(str(run / "overlay" / NOTES))
    for model in Path("/tmp").glob("folder??????"):  # noqa: S108 - fixed in Triton
        with suppress(OSError):
            if model.lstat().st_uid == os.geteuid() and any(
                notes in code.read_text(encoding="utf-8", errors="replace") for code in model.glob("*/model.py")
            ):
                shutil.rmtree(model, ignore_errors=True)


def _environments(run: str) -> str:
    """Replacement of `_ENVIRONMENTS` of the same length, unique to the run."""
    return f"/tmp/gk-{run.removeprefix(PREFIX)}"  # noqa: S108 - a constant of the backend


# Leftovers of dead runs.

_END_WITHIN_S = 5.0


def find_leftovers(parents: Iterable[Path] | None = None) -> list[Path]:
    """Find temporary folders and lock files of shared-memory regions of this user's dead runs.

    Args:
        parents: Parents of run folders; None for all.
    """
    return [path for path in (*_folders(parents), *_region_owners()) if _is_dead(path)]


def remove_leftovers(parents: Iterable[Path] | None = None) -> list[Path]:
    """Remove leftovers of dead runs of this user, and kill their processes; return the removed leftovers."""
    removed = [path for path in _folders(parents) if _remove_folder(path)]
    removed += [owner for owner in _region_owners() if _remove_regions(owner)]
    if removed:
        runs = {path.name.removesuffix(OWNER_SUFFIX) for path in removed}
        _log.info("removed the leftovers of %d dead runs", len(runs))
    return removed


def living_runs(parents: Iterable[Path] | None = None) -> list[Path]:
    """Temporary folders whose owners are, or may be, alive."""
    return [path for path in _folders(parents) if not _is_dead(path)]


def _folders(parents: Iterable[Path] | None) -> list[Path]:
    return [folder for parent in sorted(set(parents or _default_parents())) for folder in owned_folders(parent)]


def _default_parents() -> set[Path]:
    places = set(OTHER_PARENTS)
    with suppress(OSError):
        places.add(Path(tempfile.gettempdir()))
    return places


def _region_owners() -> list[Path]:
    return sorted(SHARED_MEMORY.glob(f"{PREFIX}*{OWNER_SUFFIX}"))


def _is_dead(path: Path) -> bool:
    """True if neither the folder nor a folder inside it has an owner: the server of a dead search may be alive."""
    with locked_if_dead(path) as dead:
        return dead and all(map(_is_dead, owned_folders(path)))


def _remove_folder(path: Path) -> bool:
    with locked_if_dead(path) as unowned:
        dead = unowned and all(map(_remove_folder, owned_folders(path)))
        if dead:
            _end_processes(path)
            remove_environments(path.name)
            remove_sent_models(path)
            remove_owned(path)
        return dead and not path.exists()


def _remove_regions(owner: Path) -> bool:
    run = owner.name.removesuffix(OWNER_SUFFIX)
    with locked_if_dead(owner) as dead:
        if dead:
            remove_environments(run)
            remove_regions(run)
        return dead and not owner.exists()


def _end_processes(run: Path) -> None:
    """Kill processes of a dead run, such as a hung instance: they may hold ports."""
    found = [process for process in psutil.process_iter() if _belongs_to(process, run)]
    for process in found:
        _log.warning("killing process %d of a dead server", process.pid)
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(found, timeout=_END_WITHIN_S)


def _belongs_to(process: psutil.Process, run: Path) -> bool:
    if process.pid == os.getpid():
        return False
    try:
        own = process.uids().effective == os.geteuid()
        return own and Path(process.environ().get(RUN_FOLDER_VARIABLE, "/")).is_relative_to(run)
    except (psutil.Error, OSError):
        return False
