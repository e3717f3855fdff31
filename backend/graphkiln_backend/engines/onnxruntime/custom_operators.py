"""Libraries of custom operators: loaded into every session of a model that names them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import onnxruntime

from graphkiln_backend.graph.errors import LoweringError

_NOT_LOADED_HINT = "build it for this machine and this version of ONNX Runtime; `ldd` tells what else it needs"


def register(options: onnxruntime.SessionOptions, libraries: Sequence[str]) -> None:
    """Loads libraries into what will be a session.

    Raises:
        LoweringError: One does not load, or holds no operators.
    """
    for library in libraries:
        try:
            options.register_custom_ops_library(library)
        except Exception as error:  # one of ONNX Runtime's own, which have no common ancestor
            raise LoweringError(
                f"the library of custom operators {library} does not load",
                attempts=(str(error),),
                hint=_NOT_LOADED_HINT,
            ) from error


def digest(libraries: Sequence[str]) -> str:
    """Changes with the libraries; empty for none. One that the system's loader must find is known by its name alone."""
    found = hashlib.sha256()
    for library in libraries:
        found.update(f"{library}\n".encode())
        if Path(library).is_file():
            found.update(hashlib.sha256(Path(library).read_bytes()).digest())
    return found.hexdigest() if libraries else ""
