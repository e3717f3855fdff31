"""Detection of graphs that compute a row of a batch from others."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import parser

from graphkiln_backend.repository.config import ModelConfigProto, complete
from graphkiln_backend.repository.onnx_file import read_mixing, read_signature
from graphkiln_backend.repository.row_mixing import find_mixing, find_row_outputs

WEIGHTS = "<float[4,4] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}>"
RECURRENT = "<float[1,20,4] w, float[1,20,5] r>"
STATISTICS = "<float[4] one = {1,1,1,1}, float[4] zero = {0,0,0,0}>"


def graph(body: str, inputs: str = "float[n,4] x", *, weights: str = "", opset: int = 18) -> onnx.ModelProto:
    imports = f'<ir_version: 8, opset_import: ["" : {opset}, "ai.onnx.ml" : 3]>'
    return parser.parse_model(f"{imports} g ({inputs}) => (float[n,d] y) {weights} {{ {body} }}")


MIXING = {
    "softmax over the first axis": graph("y = Softmax<axis: int = 0>(x)"),
    "an old softmax over all axes": graph("y = Softmax<axis: int = 0>(x)", opset=11),
    "an old softmax of images": graph(
        "t = Transpose<perm: ints = [0, 2, 1]>(x) u = Transpose<perm: ints = [1, 0, 2]>(t) y = Softmax(u)",
        "float[n,4,4] x",
        opset=11,
    ),
    "a mean over the first axis": graph(
        "m = ReduceMean<keepdims: int = 1, axes: ints = [0]>(x) y = Sub(x, m)", opset=13
    ),
    "a mean over an axis from a constant": graph("m = ReduceMean(x, a) y = Sub(x, m)", weights="<int64[1] a = {-2}>"),
    "the maximum of all": graph("m = ReduceMax(x) y = Div(x, m)"),
    "batch norm in training mode": graph(
        "y, m, v = BatchNormalization<training_mode: int = 1>(x, one, zero, zero, one)", weights=STATISTICS
    ),
    "batch norm of an old opset with its statistics": graph(
        "y, m, v, sm, sv = BatchNormalization(x, one, zero, zero, one)", weights=STATISTICS, opset=12
    ),
    "attention across rows": graph(
        "k = Transpose(x) s = MatMul(x, k) a = Softmax(s) y = MatMul(a, x)",
    ),
    "attention across rows behind a layer": graph(
        "h = MatMul(x, w) k = Transpose(h) s = MatMul(h, k) y = MatMul(s, h)", weights=WEIGHTS
    ),
    "time first": graph(
        "o, h, c = LSTM<hidden_size: int = 5>(x, w, r) y = Squeeze(o, a)",
        "float[n,b,4] x",
        weights="<float[1,20,4] w, float[1,20,5] r, int64[1] a = {1}>",
    ),
    "time first behind an embedding": graph(
        "e = Gather(w, x) o, h, c = LSTM<hidden_size: int = 5>(e, u, r) y = Identity(o)",
        "int64[n,b] x",
        weights="<float[4,4] w, float[1,20,4] u, float[1,20,5] r>",
    ),
    "batch first after a needless transpose": graph(
        "t = Transpose<perm: ints = [1, 0, 2]>(x) o, h, c = LSTM<hidden_size: int = 5, layout: int = 1>(t, w, r)"
        "y = Identity(h)",
        "float[n,b,4] x",
        weights=RECURRENT,
    ),
    "a running sum": graph("y = CumSum(x, a)", weights="<int64 a = {0}>"),
    "one scale for all": graph("q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z)"),
    "a layer norm over everything": graph("y = LayerNormalization<axis: int = 0>(x, w)", weights=WEIGHTS),
    "a Gemm that turns its input": graph("y = Gemm<transA: int = 1>(x, w)", weights=WEIGHTS),
    "a Gemm whose bias has a number of each row": graph(
        "y = Gemm(x, w, c)", "float[n,4] x, float[n] c", weights=WEIGHTS
    ),
    "top-k over rows": graph("v, i = TopK<axis: int = 0>(x, k) y = Identity(v)", weights="<int64[1] k = {2}>"),
    "one branch for all rows": graph(
        "m = ReduceMax<keepdims: int = 0>(x, a) y = If(p) <"
        "then_branch = yes () => (float[n,4] t) { t = Neg(x) }, else_branch = no () => (float[n,4] e) { e = Abs(x) }>",
        "float[n,4] x, bool[n] p",
        weights="<int64[1] a = {1}>",
    ),
    "a scan with states over rows": graph(
        "s = Constant<value = float[4] {0,0,0,0}>() last, y = Scan<num_scan_inputs: int = 1, "
        "body = step (float[4] old, float[4] row) => (float[4] new, float[4] out) "
        "{ new = Add(old, row) out = Identity(new) }>(s, x)"
    ),
    "a loop whose count depends on values": graph(
        "c = Constant<value = bool {1}>() m = Constant<value = int64 {9}>() y = Loop(m, c, x) <body = step "
        "(int64 i, bool go, float[n,4] v) => (bool again, float[n,4] w) { w = Mul(v, v) z = ReduceMax<keepdims: int = "
        "0>(w) h = Constant<value = float {9}>() again = Less(z, h) }>"
    ),
}

UNMIXED = {
    "softmax over the classes": graph("y = Softmax(x)"),
    "an old softmax": graph("y = Softmax(x)", opset=11),
    "a layer": graph("h = MatMul(x, w) y = Relu(h)", weights=WEIGHTS),
    "a Gemm whose bias is a row": graph("y = Gemm(x, w, c)", "float[n,4] x, float[n,4] c", weights=WEIGHTS),
    "a Gemm whose bias is a column": graph("y = Gemm(x, w, c)", "float[n,4] x, float[n,1] c", weights=WEIGHTS),
    "a mean over the pixels": graph("y = ReduceMean(x, a)", "float[n,4,4] x", weights="<int64[1] a = {-1}>"),
    "batch norm with saved statistics": graph("y = BatchNormalization(x, one, zero, zero, one)", weights=STATISTICS),
    "attention within a row": graph(
        "k = Transpose<perm: ints = [0, 2, 1]>(x) s = MatMul(x, k) a = Softmax(s) o = MatMul(a, x)y = Flatten(o)",
        "float[n,4,4] x",
    ),
    "time second": graph(
        "t = Transpose<perm: ints = [1, 0, 2]>(x) o, h, c = LSTM<hidden_size: int = 5>(t, w, r) y = Squeeze(h, a)",
        "float[n,b,4] x",
        weights="<float[1,20,4] w, float[1,20,5] r, int64[1] a = {0}>",
    ),
    "batch first": graph(
        "o, h, c = LSTM<hidden_size: int = 5, layout: int = 1>(x, w, r) y = Squeeze(h, a)",
        "float[n,b,4] x",
        weights="<float[1,20,4] w, float[1,20,5] r, int64[1] a = {1}>",
    ),
    "an unused node mixes rows": graph("m = ReduceMax(x) z = Div(x, m) y = Relu(x)"),
    "a branch chosen by the shape": graph(
        "s = Shape(x) z = Constant<value = int64[1] {3}>() e = Equal(s, z) p = ReduceMin<keepdims: int = 0>(x) "
        "d = Size(x) f = Equal(d, d) y = If(f) <then_branch = yes () => (float[n,4] t) { t = Neg(x) }, "
        "else_branch = no () => (float[n,4] u) { u = Abs(x) }>"
    ),
    "a loop of a fixed number of times": graph(
        "c = Constant<value = bool {1}>() m = Constant<value = int64 {9}>() y = Loop(m, c, x) <body = step "
        "(int64 i, bool go, float[n,4] v) => (bool again, float[n,4] w) { w = Mul(v, v) again = Identity(go) }>"
    ),
    "an unknown reshape": graph("h = Reshape(x, s) m = ReduceMax(h) y = Sub(x, m)", weights="<int64[2] s={2,-1}>"),
}


@pytest.mark.parametrize("model", MIXING.values(), ids=MIXING)
def test_graphs_that_mix_rows(model: onnx.ModelProto, tmp_path: Path) -> None:
    assert find_mixing(model)
    onnx.save(model, tmp_path / "model.onnx")
    assert read_mixing(tmp_path / "model.onnx") == find_mixing(model)
    config = ModelConfigProto(name="m")
    complete(config, read_signature(tmp_path / "model.onnx"), labels_file=None)
    assert config.max_batch_size == 0
    assert config.input[0].dims[0] == -1


@pytest.mark.parametrize("model", UNMIXED.values(), ids=UNMIXED)
def test_graphs_with_independent_rows(model: onnx.ModelProto, tmp_path: Path) -> None:
    assert find_mixing(model) == ""
    onnx.save(model, tmp_path / "model.onnx")
    assert read_signature(tmp_path / "model.onnx").batchable


def test_dims_without_the_batch_enable_batching(tmp_path: Path) -> None:
    """As they do with Triton's own backend: requests are computed one by one then."""
    onnx.save(MIXING["softmax over the first axis"], tmp_path / "model.onnx")
    config = ModelConfigProto(name="m")
    config.input.add(name="x", dims=[4])
    complete(config, read_signature(tmp_path / "model.onnx"), labels_file=None)
    assert config.max_batch_size == 4


