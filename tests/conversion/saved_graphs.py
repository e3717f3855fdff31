"""Graphs saved by OneFlow, with its outputs; made by `oneflow/make_graphs.py`."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray

FOLDER = Path(__file__).parent / "oneflow"


def names(archive: str) -> list[str]:
    """Names of the graphs of `operators.zip` or `models.zip`."""
    with zipfile.ZipFile(FOLDER / archive) as opened:
        return sorted({name.split("/")[0] for name in opened.namelist()})


def unpack(archive: str, folder: Path, *wanted: str) -> Path:
    """Unpack some graphs, or all, and return the folder."""
    with zipfile.ZipFile(FOLDER / archive) as opened:
        members = [name for name in opened.namelist() if not wanted or name.split("/")[0] in wanted]
        opened.extractall(folder, members)
    return folder


def reference(folder: Path) -> tuple[dict[str, AnyArray], dict[str, AnyArray]]:
    """Inputs and OneFlow's outputs by name."""
    with np.load(folder / "reference.npz") as arrays:
        inputs = {name: arrays[name] for name in arrays.files if name.startswith("INPUT")}
        return inputs, {name: arrays[name] for name in arrays.files if name.startswith("OUTPUT")}
