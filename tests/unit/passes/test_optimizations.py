"""Each optimization: what it rewrites, what it leaves, and that the numbers stay."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest
from graphs import compute, draw, graph, ints, operators

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.passes.base import Pass, run_passes
from graphkiln_backend.passes.constants import ShareWeights
from graphkiln_backend.passes.folding import FoldConstants
from graphkiln_backend.passes.fusions import AddIntoProducer, CleanUp, FoldBatchNorm, FuseLayerNorm, PadIntoConv

WIDTH = 8
# Weights by name; those that a graph reads become its initializers.
WEIGHTS: dict[str, Any] = {
    "k3": draw(4, 3, 3, 3), "k4": draw(4, 4, 1, 1), "grouped": draw(4, 2, 2, 2), "up": draw(3, 4, 2, 2),
    "bias": draw(4, seed=1), "w45": draw(4, 5), "w54": draw(5, 4), "w34": draw(3, 4), "c5": draw(5, seed=1),
    "scale": draw(4, seed=1), "shift": draw(4, seed=2), "mean": draw(4, seed=3),
    "variance": draw(4, seed=4) ** 2 + np.float32(1e-3),  # so small that epsilon counts
    "scale3": draw(3, seed=1), "shift3": draw(3, seed=2), "mean3": draw(3, seed=3), "variance3": draw(3, seed=4) ** 2,
    "zero": np.float32(0), "one": np.float32(1), "two": np.float32(2),
    "flat": ints(-1, 12), "square": ints(-1, 3, 4), "same": ints(2, 3, 4), "row": draw(3),
    "offset": draw(4, 1, 1, seed=2), "offset4": draw(1, 4, 1, 1), "plane": draw(1, 3, 3), "planes": draw(4, 3, 3),
    "single": draw(1), "column": draw(3), "column4": draw(1, 1, 1, 3),
    "last": ints(-1), "other_axis": ints(1), "share": np.float32(1 / WIDTH), "third": np.float32(0.3),
    "epsilon": np.float32(1e-3), "gain": draw(WIDTH), "lift": draw(WIDTH, seed=1), "gate": draw(5, WIDTH),
    "tall": draw(5, 1), "around": ints(0, 0, 1, 1, 0, 0, 1, 1), "uneven": ints(0, 0, 2, 0, 0, 0, 1, 3),
    "channels": ints(0, 1, 0, 0, 0, 0, 0, 0), "rest": ints(-1),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A graph from `x` to `y`, the operators that a pass leaves of it, and the beginning of its note."""

    shapes: str
    nodes: str
    left: str
    note: str = ""


def serve(model: onnx_ir.Model, folder: Path, x: AnyArray) -> dict[str, AnyArray]:
    """Outputs by name, from ONNX Runtime without its own rewrites."""
    onnx_ir.save(model, folder / "model.onnx")
    with OnnxRuntimeEngine().build_reference(folder / "model.onnx") as session:
        return session.run({"x": x})


def norm(value: str, channels: str = "", more: str = "") -> str:
    statistics = ", ".join(f"{name}{channels}" for name in ("scale", "shift", "mean", "variance"))
    return f"BatchNormalization<epsilon=0.01{more}>({value}, {statistics})"


def check(case: Case, *passes: Pass, size: tuple[int, ...], rtol: float = 1e-4) -> None:
    read = set(re.findall(r"\w+", case.nodes))
    text = f"(float[{case.shapes.replace('->', '] x) => (float[')}] y) {{ {case.nodes} }}"
    model = graph(text, **{name: array for name, array in WEIGHTS.items() if name in read})
    x = draw(*size, seed=9)
    expected = compute(model, x=x)["y"]
    *_, report = run_passes(model, passes).reports
    assert operators(model) == case.left.split()
    assert report.note.startswith(case.note) if case.note else not report.note
    np.testing.assert_allclose(compute(model, x=x)["y"], expected, rtol=rtol, atol=rtol)


