"""The temporary folder of one server run: backends, links to stores, status files.

Contents of `/tmp/graphkiln-XXXX/`:

- `owner.json`: owner of the folder (graphkiln_backend.system.owned_folder)
- `address.json`: address of the server (graphkiln_backend.server.ports)
- `backends/python/`: Triton's Python backend with the stub of the running Python
- `backends/graphkiln/`: model.py, which imports graphkiln_backend.triton.model
- `backends/onnxruntime/`: the same, if no C++ backend of that name is installed
- `backends/oneflow/`: the same, for repositories of oneflow-serving
- `stores/0`, `1`, ...: links to model stores whose paths Triton does not accept
- `cache`: link to the artifact cache, if its path is not ASCII
- `overlay/models/`: mirror of the stores, with complete configurations (graphkiln_backend.server.mirror); in explicit
  mode `overlay/images/models/`: models that take images
- `instances/`: link to `/dev/shm/graphkiln-XXXX-instances/`, status files (graphkiln_backend.triton.instance_status)
- `shared/`: graphs whose weights several instances map (graphkiln_backend.engines.onnxruntime)
- `tmp/`: TMPDIR of the server and its stubs, removed with the run

The run's regions in /dev/shm have another owner file: see graphkiln_backend.server.shared_memory.
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
from graphkiln_backend.server import installation
from graphkiln_backend.server.installation import Installation
from graphkiln_backend.server.shared_memory import RESERVED_PREFIX, SHARED_MEMORY, region_owner, remove_regions
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.owned_folder import OTHER_PARENTS, PREFIX, OwnedFolder, create_locked
from graphkiln_backend.triton.sent_models import NOTES, remove_sent

_log = logging.getLogger("graphkiln.server")


def installed_backend_names() -> frozenset[str]:
    """Names under which `serve` installs graphkiln's backend; all of its names if no Triton is installed."""
    try:
        return backend_names([installation.find_installation().backends], replace_onnxruntime=False)
    except ServerSetupError:
        return BACKEND_NAMES


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


# Names of graphkiln's backend in configurations.
BACKEND_NAMES = frozenset({BACKEND, DROP_IN_BACKEND, ONEFLOW_BACKEND})
_MODEL_FILE = '''"""Loads graphkiln's Triton backend."""

import gc
import sys

gc.disable()  # garbage collection during imports took 5% of their time
sys.path.sort(key=lambda folder: not folder)  # the stub puts the working folder ('') first
from graphkiln_backend.triton.model import TritonPythonModel

gc.freeze()
gc.enable()
'''
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
        """Keep status files in memory, because a full disk must not prevent loading."""
        folder = SHARED_MEMORY / f"{self.path.name}-instances"
        folder.mkdir(mode=0o700)
        self.instances.symlink_to(folder)

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

    def readable(self, path: Path) -> Path:
        """An ASCII path, a link if necessary: Triton starts stubs without the user's locale."""
        if str(path).isascii():
            return path
        link = self.path / "cache"
        link.unlink(missing_ok=True)
        link.symlink_to(path.absolute())
        return link

    def close(self) -> None:
        """Remove the folder and the shared-memory regions of a killed server."""
        self._resources.close()

    def _remove_regions(self) -> None:
        remove_regions(self.path.name)
        remove_environments(self.path.name)


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


def _free_bytes(place: Path) -> int:
    stats = os.statvfs(place)
    return stats.f_bavail * stats.f_frsize


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


def backend_names(folders: Sequence[Path], *, replace_onnxruntime: bool) -> frozenset[str]:
    """Names under which graphkiln's backend is installed beside the backends of some folders."""
    installed = {path.name for folder in folders for path in folder.iterdir()}
    kept = installed & {ONEFLOW_BACKEND, *(() if replace_onnxruntime else (DROP_IN_BACKEND,))}
    return BACKEND_NAMES - kept
