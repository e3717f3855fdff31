"""ONNX Runtime's sessions on the committed example."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import LoweringError, SignatureError

CONFIG = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="test")


@pytest.fixture
def version_folder(digits: Path, tmp_path: Path) -> Path:
    return shutil.copytree(digits / "1", tmp_path / "1")


class TestOnnxRuntime:
    def test_runs_and_reports_its_signature(self, digits: Path) -> None:
        with OnnxRuntimeEngine().build(digits / "1" / "model.onnx", CONFIG) as session:
            (spec,) = session.signature.inputs
            assert (spec.name, spec.dtype, spec.shape) == ("INPUT_0", DType.FP32, ("batch", 1, 32, 32))
            scores = session.run({"INPUT_0": np.zeros((3, 1, 32, 32), np.float32)})["OUTPUT_0"]
        np.testing.assert_allclose(scores.sum(axis=1), np.ones(3), rtol=1e-5)

    def test_reads_back_what_ran_where(self, digits: Path) -> None:
        with OnnxRuntimeEngine().build(digits / "1" / "model.onnx", CONFIG) as session:
            placement = session.placement({"INPUT_0": np.zeros((1, 1, 32, 32), np.float32)})
        assert set(placement.nodes) == {"CPUExecutionProvider"}
        assert placement.nodes["CPUExecutionProvider"] >= 5
        assert placement.precision == "fp32"

    @pytest.mark.parametrize("content", [b"", b"nonsense", None])
    def test_a_damaged_graph_is_a_lowering_error(self, version_folder: Path, content: bytes | None) -> None:
        graph = version_folder / "model.onnx"
        graph.write_bytes(graph.read_bytes()[:5000] if content is None else content)
        with pytest.raises(LoweringError, match="cannot load"):
            OnnxRuntimeEngine().build(graph, CONFIG)

    def test_a_wrong_input_is_a_signature_error(self, digits: Path) -> None:
        with (
            OnnxRuntimeEngine().build(digits / "1" / "model.onnx", CONFIG) as session,
            pytest.raises(SignatureError, match="ONNX Runtime refuses"),
        ):
            session.run({"INPUT_0": np.zeros((1, 2, 32, 32), np.float32)})

    def test_does_not_claim_other_devices(self) -> None:
        assert not OnnxRuntimeEngine().probe(Device.gpu(0)).ok
