"""Lazy imports, packages of extras, and versions of installed distributions."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from graphkiln_backend.graph.errors import EngineUnavailable


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


def require_packages(feature: str, packages: Sequence[str], *, extra: str) -> None:
    """Check that packages are installed, without importing them.

    Args:
        feature: Subject of the message, such as `tuning`.
        packages: Import names.
        extra: Extra of the `graphkiln` distribution that installs them.

    Raises:
        EngineUnavailable: A package is missing.
    """
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise EngineUnavailable(f"{feature} needs {', '.join(missing)}", extra=extra)


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
