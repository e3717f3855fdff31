"""Lazy imports, versions of installed distributions, and a digest of this package's source."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType


class LazyModule(ModuleType):
    """Import a module when an attribute of it is first read: every model instance is a process and pays for imports.

    Type checkers see the module itself:

        if TYPE_CHECKING:
            import onnx
        else:
            onnx = LazyModule("onnx")

    Args:
        name: The module's name.
    """

    def __getattr__(self, name: str) -> object:
        found: object = getattr(import_module(self.__name__), name)
        return found


def version_of(name: str) -> str:
    """Return the version of an installed distribution.

    Raises:
        PackageNotFoundError: It is not installed.
    """
    from importlib.metadata import version  # 20 ms to import, and most starts ask for no version

    return version(name)


def installed_version(name: str) -> str:
    """Return the version of a distribution, or an empty string where it is not installed."""
    from importlib.metadata import PackageNotFoundError

    try:
        return version_of(name)
    except PackageNotFoundError:
        return ""


_ROOT = Path(__file__).parents[1]


@cache
def source_digest(*rooms: str) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of some rooms of the backend, such as `lowering`.

    Part of the key of remembered decisions: a release number would not change with a rule that is edited between
    releases. Takes 2 ms.
    """
    import hashlib

    digest = hashlib.sha256()
    for room in rooms:
        for path in sorted((_ROOT / room).rglob("*.py*")):  # .pyc alone where only compiled files are installed
            if path.parent.name != "__pycache__":
                content = path.read_bytes()
                digest.update(f"{path.relative_to(_ROOT)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]
