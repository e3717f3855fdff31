"""A tiny ONNX file, and the version that `graphkiln convert` makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir
from graphs import draw, graph
from typer.testing import CliRunner

from graphkiln.cli.main import app

TEXT = "(float[batch,4] x) => (float[batch,3] y) { p = MatMul(x, w) y = Add(p, b) }"


def run(*arguments: str | Path) -> Any:
    """Run `graphkiln` in this process, 80 columns wide."""
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "80"})


def write_source(folder: Path) -> Path:
    """Write the ONNX file."""
    onnx_ir.save(graph(TEXT, w=draw(4, 3), b=draw(3)), folder / "tiny.onnx")
    return folder / "tiny.onnx"


def convert(folder: Path) -> Path:
    """Convert it; return the version folder."""
    finished = run("convert", write_source(folder), "--name", "m", "--model-store", folder / "store")
    assert finished.exit_code == 0, finished.output
    return folder / "store" / "m" / "1"