CONV, PRODUCT = "b,3,5,5 -> b,4,3,3", "2,4 -> 2,5"
ADDITIONS = {
    "per channel": Case(CONV, "c = Conv(x, k3) y = Add(c, offset)", "Conv"),
    "from the left": Case(CONV, "c = Conv(x, k3) y = Add(offset4, c)", "Conv"),
    "to a bias": Case(CONV, "c = Conv(x, k3, bias) y = Add(c, offset)", "Conv"),
    "a plane": Case(CONV, "c = Conv(x, k3) y = Add(c, plane)", "Conv Add"),
    "all planes": Case(CONV, "c = Conv(x, k3) y = Add(c, planes)", "Conv Add"),
    "one number": Case(CONV, "c = Conv(x, k3) y = Add(c, single)", "Conv Add"),
    "a column": Case(CONV, "c = Conv(x, k3) y = Add(c, column)", "Conv Add"),
    "a column of rank 4": Case(CONV, "c = Conv(x, k3) y = Add(c, column4)", "Conv Add"),
    "a convolution with other readers": Case(CONV, "c = Conv(x, k3) a = Add(c, offset) y = Mul(a, c)", "Conv Add Mul"),
}


@pytest.mark.parametrize("name", ADDITIONS)
def test_addition_into_a_convolution(name: str) -> None:
    check(ADDITIONS[name], AddIntoProducer(), size=(2, 3, 5, 5))


@pytest.mark.parametrize(
    ("case", "size"),
    [
        (
            Case("b,4,6,6 -> b,4,2,2", "c = Conv<strides=[2,2], group=2, dilations=[2,2]>(x, grouped) "
                 "y = Add(c, offset)", "Conv"),
            (2, 4, 6, 6),
        ),
        (Case("b,4,5,5 -> b,4,5,5", "c = Conv(x, k4) y = Add(c, x)", "Conv Add"), (2, 4, 5, 5)),
        (Case(PRODUCT, "p = MatMul(x, w45) y = Add(p, c5)", "Gemm"), (2, 4)),
        (Case(PRODUCT, "t = Transpose<perm=[1,0]>(w54) p = MatMul(x, t) y = Add(p, c5)", "Gemm"), (2, 4)),
        (Case("2,3,4 -> 2,3,5", "p = MatMul(x, w45) y = Add(p, c5)", "MatMul Add"), (2, 3, 4)),
    ],
    ids=["attributes", "residual", "product", "transposed product", "product of rank 3"],
)  # fmt: skip
def test_addition(case: Case, size: tuple[int, ...]) -> None:
    check(case, AddIntoProducer(), size=size)


