"""Conversions of graphs with text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import zoo
from converting import Convert
from onnx import TensorProto

from graphkiln_backend.repository.version import read_version
from graphkiln_converters.verify import verify


def test_labels_and_probabilities_of_a_zip_map(run: Convert, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(zoo.zipped().SerializeToString())
    version = read_version(run(str(tmp_path / "m.onnx")))
    assert version.manifest
    assert version.manifest.conversion
    assert version.golden
    assert [spec.name for spec in version.manifest.signature.outputs] == ["label", "probability"]
    assert set(version.golden.graph_outputs["label"]) <= {"no", "né", "yes"}
    (note,) = version.manifest.conversion.notes
    assert "a column for each of no, né, yes" in note
    assert verify(version, engine="onnxruntime", precision=None, samples=None, threads=1).verdicts


def test_text_as_input_and_output(run: Convert, tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(zoo.words().SerializeToString())
    feeds = {"INPUT_0": np.arange(6)[:, None], "INPUT_1": np.array(zoo.WORDS)[:, None]}
    np.savez(tmp_path / "samples.npz", **feeds)
    version = read_version(run(str(tmp_path / "m.onnx"), samples=str(tmp_path / "samples.npz")))
    assert version.golden
    assert version.golden.graph_outputs["word"].ravel().tolist() == list(zoo.WORDS[:4])
    verdicts = verify(
        version, engine="onnxruntime", precision=None, samples=tmp_path / "samples.npz", threads=1
    ).verdicts
    assert all(verdict.verdict.endswith("PASS") for verdict in verdicts)


def test_text_is_returned_unchanged(run: Convert, tmp_path: Path) -> None:
    proto = zoo.identity(("batch", 1), TensorProto.STRING)
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    version = read_version(run(str(tmp_path / "m.onnx")))
    assert version.golden
    (texts,), (found,) = version.golden.inputs.values(), version.golden.graph_outputs.values()
    np.testing.assert_array_equal(found, texts)
    assert onnx.load(version.graph_path).graph.output[0].type.tensor_type.elem_type == TensorProto.STRING
