"""A module that is imported at its first use: every instance is a process, and few need all that they could do."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


class LazyModule(ModuleType):
    """Stands for a module, and imports it when an attribute of it is read.

    Type checkers see the module itself:

        if TYPE_CHECKING:
            import onnx
        else:
            onnx = LazyModule("onnx")

    Args:
        name: The module's name.
    """

    def __getattr__(self, name: str) -> object:
        """An attribute of the module.

        Raises:
            ImportError: There is no such module.
            AttributeError: It has no such attribute.
        """
        found: object = getattr(import_module(self.__name__), name)
        return found
