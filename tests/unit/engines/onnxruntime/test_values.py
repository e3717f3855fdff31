"""Text and bf16, which ONNX Runtime's numpy binding gets wrong."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import zoo

from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.onnxruntime.session import decode_text, run_ort_values
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.errors import SignatureError

BF16 = np.dtype(ml_dtypes.bfloat16)


class TestText:
    @pytest.mark.parametrize(
        "array",
        [
            np.array([b"a", "gr\u00f6\u00dfe".encode()], object),
            np.array(["a", "gr\u00f6\u00dfe"], object),
            np.array([b"a", "gr\u00f6\u00dfe"], object),
            np.array([b"a", "gr\u00f6\u00dfe".encode()], "S"),
            np.array(["a", "gr\u00f6\u00dfe"]),
        ],
        ids=["bytes", "text", "both", "fixed", "numpy's own"],
    )
    def test_bytes_and_text_become_text(self, array: np.ndarray) -> None:
        found = decode_text("x", array)
        assert found.dtype == np.object_
        assert found.tolist() == ["a", "gr\u00f6\u00dfe"]

    def test_what_is_no_utf8_is_the_callers_error(self) -> None:
        with pytest.raises(SignatureError, match="input 'words' holds text that cannot be read: expected UTF-8"):
            decode_text("words", np.array([b"fine", b"\xff\xfe"], object))


class TestBf16:
    @pytest.fixture
    def session(self) -> onnxruntime.InferenceSession:
        model = zoo.identity(("batch", "n"), onnx.TensorProto.BFLOAT16)
        return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    def run(self, session: onnxruntime.InferenceSession, array: np.ndarray) -> np.ndarray:
        (found,) = run_ort_values(session, ["y"], {"x": array}, onnxruntime.RunOptions())
        return found

    def test_every_bit_pattern_comes_back(self, session: onnxruntime.InferenceSession) -> None:
        """Subnormals, both zeros, infinities and every NaN."""
        patterns = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
        found = self.run(session, patterns.view(BF16))
        assert found.dtype == BF16
        np.testing.assert_array_equal(found.view(np.uint16), patterns)


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_text_beside_bf16(shape: tuple[int, ...]) -> None:
    nodes = [onnx.helper.make_node("Identity", [name], [name * 2]) for name in "xt"]
    values = {
        name: zoo.value(name, dims, dtype)
        for name, dims, dtype in (
            ("x", ("n",), onnx.TensorProto.BFLOAT16),
            ("t", shape, onnx.TensorProto.STRING),
            ("xx", ("n",), onnx.TensorProto.BFLOAT16),
            ("tt", shape, onnx.TensorProto.STRING),
        )
    }
    model = zoo.model(nodes, [values["x"], values["t"]], [values["xx"], values["tt"]])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    text = np.full(shape, "gr\u00f6\u00dfe, longer than a short string", object)
    feeds = {"x": np.ones(3, BF16), "t": text}
    numbers, found = run_ort_values(session, ["xx", "tt"], feeds, onnxruntime.RunOptions())
    assert numbers.dtype == BF16
    assert (found.shape, found.tolist()) == (shape, text.tolist())


@pytest.mark.parametrize("shared", [True, False])
def test_an_input_of_any_rank_is_no_scalar(tmp_path: Path, shared: bool) -> None:
    """The graph does not say how many dimensions it has; ONNX Runtime gives it none, and requests were refused."""
    model = zoo.scale(("batch", 3))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    onnx.save(model, tmp_path / "model.onnx")
    folder = tmp_path / "shared" if shared else None
    config = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="test", shared_folder=folder)
    with OnnxRuntimeEngine().build(tmp_path / "model.onnx", config) as session:
        session.signature.check({"x": np.ones((2, 3), np.float32)})
        assert not session.signature.inputs[0].has_rank
