"""The check of a node. It is sent to the node by value, so that it imports nothing of graphkiln."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def examine_node(expected: str, model: str) -> str:
    """Return why this node cannot take part, and what to do; empty where it can.

    Args:
        expected: Version of graphkiln that the driver has.
        model: The model's folder; empty for one in a remote store.
    """
    try:
        found = version("graphkiln")
    except PackageNotFoundError:
        return f"it has no graphkiln in its Python environment: install 'graphkiln[score]=={expected}' there"
    if found != expected:
        return f"it has graphkiln {found}, the driver {expected}: install 'graphkiln[score]=={expected}' there"
    if model and not (Path(model).is_dir() and os.access(model, os.R_OK | os.X_OK)):
        return f"it cannot read {model}: mount the model store there, or name one on S3, GCS, Azure or Hugging Face"
    return ""
