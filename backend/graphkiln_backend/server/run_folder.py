"""The temporary folder of one server run: the assembled backend directory, linked stores, and status files.

In `/tmp/graphkiln-XXXX/`:

- `backends/python/`: Triton's Python backend with the stub of the running Python
- `backends/graphkiln/`: model.py, a shim over graphkiln_backend.triton.model
- `backends/onnxruntime/`: the same, where no C++ backend of that name is installed
- `backends/oneflow/`: the same, for repositories of oneflow-serving
- `stores/0`, `1`, ...: links to model stores whose paths Triton cannot take
- `overlay/0`, `1`, ...: mirrors of the stores with complete configurations (graphkiln_backend.repository.overlay)
- `instances/`: status files (graphkiln_backend.triton.instance_status)
- `shared/`: graphs whose weights several instances map (graphkiln_backend.engines.onnxruntime.shared_weights)
- `tmp/`: TMPDIR of the server and its stubs, so that what runtimes leave there goes with the run
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.repository.config import BACKEND, DROP_IN_BACKEND, ONEFLOW_BACKEND
from graphkiln_backend.server.installation import Installation
from graphkiln_backend.server.shared_memory import FOLDER as SHARED_MEMORY

_SHIM = '"""Loads graphkiln\'s Triton backend."""\n\nfrom graphkiln_backend.triton.model import TritonPythonModel\n'
NAMES = frozenset({BACKEND, DROP_IN_BACKEND, ONEFLOW_BACKEND})
"""All names that a configuration may call our backend by."""
_SAFE = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


class RunFolder:
    """The folder; a context manager that removes it, and every shared-memory region of the run, at the end.

    Its path never holds a space: Triton (as of 24.10) starts its stubs through a shell without quoting.
    """

    def __init__(self) -> None:
        parent = tempfile.gettempdir()
        try:
            self.path = Path(tempfile.mkdtemp(prefix="graphkiln-", dir=parent if _SAFE.fullmatch(parent) else "/tmp"))  # noqa: S108
        except OSError as error:
            raise ServerSetupError(
                f"cannot make a temporary folder: {error}", hint="set TMPDIR to a folder that can be written"
            ) from error
        self.backends = self.path / "backends"
        self.instances = self.path / "instances"
        self.overlay = self.path / "overlay"
        self.shared = self.path / "shared"
        self.temporary = self.path / "tmp"
        self.shared.mkdir()
        self.instances.mkdir()
        self.temporary.mkdir()
        self.shared_memory_prefix = f"{self.path.name}-"

    def assemble_backends(
        self, installation: Installation, extra: Path | None, *, replace_onnxruntime: bool = False
    ) -> frozenset[str]:
        """Links the installation's backends (and the user's own), copies its Python backend, and adds ours.

        Copies, because Triton refuses a backend library whose real path lies outside the backend's folder.

        Args:
            installation: The server to assemble for.
            extra: The user's own backend folder.
            replace_onnxruntime: Whether ours stands in for an installed C++ `onnxruntime` backend, too.

        Returns:
            The names under which our backend is installed.

        Raises:
            ServerSetupError: The user's backend folder does not exist.
        """
        if extra and not extra.is_dir():
            raise ServerSetupError(f"--backend-directory {extra} is not a folder")
        self.backends.mkdir()
        python = self.backends / "python"
        python.mkdir()
        for source in (*(installation.backends / "python").glob("*.*"), installation.stub):
            shutil.copy2(source, python / source.name)
        folders = [folder for folder in (extra, installation.backends) if folder]
        ours = names_of_ours(folders, replace_onnxruntime=replace_onnxruntime)
        for name in ours:
            (self.backends / name).mkdir()
            (self.backends / name / "model.py").write_text(_SHIM)
        for folder in filter(None, (extra, installation.backends)):
            for backend in folder.iterdir():
                link = self.backends / backend.name
                if not link.exists():
                    link.symlink_to(backend.absolute())
        return ours

    def link_stores(self, stores: Sequence[Path]) -> list[Path]:
        """The stores under paths that Triton can take: their own where possible, else links."""
        linked = []
        for index, store in enumerate(stores):
            path = store.absolute()
            if not _SAFE.fullmatch(str(path)):
                link = self.path / "stores" / str(index)
                link.parent.mkdir(exist_ok=True)
                link.symlink_to(path)
                path = link
            linked.append(path)
        return linked

    def remove(self) -> None:
        """Removes the folder and what a killed server left in shared memory."""
        shutil.rmtree(self.path, ignore_errors=True)
        for region in SHARED_MEMORY.glob(f"{self.shared_memory_prefix}*"):
            region.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def names_of_ours(folders: Sequence[Path], *, replace_onnxruntime: bool) -> frozenset[str]:
    """The names under which our backend is installed beside the backends of some folders."""
    installed = {path.name for folder in folders for path in folder.iterdir()}
    left_alone = installed & {ONEFLOW_BACKEND, *(() if replace_onnxruntime else (DROP_IN_BACKEND,))}
    return NAMES - left_alone
