"""Triton's messages of a model configuration, without the gRPC that tritonclient imports beside them.

Every instance is a process of its own: 0.1 s of processor time and 20 MB each, for calls that no instance makes.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

__all__ = ["pb"]

_NAME = "tritonclient.grpc.model_config_pb2"


def _load() -> ModuleType:
    """The module under its own name: whoever imports the whole package later gets the same one.

    Raises:
        ImportError: There is no tritonclient.
    """
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    package = find_spec("tritonclient")
    folders = package.submodule_search_locations if package else None
    if not folders:
        raise ModuleNotFoundError("No module named 'tritonclient'", name="tritonclient")
    spec = spec_from_file_location(_NAME, Path(folders[0]) / "grpc" / "model_config_pb2.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {_NAME}", name=_NAME)
    module = module_from_spec(spec)
    sys.modules[_NAME] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[_NAME]
        raise
    return module


if TYPE_CHECKING:
    from tritonclient.grpc import model_config_pb2 as pb
else:
    pb = _load()
