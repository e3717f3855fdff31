"""Quantized graphs of every quantizer and operator set: what is written with a proof is served with it.

`convert` may refuse a graph. If it writes one, `verify`, `explain` and a server must accept it on the same machine.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graphs import draw
from onnx import numpy_helper
from onnxruntime import quantization
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

from graphkiln.cli.lower import open_artifact_cache, read_deployment
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.repository.version import read_version
from graphkiln_converters import precision
from graphkiln_converters.convert import convert
from graphkiln_converters.recipe_file import read_recipe
from graphkiln_converters.verify import verify

WEIGHTS: dict[str, Any] = {
    "k": draw(4, 3, 3, 3), "b": draw(4, seed=1), "fc": draw(64, 32), "fb": draw(32, seed=2), "out": draw(32, 5),
    # Small, so that the softmax does not magnify the rounding of integer kernels.
    "q": draw(32, 32, seed=3) / 8, "v": draw(32, 32, seed=4) / 8, "mlp": draw(32, 32, seed=5) / 8,
    "scale": np.float32(0.2),
    "rows": np.array([-1, 2, 32]), "flat": np.array([-1, 64]),
}  # fmt: skip
# Shape of a sample, the output, and the nodes.
GRAPHS = {
    "convolutions": (
        (3, 6, 6),
        "float[n,5] y",
        """c = Conv<pads=[1,1,1,1]>(x, k, b) r = Relu(c) a = AveragePool<kernel_shape=[3,3], strides=[2,2]>(r)
        m = MaxPool<kernel_shape=[1,1]>(a) f = Concat<axis=1>(a, m, a, m) g = Flatten(f) h = Gemm(g, fc, fb)
        y = MatMul(h, out)""",
    ),
    "attention": (
        (2, 32),
        "float[n,2,32] y",
        """a = MatMul(x, q) w = MatMul(x, v) t = Transpose<perm=[0,2,1]>(w) p = MatMul(a, t) c = Mul(p, scale)
        s = Softmax<axis=-1>(c) d = MatMul(s, w) e = Add(d, x) g = MatMul(e, mlp) y = Tanh(g)""",
    ),
    "reshapes": (
        (64,),
        "float[n,5] y",
        """r = Reshape(x, rows) a = MatMul(r, q) c = Relu(a) u = Reshape(c, flat) h = MatMul(u, fc) o = Sigmoid(h)
        y = MatMul(o, out)""",
    ),
}
OPSETS = range(13, onnx.defs.onnx_opset_version() + 1)


def fp32(name: str, opset: int) -> onnx.ModelProto:
    shape, output, nodes = GRAPHS[name]
    words = {word for node in onnx.parser.parse_graph(f"g () => () {{ {nodes} }}").node for word in node.input}
    text = f"(float[n,{','.join(map(str, shape))}] x) => ({output}) {{ {nodes} }}"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g {text}')
    model.graph.initializer.extend(numpy_helper.from_array(WEIGHTS[each], each) for each in words & WEIGHTS.keys())
    for number, node in enumerate(model.graph.node):
        node.name = f"node{number}"
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def samples(name: str, seed: int, count: int = 8) -> Mapping[str, np.ndarray]:
    return {"x": draw(count, *GRAPHS[name][0], seed=seed)}


class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, name: str) -> None:
        self.feeds = iter([samples(name, 3)])

    def get_next(self) -> Any:
        return next(self.feeds, None)


def static(activation: str, form: str = "QDQ") -> Callable[[str, Path, Path], None]:
    def quantize(name: str, source: Path, target: Path) -> None:
        quantization.quantize_static(
            str(source), str(target), Reader(name), quant_format=quantization.QuantFormat[form],
            activation_type=quantization.QuantType[activation], weight_type=quantization.QuantType.QInt8,
            per_channel=form == "QDQ",
        )  # fmt: skip

    return quantize


def dynamic(_: str, source: Path, target: Path) -> None:
    quantization.quantize_dynamic(str(source), str(target))


def four_bits(_: str, source: Path, target: Path) -> None:
    quantizer = MatMulNBitsQuantizer(onnx.load(source), block_size=32, is_symmetric=True)
    quantizer.process()
    quantizer.model.save_model_to_file(str(target))


def four_bits_qdq(_: str, source: Path, target: Path) -> None:
    form = quantization.QuantFormat.QDQ
    quantizer = MatMulNBitsQuantizer(onnx.load(source), block_size=32, is_symmetric=True, quant_format=form)
    quantizer.process()
    quantizer.model.save_model_to_file(str(target))


def by_nncf(name: str, source: Path, target: Path) -> None:
    nncf = pytest.importorskip("nncf")
    rows = [{"x": samples(name, 3)["x"][row : row + 1]} for row in range(8)]
    onnx.save(nncf.quantize(onnx.load(source), nncf.Dataset(rows)), target)


def compressed(mode: str, **options: Any) -> Callable[[str, Path, Path], None]:
    def compress(_: str, source: Path, target: Path) -> None:
        nncf = pytest.importorskip("nncf")
        done = nncf.compress_weights(onnx.load(source), mode=nncf.CompressWeightsMode[mode], **options)
        onnx.save(done, target)

    return compress


def typed_fields(name: str, source: Path, target: Path) -> None:
    """Weights in `float_data`, `int32_data` and so on instead of `raw_data`, as some tools write them."""
    static("QInt8")(name, source, target)
    model = onnx.load(target)
    for tensor in model.graph.initializer:
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(onnx.helper.make_tensor(tensor.name, tensor.data_type, array.shape, array.ravel().tolist()))
    onnx.save(model, target)


def ours(_: str, source: Path, target: Path) -> None:
    """The fp32 graph, which `convert --precision int8` quantizes."""
    target.write_bytes(source.read_bytes())


QUANTIZERS: dict[str, Callable[[str, Path, Path], None]] = {
    "int8 by ONNX Runtime": static("QInt8"),
    "uint8 by ONNX Runtime": static("QUInt8"),
    "operators by ONNX Runtime": static("QUInt8", "QOperator"),
    "signed operators by ONNX Runtime": static("QInt8", "QOperator"),
    "dynamic by ONNX Runtime": dynamic,
    "int4 by ONNX Runtime": four_bits,
    "int4 as QDQ by ONNX Runtime": four_bits_qdq,
    "int8 by NNCF": by_nncf,
    "int8 weights by NNCF": compressed("INT8_ASYM"),
    "int4 by NNCF": compressed("INT4_SYM", group_size=32, all_layers=True),
    "typed fields": typed_fields,
    "convert --int8-by onnxruntime": ours,
    "convert --int8-by nncf": ours,
    "convert --int8-by modelopt": ours,
}
FAST = [
    ("convolutions", 13, "int8 by ONNX Runtime"),
    ("reshapes", 21, "int8 by ONNX Runtime"),
    ("reshapes", 23, "typed fields"),
    ("attention", 20, "int4 by NNCF"),
    ("reshapes", 23, "convert --int8-by nncf"),
    ("attention", OPSETS[-1], "int4 by ONNX Runtime"),
    ("attention", OPSETS[-1], "convert --int8-by onnxruntime"),
]


@pytest.fixture(autouse=True)
def no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "compare_speed", lambda *_: "")


def check(name: str, opset: int, quantizer: str, folder: Path) -> str:
    """Quantize, convert, and check every command; return why a step before the last ones refused, or empty."""
    onnx.save(fp32(name, opset), folder / "fp32.onnx")
    try:
        with redirect_stdout(io.StringIO()):
            QUANTIZERS[quantizer](name, folder / "fp32.onnx", folder / "m.onnx")
    except Exception as error:  # tools of others
        return f"the quantizer: {error}"
    np.savez(folder / "samples.npz", **samples(name, 1))
    options: dict[str, Any] = {"samples": str(folder / "samples.npz"), "keep_names": True}
    if quantizer.startswith("convert"):
        np.savez(folder / "calibration.npz", **samples(name, 2, 16))
        options |= {"precision": "int8", "calibration": str(folder / "calibration.npz"), "relative_l2": 0.9}
        options |= {"int8_by": quantizer.rsplit(maxsplit=1)[-1]}
    recipe = {"source": str(folder / "m.onnx"), "name": "m", "model_store": str(folder / "store"), **options}
    try:
        version = convert(read_recipe(None, recipe, []))
    except GraphkilnError as error:
        assert not list((folder / "store").rglob("*.onnx"))
        return f"convert: {error}"
    verify(read_version(version), engine="", precision=None, samples=None, threads=1)
    with open_artifact_cache(str(folder / "cache")) as artifacts:
        proven = read_deployment(version.parent, None, artifacts).build(artifacts)
        with proven.session:
            assert proven.self_test is not None
            # The scales of a dynamic quantizer depend on all rows.
            assert proven.self_test.batch_sizes[-1] == (1 if "dynamic" in quantizer else 32)
    return ""


@pytest.mark.parametrize(("name", "opset", "quantizer"), FAST)
def test_what_is_proven_is_served(name: str, opset: int, quantizer: str, tmp_path: Path) -> None:
    refused = check(name, opset, quantizer, tmp_path)
    assert not refused


@pytest.mark.slow
@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("quantizer", QUANTIZERS)
@pytest.mark.parametrize("name", GRAPHS)
def test_every_quantizer_and_opset(name: str, opset: int, quantizer: str, tmp_path: Path) -> None:
    refused = check(name, opset, quantizer, tmp_path)
    if refused:
        pytest.skip(refused)
