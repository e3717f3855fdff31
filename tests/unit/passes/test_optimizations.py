"""Each optimization: what it rewrites, what it leaves, and that the numbers stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
from graphs import compute, draw, graph, ints, operators

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.passes.addition import AddIntoProducer
from graphkiln_backend.passes.base import count, run_passes
from graphkiln_backend.passes.constants import FoldConstants, ShareWeights
from graphkiln_backend.passes.pipeline import CleanUp, FoldBatchNorm, FuseLayerNorm, PadIntoConv

CONV = "(float[b,3,5,5] x) => (float[b,4,3,3] y) {{ c = Conv(x, kernel{bias}) y = Add({order}) }}"


def check_addition(text: str, left: list[str], x: AnyArray, **weights: AnyArray) -> None:
    model = graph(text, **weights)
    expected = compute(model, x=x)["y"]
    run_passes(model, [AddIntoProducer()])
    assert operators(model) == left
    np.testing.assert_allclose(compute(model, x=x)["y"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", ["c, offset", "offset, c"])
@pytest.mark.parametrize("shape", [(4, 1, 1), (1, 4, 1, 1)])
def test_addition_per_channel(order: str, shape: tuple[int, ...]) -> None:
    check_addition(
        CONV.format(bias="", order=order), ["Conv"], draw(2, 3, 5, 5), kernel=draw(4, 3, 3, 3), offset=draw(*shape)
    )


def test_addition_to_a_bias() -> None:
    weights = {"kernel": draw(4, 3, 3, 3), "bias": draw(4, seed=1), "offset": draw(4, 1, 1, seed=2)}
    check_addition(CONV.format(bias=", bias", order="c, offset"), ["Conv"], draw(2, 3, 5, 5), **weights)


def test_attributes_of_the_convolution_stay() -> None:
    text = """(float[b,4,6,6] x) => (float[b,4,2,2] y) {
        c = Conv<strides=[2,2], group=2, dilations=[2,2]>(x, kernel)
        y = Add(c, offset)
    }"""
    check_addition(text, ["Conv"], draw(2, 4, 7, 7)[:, :, :6, :6], kernel=draw(4, 2, 2, 2), offset=draw(4, 1, 1))


@pytest.mark.parametrize("shape", [(1, 3, 3), (4, 3, 3), (1,), (3,), (1, 1, 1, 3)])
def test_other_additions_stay(shape: tuple[int, ...]) -> None:
    """They differ from place to place, or are not one value a channel."""
    weights = {"kernel": draw(4, 3, 3, 3), "offset": draw(*shape, seed=1)}
    check_addition(CONV.format(bias="", order="c, offset"), ["Conv", "Add"], draw(2, 3, 5, 5), **weights)


def test_residual_stays() -> None:
    text = "(float[b,4,5,5] x) => (float[b,4,5,5] y) { c = Conv(x, kernel) y = Add(c, x) }"
    check_addition(text, ["Conv", "Add"], draw(2, 4, 5, 5), kernel=draw(4, 4, 1, 1))


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("p = MatMul(x, w) y = Add(p, offset)", (4, 5)),
        ("t = Transpose<perm=[1,0]>(w) p = MatMul(x, t) y = Add(p, offset)", (5, 4)),
    ],
)
def test_product_becomes_a_gemm(text: str, sizes: tuple[int, int]) -> None:
    whole = f"(float[2,4] x) => (float[2,5] y) {{ {text} }}"
    check_addition(whole, ["Gemm"], draw(2, 4), w=draw(*sizes), offset=draw(5, seed=1))


def test_product_of_higher_rank_stays() -> None:
    text = "(float[2,3,4] x) => (float[2,3,5] y) { p = MatMul(x, w) y = Add(p, offset) }"
    check_addition(text, ["MatMul", "Add"], draw(2, 3, 4), w=draw(4, 5), offset=draw(5, seed=1))


def test_addition_to_a_convolution_with_other_readers() -> None:
    text = """(float[b,3,5,5] x) => (float[b,4,3,3] y) {
        c = Conv(x, kernel)
        a = Add(c, offset)
        y = Mul(a, c)
    }"""
    model, x = graph(text, kernel=draw(4, 3, 3, 3), offset=draw(4, 1, 1, seed=1)), draw(2, 3, 5, 5)
    expected = compute(model, x=x)["y"]
    run_passes(model, [AddIntoProducer()])
    np.testing.assert_allclose(compute(model, x=x)["y"], expected, rtol=1e-5, atol=1e-5)


NORM = "BatchNormalization<epsilon=0.01>({}, scale, shift, mean, variance)"


def norm(channels: int) -> dict[str, Any]:
    return {
        "scale": draw(channels, seed=1),
        "shift": draw(channels, seed=2),
        "mean": draw(channels, seed=3),
        "variance": draw(channels, seed=4) ** 2 + np.float32(1e-3),  # so small that epsilon counts
    }


@pytest.mark.parametrize(
    ("text", "weights", "folded"),
    [
        ("c = Conv(x, w)", {"w": draw(4, 3, 3, 3)}, "Conv"),
        ("c = Conv(x, w, b)", {"w": draw(4, 3, 3, 3), "b": draw(4)}, "Conv"),
        ("c = ConvTranspose(x, w)", {"w": draw(3, 4, 2, 2)}, "ConvTranspose"),
    ],
)
def test_batch_norm_into_a_convolution(text: str, weights: dict[str, Any], folded: str) -> None:
    model = graph(f"(float[b,3,6,6] x) => (float[b,n,h,k] y) {{ {text} y = {NORM.format('c')} }}", **weights, **norm(4))
    x = draw(2, 3, 6, 6, seed=9)
    expected = compute(model, x=x)["y"]
    (report,) = run_passes(model, [FoldBatchNorm()]).reports
    assert operators(model) == [folded]
    assert (report.nodes_before, report.nodes_after, report.note) == (2, 1, "")
    np.testing.assert_allclose(compute(model, x=x)["y"], expected, rtol=1e-3, atol=1e-4)


def test_batch_norm_into_a_product() -> None:
    model = graph(
        f"(float[b,3] x) => (float[b,4] y) {{ p = Gemm(x, w) y = {NORM.format('p')} }}", w=draw(3, 4), **norm(4)
    )
    x = draw(5, 3, seed=9)
    expected = compute(model, x=x)["y"]
    run_passes(model, [FoldBatchNorm()])
    assert operators(model) == ["Gemm"]
    np.testing.assert_allclose(compute(model, x=x)["y"], expected, rtol=1e-3, atol=1e-4)


def test_batch_norm_that_stays_is_noted() -> None:
    model = graph(f"(float[b,3,6,6] x) => (float[b,3,h,k] y) {{ c = Relu(x) y = {NORM.format('c')} }}", **norm(3))
    (report,) = run_passes(model, [FoldBatchNorm()]).reports
    assert "BatchNormalization" in operators(model)
    assert report.note.startswith("1 left")


def test_batch_norm_behind_a_convolution_with_other_readers() -> None:
    text = f"(float[b,3,6,6] x) => (float[b,4,4,4] y) {{ c = Conv(x, w) n = {NORM.format('c')} y = Add(n, c) }}"
    model, x = graph(text, w=draw(4, 3, 3, 3), **norm(4)), draw(2, 3, 6, 6, seed=9)
    expected = compute(model, x=x)["y"]
    run_passes(model, [FoldBatchNorm()])
    np.testing.assert_allclose(compute(model, x=x)["y"], expected, rtol=1e-3, atol=1e-4)


def test_batch_norm_with_shared_weights() -> None:
    text = f"""(float[b,3,6,6] x) => (float[b,4,4,4] y) {{
        c = Conv(x, w)
        d = Conv(x, w)
        n = {NORM.format("c")}
        y = Sub(n, d)
    }}"""
    model, x = graph(text, w=draw(4, 3, 3, 3), **norm(4)), draw(2, 3, 6, 6, seed=9)
    expected = compute(model, x=x)["y"]
    run_passes(model, [FoldBatchNorm()])
    np.testing.assert_allclose(compute(model, x=x)["y"], expected, rtol=1e-3, atol=1e-4)


def test_batch_norm_in_training_mode() -> None:
    training = NORM.replace("epsilon=0.01", "epsilon=0.01, training_mode=1")
    text = f"(float[b,3,6,6] x) => (float[b,4,4,4] y) {{ c = Conv(x, w) y, m, v = {training.format('c')} }}"
    model = graph(text, w=draw(4, 3, 3, 3), **norm(4))
    (report,) = run_passes(model, [FoldBatchNorm()]).reports
    assert (report.ran, report.note) == (False, "batch norms in training mode")
    assert operators(model) == ["Conv", "BatchNormalization"]


WEIGHTS = {
    "zero": np.float32(0), "one": np.float32(1), "two": np.float32(2),
    "flat": ints(-1, 12), "square": ints(-1, 3, 4), "row": ints(-1, 4, 3), "front": ints(0), "back": ints(1),
    "same": ints(2, 3, 4),
}  # fmt: skip


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("a = Identity(x) y = Relu(a)", ["Relu"]),
        ("a = Cast<to=1>(x) y = Relu(a)", ["Relu"]),
        ("a = Transpose<perm=[0,2,1]>(x) b = Transpose<perm=[0,2,1]>(a) y = Relu(b)", ["Relu"]),
        ("a = Transpose<perm=[0,1,2]>(x) y = Relu(a)", ["Relu"]),
        ("a = Reshape(x, flat) b = Reshape(a, square) y = Relu(b)", ["Reshape", "Relu"]),
        ("a = Mul(x, one) b = Add(a, zero) c = Sub(b, zero) d = Div(c, one) y = Relu(d)", ["Relu"]),
        ("a = Relu(x) b = Relu(x) y = Add(a, b)", ["Relu", "Add"]),
    ],
    ids=["identity", "cast", "transposes", "transpose", "reshapes", "arithmetic", "twice"],
)
def test_removed_nodes(body: str, left: list[str]) -> None:
    used = {name: array for name, array in WEIGHTS.items() if name in body.replace(")", " ").replace(",", " ").split()}
    model, x = graph(f"(float[b,3,4] x) => (float[b,3,4] y) {{ {body} }}", **used), draw(2, 3, 4)
    expected = compute(model, x=x)["y"]
    run_passes(model, [CleanUp()])
    assert operators(model) == left
    np.testing.assert_allclose(compute(model, x=x)["y"], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ("a = Mul(x, two) y = Relu(a)", ["Mul", "Relu"]),
        ("a = Transpose<perm=[0,2,1]>(x) y = Reshape(a, square)", ["Transpose", "Reshape"]),
        ("a = Cast<to=10>(x) b = Cast<to=1>(a) y = Relu(b)", ["Cast", "Cast", "Relu"]),
    ],
    ids=["a factor", "another layout", "a rounding"],
)
def test_nodes_that_stay(body: str, left: list[str]) -> None:
    """Two casts through a narrower type round: they are not one."""
    used = {name: array for name, array in WEIGHTS.items() if name in body.replace(")", " ").replace(",", " ").split()}
    model, x = graph(f"(float[b,3,4] x) => (float[b,3,4] y) {{ {body} }}", **used), draw(2, 3, 4)
    expected = compute(model, x=x)["y"]
    run_passes(model, [CleanUp()])
    assert operators(model) == left
    np.testing.assert_allclose(compute(model, x=x)["y"], expected, rtol=1e-6)


def test_expansion_to_its_own_shape() -> None:
    model = graph("(float[2,3,4] x) => (float[2,3,4] y) { a = Expand(x, same) y = Relu(a) }", same=WEIGHTS["same"])
    run_passes(model, [CleanUp()])
    assert operators(model) == ["Relu"]


def test_random_numbers_are_not_shared() -> None:
    text = """(float[b,3] x) => (float[b,3] y) {
        a = RandomUniformLike(x)
        b = RandomUniformLike(x)
        y = Sub(a, b)
    }"""
    model = graph(text)
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
    """A state and what is collected of it, in one value: ONNX Runtime computes both wrongly."""
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


class TestFolding:
    def test_constant_expressions(self) -> None:
        model, x = (
            graph("(float[b,3] x) => (float[b,3] y) { a = Exp(w) c = Neg(a) y = Mul(x, c) }", w=draw(3)),
            draw(2, 3),
        )
        expected = compute(model, x=x)["y"]
        run_passes(model, [FoldConstants()])
        assert operators(model) == ["Mul"]
        np.testing.assert_allclose(compute(model, x=x)["y"], expected, rtol=1e-6)

    def test_constant_nodes(self) -> None:
        text = "(float[b,3] x) => (float[b,3] y) { c = Constant<value = float[3] {1.0, 2.0, 3.0}>() y = Mul(x, c) }"
        model = graph(text)
        (report,) = run_passes(model, [FoldConstants()]).reports
        assert (operators(model), report.note) == (["Mul"], "")
        (weight,) = model.graph.initializers.values()
        assert weight.const_value is not None
        np.testing.assert_array_equal(weight.const_value.numpy(), [1, 2, 3])

    def test_known_shapes(self) -> None:
        text = """(float[b,3,4] x) => (float[b,12] y) {
            s = Shape<start=1>(x)
            p = ReduceProd<keepdims=1>(s)
            m = Concat<axis=0>(one, p)
            y = Reshape(x, m)
        }"""
        model, x = graph(text, one=np.array([-1])), draw(2, 3, 4)
        run_passes(model, [FoldConstants()])
        assert operators(model) == ["Reshape"]
        np.testing.assert_array_equal(compute(model, x=x)["y"], x.reshape(2, 12))

    def test_dynamic_batch_is_not_folded(self) -> None:
        text = "(float[b,3] x) => (float[b,3] y) { s = Shape(x) z = ConstantOfShape(s) y = Add(x, z) }"
        model = graph(text)
        run_passes(model, [FoldConstants()])
        for rows in (1, 5):
            assert compute(model, x=draw(rows, 3))["y"].shape == (rows, 3)

    def test_large_results_are_not_folded(self) -> None:
        text = "(float[1,1024,2048] x) => (float[1,1024,2048] y) { e = Expand(w, s) y = Add(x, e) }"
        model = graph(text, w=np.float32(2), s=np.array([1, 1024, 2048]))
        run_passes(model, [FoldConstants()])
        assert "Expand" in operators(model)

    def test_functions_are_inlined(self) -> None:
        proto = onnx.parser.parse_model(
            """<ir_version: 9, opset_import: ["": 18, "own": 1]>
            g (float[b,3] x) => (float[b,3] y) { y = own.twice(x) }
            <domain: "own", opset_import: ["": 18]> twice (x) => (y) { y = Add(x, x) }"""
        )
        model = onnx_ir.from_proto(proto)
        run_passes(model, [FoldConstants()])
        assert operators(model) == ["Add"]
        assert not model.functions
        x = draw(2, 3)
        np.testing.assert_array_equal(compute(model, x=x)["y"], x + x)


class TestSharing:
    def test_equal_weights_are_shared(self) -> None:
        text = "(float[b,3] x) => (float[b,3] y) { a = Mul(x, v) b = Add(a, w) y = Sub(b, u) }"
        model, x = graph(text, v=draw(3), w=draw(3), u=draw(3, seed=1)), draw(2, 3)
        expected = compute(model, x=x)["y"]
        run_passes(model, [ShareWeights()])
        assert len(model.graph.initializers) == 2
        np.testing.assert_array_equal(compute(model, x=x)["y"], expected)

    def test_other_shapes_or_types_are_not_shared(self) -> None:
        text = (
            "(float[2,2] x, int32[2,2] i) => (float[2,2] y, int32[2,2] j) { a = Add(x, v) y = Add(a, w) j = Add(i, u) }"
        )
        model = graph(
            text, v=np.zeros((2, 2), np.float32), w=np.zeros((1, 4), np.float32)[:, :2], u=np.zeros((2, 2), np.int32)
        )
        run_passes(model, [ShareWeights()])
        assert len(model.graph.initializers) == 3


WIDTH = 8
BY_MEAN = "m = ReduceMean<keepdims=1>(x, last) c = Sub(x, m)"
BY_SUM = "s = ReduceSum<keepdims=1>(x, last) m = Mul(s, share) c = Sub(x, m)"
PRODUCT = "q = Mul(c, c)"
POWER = "q = Pow(c, two)"
VARIANCE = "v = ReduceMean<keepdims=1>(q, last) e = Add(v, epsilon) d = Sqrt(e)"
RECIPROCAL = "r = Reciprocal(d) n = Mul(c, r)"
DIVISION = "n = Div(c, d)"
SCALED = "g = Mul(n, scale) y = Add(g, shift)"


def layer_norm(body: str, **weights: AnyArray) -> onnx_ir.Model:
    parsed = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]> g (float[b,5,{WIDTH}] x) => (float[b,5,{WIDTH}] y) {{ {body} }}'
    )
    draw = np.random.default_rng(0)
    usual = {
        "last": np.array([-1]), "share": np.float32(1 / WIDTH), "two": np.float32(2), "epsilon": np.float32(1e-3),
        "scale": draw.standard_normal(WIDTH).astype("f4"), "shift": draw.standard_normal(WIDTH).astype("f4"),
    }  # fmt: skip
    for name, array in {**usual, **weights}.items():
        if f"{name}" in body.replace("(", " ").replace(")", " ").replace(",", " ").split():
            parsed.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    return onnx_ir.from_proto(onnx.shape_inference.infer_shapes(parsed))


def run_onnxruntime(graph: onnx_ir.Model) -> AnyArray:
    x = np.random.default_rng(1).standard_normal((3, 5, WIDTH)).astype(np.float32)
    found: AnyArray = onnxruntime.InferenceSession(onnx_ir.to_proto(graph).SerializeToString()).run(None, {"x": x})[0]
    return found


@pytest.mark.parametrize("mean", [BY_MEAN, BY_SUM])
@pytest.mark.parametrize("square", [PRODUCT, POWER])
@pytest.mark.parametrize("quotient", [RECIPROCAL, DIVISION])
def test_written_out_layer_norms(mean: str, square: str, quotient: str) -> None:
    graph = layer_norm(" ".join([mean, square, VARIANCE, quotient, SCALED]))
    before = run_onnxruntime(graph)
    run_passes(graph, (CleanUp(), FuseLayerNorm()))
    assert [node.op_type for node in graph.graph] == ["LayerNormalization"]
    np.testing.assert_allclose(run_onnxruntime(graph), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("body", "weights"),
    [
        # a gate, not a scale: of the whole shape
        (f"{BY_MEAN} {PRODUCT} {VARIANCE} {DIVISION} y = Mul(n, scale)", {"scale": np.ones((5, WIDTH), "f4")}),
        (f"{BY_MEAN} {PRODUCT} {VARIANCE} {DIVISION} y = Mul(n, x)", {}),
        # a sum that is not divided by its number
        (f"{BY_SUM} {PRODUCT} {VARIANCE} {DIVISION} {SCALED}", {"share": np.float32(0.3)}),
        # another axis
        (f"{BY_MEAN} {PRODUCT} {VARIANCE} {DIVISION} {SCALED}", {"last": np.array([1])}),
    ],
)
def test_other_normalizations_stay(body: str, weights: dict[str, AnyArray]) -> None:
    graph = layer_norm(body, **weights)
    before = run_onnxruntime(graph)
    run_passes(graph, (CleanUp(), FuseLayerNorm()))
    assert count(graph, "LayerNormalization") == 0
    np.testing.assert_allclose(run_onnxruntime(graph), before, rtol=1e-6)


def test_layer_norm_with_a_shift_of_another_shape() -> None:
    graph = layer_norm(f"{BY_MEAN} {PRODUCT} {VARIANCE} {DIVISION} {SCALED}", shift=np.ones((5, 1), "f4"))
    before = run_onnxruntime(graph)
    run_passes(graph, (CleanUp(), FuseLayerNorm()))
    assert [node.op_type for node in graph.graph] == ["LayerNormalization", "Add"]
    np.testing.assert_allclose(run_onnxruntime(graph), before, rtol=1e-5, atol=1e-6)


PADDED = "(float[b,3,6,6] x) => (float[b,n,h,k] y) {{ p = Pad{mode}(x, widths, value) y = Conv{attributes}(p, w) }}"


def check_padding(left: list[str], widths: list[int], value: float = 0.0, mode: str = "", attributes: str = "") -> str:
    model = graph(
        PADDED.format(mode=mode, attributes=attributes),
        widths=np.array(widths), value=np.float32(value), w=draw(4, 3, 3, 3),
    )  # fmt: skip
    x = draw(2, 3, 6, 6, seed=1)
    expected = compute(model, x=x)["y"]
    (report,) = run_passes(model, [PadIntoConv()]).reports
    assert operators(model) == left
    np.testing.assert_allclose(compute(model, x=x)["y"], expected, rtol=1e-5, atol=1e-5)
    return report.note


@pytest.mark.parametrize("widths", [[0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 2, 0, 0, 0, 1, 3], [0, 0, 0, 0, 0, 0, 0, 1]])
@pytest.mark.parametrize("attributes", ["", "<pads=[1,0,1,2]>", "<strides=[2,2], dilations=[2,1]>"])
def test_of_the_spatial_axes(widths: list[int], attributes: str) -> None:
    assert check_padding(["Conv"], widths, attributes=attributes) == ""


@pytest.mark.parametrize(
    "options",
    [
        {"value": 1.0},
        {"mode": '<mode="reflect">'},
        {"mode": '<mode="edge">'},
    ],
    ids=["ones", "reflected", "repeated"],
)
def test_other_padding_stays(options: dict[str, Any]) -> None:
    note = check_padding(["Pad", "Conv"], [0, 0, 1, 1, 0, 0, 1, 1], **options)
    assert note.startswith("1 left")


def test_padding_of_channels_stays() -> None:
    model = graph(
        "(float[b,3,6,6] x) => (float[b,4,6,6] y) { p = Pad(x, widths) y = Conv(p, w) }",
        widths=np.array([0, 1, 0, 0, 0, 0, 0, 0]), w=draw(4, 4, 1, 1),
    )  # fmt: skip
    run_passes(model, [PadIntoConv()])
    assert operators(model) == ["Pad", "Conv"]


def test_padding_without_convolution_stays() -> None:
    text = "(float[b,3,6,6] x) => (float[b,3,8,8] y) { p = Pad(x, widths) y = Relu(p) }"
    (report,) = run_passes(graph(text, widths=np.array([0, 0, 1, 1, 0, 0, 1, 1])), [PadIntoConv()]).reports
    assert report.note.startswith("1 left")
