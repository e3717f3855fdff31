"""Find tritonserver: an installation named by the user, that of a container, or that of nvidia-pytriton's wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.triton.features import Feature, TritonFeatures

ROOT_VARIABLE = "GRAPHKILN_TRITONSERVER"  # folder of an installation that takes precedence
_CONTAINER = Path("/opt/tritonserver")
_WHEEL = "nvidia-pytriton"
_WHEEL_VERSIONS = {"0.7.0": "2.51.0"}  # wheel -> its server, whose version is not stored in the wheel
_STUB = "triton_python_backend_stub"
_HELP_WITHIN_S = 60.0
_FLAG = re.compile(r"^  --([a-z0-9-]+)( <)?", re.MULTILINE)


@dataclass(frozen=True)
class Installation:
    """An installed tritonserver.

    Attributes:
        binary: The tritonserver program.
        backends: Folder of backends, with `python/`.
        caches: Folder of response caches.
        stub: Python stub for the running interpreter.
        libraries: Folders of its libraries.
        version: Version, such as `2.51.0`; empty if unknown.
        wheel: Its wheel, such as `nvidia-pytriton 0.7.0`; empty for others.
    """

    binary: Path
    backends: Path
    caches: Path
    stub: Path
    libraries: tuple[Path, ...]
    version: str = ""
    wheel: str = ""

    @property
    def features(self) -> TritonFeatures:
        """Features of its version."""
        return TritonFeatures(self.version)

    @property
    def title(self) -> str:
        """Name and version for people: `Triton 2.51.0 (24.10), of nvidia-pytriton 0.7.0`."""
        release = f" ({self.features.release})" if self.features.release else ""
        return f"Triton {self.version or 'of an unknown version'}{release}{f', of {self.wheel}' if self.wheel else ''}"

    @property
    def holds_no_graphs(self) -> bool:
        """True if its only backend is the Python backend, which runs graphs in other processes."""
        return [backend.name for backend in self.backends.iterdir()] == ["python"]

    def ask_flags(self) -> None:
        """Start `tritonserver --help` without waiting 40 ms for it; read `flags` later.

        Raises:
            ServerSetupError: The program does not run on this machine.
        """
        _ = self._help

    @cached_property
    def flags(self) -> dict[str, bool]:
        """Command line flags without dashes -> whether they take a value.

        Raises:
            ServerSetupError: The program does not run on this machine.
        """
        with self._help as asked:
            try:
                printed, errors = asked.communicate(timeout=_HELP_WITHIN_S)
            except subprocess.TimeoutExpired as error:
                asked.kill()
                raise ServerSetupError(f"{self.binary} does not run here: {error}") from error
        flags = {name: bool(value) for name, value in _FLAG.findall(printed + errors)}
        if not flags:
            last = (errors.strip().splitlines() or ["no output"])[-1]
            raise ServerSetupError(f"{self.binary} does not run here: {last}")
        return flags

    @cached_property
    def _help(self) -> subprocess.Popen[str]:
        try:
            return subprocess.Popen(
                [self.binary, "--help"],
                env={**os.environ, "LD_LIBRARY_PATH": self.library_path},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise ServerSetupError(f"{self.binary} does not run here: {error}") from error

    @property
    def library_path(self) -> str:
        """LD_LIBRARY_PATH of the server and its stubs."""
        inherited = os.environ.get("LD_LIBRARY_PATH")
        return os.pathsep.join((*map(str, self.libraries), *((inherited,) if inherited else ())))


def find_installation() -> Installation:
    """Find the tritonserver to use.

    Raises:
        ServerSetupError: No tritonserver is installed, or it does not support this Python or numpy.
    """
    found = _find()
    numpy = version("numpy")
    if found.features.release and not found.features.has(Feature.NUMPY_2) and int(numpy.partition(".")[0]) > 1:
        raise ServerSetupError(
            f"the stubs of {found.title} support numpy 1 only: with numpy {numpy} all responses would be empty",
            hint="pip install 'numpy<2', or use Triton 24.11 or later, for example NVIDIA's image",
        )
    return found


def _find() -> Installation:
    if root := os.environ.get(ROOT_VARIABLE):
        return _container_installation(Path(root).resolve() / "bin" / "tritonserver")
    on_path = shutil.which("tritonserver")
    candidates = (Path(on_path).resolve() if on_path else None, _CONTAINER / "bin" / "tritonserver")
    for binary in candidates:
        if binary and binary.exists():
            return _container_installation(binary)
    spec = find_spec("pytriton")
    if spec and spec.submodule_search_locations:
        return _wheel_installation(Path(spec.submodule_search_locations[0]))
    raise ServerSetupError(
        "no tritonserver found on PATH, in /opt/tritonserver or in this Python environment",
        hint="pip install 'graphkiln[serve]'",
    )


def _container_installation(binary: Path) -> Installation:
    root = binary.parent.parent
    if not binary.exists():
        raise ServerSetupError(f"{root} contains no tritonserver: {binary} is missing", hint=f"unset {ROOT_VARIABLE}")
    stub = root / "backends" / "python" / _STUB
    if not stub.exists():
        raise ServerSetupError(f"{binary} has no Python backend: {stub} is missing")
    if f"libpython{_python_version()}.so".encode() not in stub.read_bytes():
        raise ServerSetupError(
            f"the Python backend of {binary} was not built for Python {_python_version()}",
            hint="install graphkiln into the Python of that Triton release",
        )
    written = root / "TRITON_VERSION"
    return Installation(
        binary=binary,
        backends=root / "backends",
        caches=root / "caches",
        stub=stub,
        libraries=(_libpython(),),
        version=written.read_text().strip() if written.is_file() else os.environ.get("TRITON_SERVER_VERSION", ""),
    )


def _wheel_installation(package: Path) -> Installation:
    root = package / "tritonserver"
    stub = root / "python_backend_stubs" / _python_version() / _STUB
    if not stub.exists():
        known = ", ".join(sorted(path.name for path in (root / "python_backend_stubs").iterdir()))
        raise ServerSetupError(f"nvidia-pytriton has no stub for Python {_python_version()}", hint=f"it has {known}")
    try:
        installed = version(_WHEEL)
    except PackageNotFoundError:  # copied into an image without its metadata
        installed = ""
    return Installation(
        binary=root / "bin" / "tritonserver",
        backends=root / "backends",
        caches=root / "caches",
        stub=stub,
        libraries=(package.parent / "nvidia_pytriton.libs", _libpython()),
        version=_WHEEL_VERSIONS.get(installed, ""),
        wheel=f"{_WHEEL} {installed}".strip(),
    )


def _python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def _libpython() -> Path:
    """Folder of the running interpreter's shared library, for LD_LIBRARY_PATH of the stub.

    Without it the stub could load another Python's library and crash.
    """
    library = f"libpython{_python_version()}.so.1.0"
    configured = Path(sysconfig.get_config_var("LIBDIR") or sys.base_prefix)
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    candidates = (configured, configured / multiarch, Path(sys.base_prefix) / "lib", Path("/usr/lib") / multiarch)
    for folder in candidates:
        if (folder / library).exists():
            return folder
    raise ServerSetupError(
        f"{library} is not installed: Triton's Python stub needs the shared library of this Python",
        hint=f"apt-get install libpython{_python_version()}",
    )
