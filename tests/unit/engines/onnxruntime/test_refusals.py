"""Ways out of what ONNX Runtime refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import zoo

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.onnxruntime.loading import hint_for
from graphkiln_backend.graph.errors import LoweringError


def saved(folder: Path, opset: int) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(zoo.scale(("batch", 3), opset=opset).SerializeToString())
    return path


def test_a_graph_that_is_older_than_all_kernels(tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match="operator set 6, and ONNX Runtime computes those from 7 on"):
        OnnxRuntimeEngine().build_reference(saved(tmp_path, 6))


@pytest.mark.parametrize(
    ("error", "hint"), [("x is not a registered function/op", "op_library_filename"), ("construct locale", "")]
)
def test_what_the_error_itself_tells(tmp_path: Path, error: str, hint: str) -> None:
    found = hint_for(error, saved(tmp_path, 18))
    assert hint in found
    assert bool(hint) == bool(found)