def test_mixing_node_is_named() -> None:
    assert find_mixing(MIXING["softmax over the first axis"]) == "Softmax 'y' works along the rows"


TREE = """s, p = ai.onnx.ml.TreeEnsembleClassifier<
    nodes_treeids: ints = [0, 0, 0], nodes_nodeids: ints = [0, 1, 2], nodes_featureids: ints = [0, 0, 0],
    nodes_modes: strings = ["BRANCH_LEQ", "LEAF", "LEAF"], nodes_values: floats = [0.5, 0.0, 0.0],
    nodes_truenodeids: ints = [1, 0, 0], nodes_falsenodeids: ints = [2, 0, 0], class_treeids: ints = [0, 0],
    class_nodeids: ints = [1, 2], class_ids: ints = [0, 1], class_weights: floats = [1.0, 1.0],
    classlabels_int64s: ints = [0, 1]>(x)"""


def test_labels_declared_for_one_row(tmp_path: Path) -> None:
    """As onnxmltools writes them for LightGBM."""
    text = '<ir_version: 8, opset_import: ["" : 18, "ai.onnx.ml" : 3]> g (float[n,4] x)'
    model = parser.parse_model(f"{text} => (int64[1] label, float[n,2] p) {{ {TREE} label = Identity(s) }}")
    assert find_row_outputs(model) == {"label", "p"}
    onnx.save(model, tmp_path / "model.onnx")
    assert read_signature(tmp_path / "model.onnx").batchable


def test_output_with_one_row(tmp_path: Path) -> None:
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> g (float[n,4] x) => (float[1,4] y)'
        "{ a = Constant<value = int64[1] {0}>() y = ReduceMean(x, a) }"
    )
    onnx.save(model, tmp_path / "model.onnx")
    assert read_signature(tmp_path / "model.onnx").outputs[0].shape == (1, 4)