IMAGE = "b,3,6,6 -> b,n,h,k"
BATCH_NORMS = {
    "convolution": Case(IMAGE, f"c = Conv(x, k3) y = {norm('c')}", "Conv"),
    "with a bias": Case(IMAGE, f"c = Conv(x, k3, bias) y = {norm('c')}", "Conv"),
    "transposed": Case(IMAGE, f"c = ConvTranspose(x, up) y = {norm('c')}", "ConvTranspose"),
    "behind an activation": Case(IMAGE, f"c = Relu(x) y = {norm('c', '3')}", "Relu BatchNormalization", "1 left"),
    "in training mode": Case(
        IMAGE, f"c = Conv(x, k3) y, m, v = {norm('c', more=', training_mode=1')}", "Conv BatchNormalization",
        "batch norms in training mode",
    ),
    "a convolution with other readers": Case(
        IMAGE, f"c = Conv(x, k3) n = {norm('c')} y = Add(n, c)", "Conv BatchNormalization Add", "1 left"
    ),
    "shared weights": Case(
        IMAGE, f"c = Conv(x, k3) d = Conv(x, k3) n = {norm('c')} y = Sub(n, d)", "Conv Conv BatchNormalization Sub",
        "1 left",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCH_NORMS)
def test_batch_norm(name: str) -> None:
    check(BATCH_NORMS[name], FoldBatchNorm(), size=(2, 3, 6, 6), rtol=1e-3)


def test_batch_norm_into_a_product() -> None:
    check(Case("b,3 -> b,4", f"p = Gemm(x, w34) y = {norm('p')}", "Gemm"), FoldBatchNorm(), size=(5, 3), rtol=1e-3)


CUBE = "b,3,4 -> b,n,m"
CLEANED = {
    "identity": Case(CUBE, "a = Identity(x) y = Relu(a)", "Relu"),
    "cast": Case(CUBE, "a = Cast<to=1>(x) y = Relu(a)", "Relu"),
    "transposes": Case(CUBE, "a = Transpose<perm=[0,2,1]>(x) b = Transpose<perm=[0,2,1]>(a) y = Relu(b)", "Relu"),
    "transpose": Case(CUBE, "a = Transpose<perm=[0,1,2]>(x) y = Relu(a)", "Relu"),
    "reshapes": Case(CUBE, "a = Reshape(x, flat) b = Reshape(a, square) y = Relu(b)", "Reshape Relu"),
    "twice": Case(CUBE, "a = Relu(x) b = Relu(x) y = Add(a, b)", "Relu Add"),
    "expansion to its own shape": Case("2,3,4 -> 2,3,4", "a = Expand(x, same) y = Relu(a)", "Relu"),
    "factor": Case(CUBE, "a = Mul(x, two) y = Relu(a)", "Mul Relu"),
    "layout": Case(CUBE, "a = Transpose<perm=[0,2,1]>(x) y = Reshape(a, square)", "Transpose Reshape"),
    "rounding": Case(CUBE, "a = Cast<to=10>(x) b = Cast<to=1>(a) y = Relu(b)", "Cast Cast Relu"),
}
EDGES = np.array([[-0.0, 0.0, 1.0], [np.nan, np.inf, -np.inf], [1e-45, 3e38, 1 + 2**-11 + 2**-23]], np.float32)


@pytest.mark.parametrize("name", CLEANED)
def test_clean_up(name: str) -> None:
    check(CLEANED[name], CleanUp(), size=(2, 3, 4))


@pytest.mark.parametrize(
    ("nodes", "weight"),
    [
        ("a = Add(x, w) y = Reciprocal(a)", 0.0),
        ("a = Sub(x, w) y = Reciprocal(a)", -0.0),
        ("y = Add(x, w)", 1e-9),
        ("y = Mul(x, w)", 1 + 2**-20),
        ("y = Div(x, w)", 1 - 2**-20),
        ("a = Cast<to=11>(x) b = Mul(a, third) c = Cast<to=1>(b) d = Cast<to=10>(c) y = Cast<to=1>(d)", 1),
        ("a = Cast<to=16>(x) y = Cast<to=1>(a)", 1),
        ("a = Cast<to=6>(x) b = Cast<to=1>(a) c = Cast<to=10>(b) y = Cast<to=1>(c)", 1),
        ("a = Identity(x) b = Cast<to=1>(a) y = Reciprocal(b)", 1),
    ],
)
def test_clean_up_keeps_every_bit(nodes: str, weight: float, tmp_path: Path) -> None:
    model = graph(f"(float[n,3] x) => (float[n,3] y) {{ {nodes} }}", w=np.float32(weight), third=np.float64(1 / 3))
    expected = serve(model, tmp_path, EDGES)["y"]
    run_passes(model, [FoldConstants(), CleanUp()])
    assert serve(model, tmp_path, EDGES)["y"].tobytes() == expected.tobytes()


def test_random_numbers_are_not_shared() -> None:
    nodes = "a = RandomUniformLike(x) b = RandomUniformLike(x) y = Sub(a, b)"
    model = graph(f"(float[b,3] x) => (float[b,3] y) {{ {nodes} }}")
    run_passes(model, [CleanUp()])
    assert operators(model) == ["RandomUniformLike", "RandomUniformLike", "Sub"]


def test_output_that_is_an_identity() -> None:
    model, x = graph("(float[b,3] x) => (float[b,3] y, float[b,3] z) { y = Relu(x) z = Identity(y) }"), draw(2, 3)
    for _ in range(2):
        run_passes(model, [CleanUp()])
        found = compute(model, x=x)
        assert list(found) == ["y", "z"]
        np.testing.assert_array_equal(found["y"], np.maximum(x, 0))
        np.testing.assert_array_equal(found["y"], found["z"])


def test_outputs_of_a_loop_stay_separate() -> None:
    """ONNX Runtime computes a loop wrongly whose state and scan output are one value."""
    model = graph(
        """(float[2] s, float[3,2] x) => (float[2] y, float[3,2] z) {
            y, z = Scan<num_scan_inputs=1, body=step (float[2] a, float[2] b) => (float[2] c, float[2] d) {
                c = Add(a, b)
                d = Identity(c)
            }>(s, x)
        }"""
    )
    run_passes(model, [CleanUp()])
    (body,) = model.graph.subgraphs()
    assert len({value.name for value in body.outputs}) == 2


FOLDED = {
    "expressions": Case("b,3 -> b,3", "a = Exp(row) c = Neg(a) y = Mul(x, c)", "Mul"),
    "constant nodes": Case("b,3 -> b,3", "c = Constant<value = float[3] {1.0, 2.0, 3.0}>() y = Mul(x, c)", "Mul"),
    "known sizes": Case(
        "b,3 -> b,3",
        "s = Shape<start=1>(x) p = ReduceProd<keepdims=1>(s) m = Concat<axis=0>(rest, p) y = Reshape(x, m)",
        "Reshape",
    ),
    "dynamic sizes": Case(
        "b,3 -> b,3", "s = Shape(x) z = ConstantOfShape(s) y = Add(x, z)", "Shape ConstantOfShape Add"
    ),
}


def test_constants_are_those_of_the_runtime(tmp_path: Path) -> None:
    """ONNX's reference rounds halves in Resize otherwise, and spells numbers in its own way."""
    nodes = """
        s = Cast<to=8>(numbers) b = ArgMax<axis=1, keepdims=0>(x) y = Gather(s, b)
        r = Resize<mode="linear">(pixels, , scales) t = Cast<to=1>(r) u = ReduceSum<keepdims=0>(t) z = Mul(x, u)
        e = ReduceMean<keepdims=0>(none) w = Add(x, e) l, m = Split<num_outputs=2>(numbers) v = Concat<axis=0>(m, l)
    """
    weights: dict[str, Any] = {
        "numbers": np.array([0, 1.5, 1e-9, 1e20], np.float32), "scales": np.array([1, 1, 2.6, 2.6], np.float32),
        "pixels": np.arange(0, 250, 10, dtype=np.uint8).reshape(1, 1, 5, 5), "none": np.zeros((0,), np.float32),
    }  # fmt: skip
    outputs = "string[b] y, float[b,3] z, float[b,3] w, float[4] v"
    model, x = graph(f"(float[b,3] x) => ({outputs}) {{ {nodes} }}", **weights), draw(2, 3)
    expected = serve(model, tmp_path, x)
    run_passes(model, [FoldConstants()])
    assert operators(model) == ["ArgMax", "Gather", "Mul", "Add", "Concat"]
    for name, array in serve(model, tmp_path, x).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.parametrize("to", ["16", "17", "22"], ids=["bf16", "FLOAT8", "INT4"])
def test_constants_that_have_no_array_stay(to: str, tmp_path: Path) -> None:
    nodes = f"c = Cast<to={to}>(w) d = Cast<to=1>(c) y = Add(x, d)"
    model, x = graph(f"(float[b,3] x) => (float[b,3] y) {{ {nodes} }}", opset=21, w=draw(3)), draw(2, 3)
    expected = serve(model, tmp_path, x)["y"]
    run_passes(model, [FoldConstants()])
    assert operators(model) == ["Cast", "Cast", "Add"]
    np.testing.assert_array_equal(serve(model, tmp_path, x)["y"], expected)


@pytest.mark.parametrize("name", FOLDED)
def test_folded_constants(name: str) -> None:
    check(FOLDED[name], FoldConstants(), size=(2, 3))


def test_large_results_are_not_folded() -> None:
    text = "(float[1,1024,2048] x) => (float[1,1024,2048] y) { e = Expand(w, s) y = Add(x, e) }"
    model = graph(text, w=np.float32(2), s=np.array([1, 1024, 2048]))
    run_passes(model, [FoldConstants()])
    assert "Expand" in operators(model)


def test_functions_are_inlined() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["": 18, "own": 1]>
        g (float[b,3] x) => (float[b,3] y) { y = own.twice(x) }
        <domain: "own", opset_import: ["": 18]> twice (x) => (y) { y = Add(x, x) }"""
    )
    model, x = onnx_ir.from_proto(proto), draw(2, 3)
    run_passes(model, [FoldConstants()])
    assert (operators(model), len(model.functions)) == (["Add"], 0)
    np.testing.assert_array_equal(compute(model, x=x)["y"], x + x)


def test_equal_weights_are_shared() -> None:
    text = "(float[b,3] x) => (float[b,3] y) { a = Mul(x, v) b = Add(a, w) y = Sub(b, u) }"
    model, x = graph(text, v=draw(3), w=draw(3), u=draw(3, seed=1)), draw(2, 3)
    expected = compute(model, x=x)["y"]
    run_passes(model, [ShareWeights()])
    assert len(model.graph.initializers) == 2
    np.testing.assert_array_equal(compute(model, x=x)["y"], expected)


def test_other_shapes_or_types_are_not_shared() -> None:
    text = "(float[2,2] x, int32[2,2] i) => (float[2,2] y, int32[2,2] j) { a = Add(x, v) y = Add(a, w) j = Add(i, u) }"
    model = graph(text, v=np.zeros((2, 2), "f4"), w=np.zeros((1, 2), "f4"), u=np.zeros((2, 2), "i4"))
    run_passes(model, [ShareWeights()])
    assert len(model.graph.initializers) == 3


ROWS = f"b,5,{WIDTH} -> b,5,{WIDTH}"
BY_MEAN = "m = ReduceMean<keepdims=1>(x, last) c = Sub(x, m)"
BY_SUM = "s = ReduceSum<keepdims=1>(x, last) m = Mul(s, share) c = Sub(x, m)"
SQUARE = "q = Mul(c, c)"
VARIANCE = "v = ReduceMean<keepdims=1>(q, last) e = Add(v, epsilon) d = Sqrt(e)"
DIVISION = "n = Div(c, d)"
SCALED = "g = Mul(n, gain) y = Add(g, lift)"
USUAL = f"{BY_MEAN} {SQUARE} {VARIANCE} {DIVISION} {SCALED}"


@pytest.mark.parametrize("mean", [BY_MEAN, BY_SUM])
@pytest.mark.parametrize("square", [SQUARE, "q = Pow(c, two)"])
@pytest.mark.parametrize("quotient", [DIVISION, "r = Reciprocal(d) n = Mul(c, r)"])
def test_written_out_layer_norms(mean: str, square: str, quotient: str) -> None:
    case = Case(ROWS, f"{mean} {square} {VARIANCE} {quotient} {SCALED}", "LayerNormalization")
    check(case, CleanUp(), FuseLayerNorm(), size=(3, 5, WIDTH))


LONG = "ReduceMean Sub Mul ReduceMean Add Sqrt Div Mul"
OTHER_NORMS = {
    "a gate of the whole shape": Case(ROWS, USUAL.replace(SCALED, "y = Mul(n, gate)"), LONG),
    "a gate that is computed": Case(ROWS, USUAL.replace(SCALED, "y = Mul(n, x)"), LONG),
    "a sum that is no mean": Case(
        ROWS, USUAL.replace(BY_MEAN, BY_SUM.replace("share", "third")), f"ReduceSum Mul {LONG[11:]} Add"
    ),
    "another axis": Case(ROWS, USUAL.replace("last", "other_axis"), f"{LONG} Add"),
    "a shift of another shape": Case(ROWS, USUAL.replace("lift", "tall"), "LayerNormalization Add"),
}


@pytest.mark.parametrize("name", OTHER_NORMS)
def test_other_normalizations(name: str) -> None:
    check(OTHER_NORMS[name], CleanUp(), FuseLayerNorm(), size=(3, 5, WIDTH))


@pytest.mark.parametrize("widths", ["around", "uneven"])
@pytest.mark.parametrize("attributes", ["", "<pads=[1,0,1,2]>", "<strides=[2,2], dilations=[2,1]>"])
def test_padding(widths: str, attributes: str) -> None:
    case = Case(IMAGE, f"p = Pad(x, {widths}, zero) y = Conv{attributes}(p, k3)", "Conv")
    check(case, PadIntoConv(), size=(2, 3, 6, 6))


OTHER_PADDING = {
    "ones": Case(IMAGE, "p = Pad(x, around, one) y = Conv(p, k3)", "Pad Conv", "1 left"),
    "reflected": Case(IMAGE, 'p = Pad<mode="reflect">(x, around) y = Conv(p, k3)', "Pad Conv", "1 left"),
    "of channels": Case(IMAGE, "p = Pad(x, channels) y = Conv(p, k4)", "Pad Conv", "1 left"),
    "without convolution": Case(IMAGE, "p = Pad(x, around) y = Relu(p)", "Pad Relu", "1 left"),
}


@pytest.mark.parametrize("name", OTHER_PADDING)
def test_other_padding(name: str) -> None:
    check(OTHER_PADDING[name], PadIntoConv(), size=(2, 3, 6, 6))
