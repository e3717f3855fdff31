"""What a session takes and computes, as Triton carries it."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
import zoo

from graphkiln_backend.engines.onnxruntime.session import signature_of
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.signature import Signature


def read(folder: Path) -> Signature:
    path = folder / "model.onnx"
    return signature_of(onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]), path)


def test_an_output_that_is_listed_twice_and_a_batch_of_minus_one(tmp_path: Path) -> None:
    found = read(zoo.add(tmp_path, "m", zoo.listed_twice()))
    assert len(found.outputs) == 1
    assert found.inputs[0].batchable


def test_outputs_that_are_no_tensors_are_not_told_of(tmp_path: Path) -> None:
    assert [spec.name for spec in read(zoo.add(tmp_path, "m", zoo.with_tensor_and_sequence())).outputs] == ["y"]
    with pytest.raises(LoweringError, match="no output is a tensor that Triton carries"):
        read(zoo.add(tmp_path, "n", zoo.with_sequence_output()))
