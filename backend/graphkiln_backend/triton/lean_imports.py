"""Libraries without what no instance needs of them: that is loaded when something reads an attribute of it.

numpy 1.26 imports all of its packages at once, and writes the documentation of what is compiled; numpy 2 imports most
of these at their first use by itself. protobuf imports its implementation in Python beside the compiled one. Every
instance is a process, and pays for that at each start.

Source: `numpy/__init__.py` and `numpy/core/__init__.py` of numpy 1.26, `google/protobuf/internal/builder.py` of
protobuf 6.33: they import these names, and use none of them.
"""

from __future__ import annotations

import sys
from importlib import import_module

from graphkiln_backend.graph.lazy_module import LazyModule

DEFERRED = {
    "numpy": (
        "numpy.core._add_newdocs",
        "numpy.core._add_newdocs_scalars",
        "numpy.ctypeslib",
        "numpy.fft",
        "numpy.ma",
        "numpy.polynomial",
        "numpy.random",
    ),
    "google.protobuf.internal.builder": ("google.protobuf.internal.python_message",),
}
"""What is imported -> what that would import for nothing."""


def import_libraries() -> None:
    """Imports them; what is deferred stands for itself, see `LazyModule`. What is imported already stays as it is.

    Raises:
        ImportError: One is not installed.
    """
    for library, deferred in DEFERRED.items():
        if library not in sys.modules:
            _import_without(library, deferred)


def _import_without(library: str, deferred: tuple[str, ...]) -> None:
    standing_in = {name: LazyModule(name) for name in deferred if name not in sys.modules}
    sys.modules.update(standing_in)
    try:
        import_module(library)
    finally:
        for name in standing_in:  # whoever imports one later gets the module itself
            del sys.modules[name]
