"""numpy without what no instance needs of it: loaded when something reads an attribute of it.

numpy 1.26 imports all of its packages at once, and writes the documentation of what is compiled. Every instance is a
process, and pays for that at each start; numpy 2 imports most of these at their first use by itself.

Source: `numpy/__init__.py` and `numpy/core/__init__.py` of numpy 1.26, which import these names and use none of them.
"""

from __future__ import annotations

import sys
from importlib import import_module

from graphkiln_backend.graph.lazy_module import LazyModule

DEFERRED = (
    "numpy.core._add_newdocs",
    "numpy.core._add_newdocs_scalars",
    "numpy.ctypeslib",
    "numpy.fft",
    "numpy.ma",
    "numpy.polynomial",
    "numpy.random",
)


def import_numpy() -> None:
    """Imports numpy; what is deferred stands for itself in it, see `LazyModule`. Nothing where it is imported already.

    Raises:
        ImportError: It is not installed.
    """
    if "numpy" in sys.modules:
        return
    sys.modules.update({name: LazyModule(name) for name in DEFERRED})
    try:
        import_module("numpy")
    finally:
        for name in DEFERRED:  # whoever imports one later gets the module itself
            del sys.modules[name]
