"""The batch that a graph was saved with becomes dynamic."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
from graphs import compute, draw, graph, ints
from hypothesis import given, settings
from hypothesis import strategies as st

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.batch import VaryBatch, saved_batch

OPSET = 18


def fixed_graph(text: str, **weights: AnyArray) -> onnx_ir.Model:
    """A graph of fixed shapes from ONNX's own text form, shapes inferred."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {OPSET}]> g {text}')
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    for number, node in enumerate(model.graph.node):
        node.name = node.name or f"node{number}"
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    return onnx_ir.from_proto(inferred)


def run_onnxruntime(model: onnx_ir.Model, **feeds: AnyArray) -> list[AnyArray]:
    session = onnxruntime.InferenceSession(onnx_ir.to_proto(model).SerializeToString())
    found: list[AnyArray] = session.run(None, feeds)
    return found


def check_varies(model: onnx_ir.Model, batch: int) -> None:
    """At any batch size the rewritten graph computes what the saved one computes for the same rows."""
    draw = np.random.default_rng(0)
    shapes = {str(value.name): [int(dim) for dim in value.shape.numpy()] for value in model.graph.inputs if value.shape}
    feeds = {name: draw.standard_normal((3 * batch, *shape[1:])).astype(np.float32) for name, shape in shapes.items()}
    parts = [
        run_onnxruntime(model, **{name: array[start : start + batch] for name, array in feeds.items()})
        for start in range(0, 3 * batch, batch)
    ]
    expected = [np.concatenate(outputs) for outputs in zip(*parts, strict=True)]
    run_passes(model, (VaryBatch(),))
    for rows in (1, batch, 3 * batch):
        found = run_onnxruntime(model, **{name: array[:rows] for name, array in feeds.items()})
        for output, whole in zip(found, expected, strict=True):
            np.testing.assert_allclose(output, whole[:rows], rtol=1e-5, atol=1e-5)


class TestReshapes:
    @pytest.mark.parametrize("batch", [1, 2, 4])
    def test_windows_folded_into_the_batch(self, batch: int) -> None:
        model = fixed_graph(
            f"""(float[{batch},8,8,6] x) => (float[{batch},8,8,6] y) {{
                a = Reshape(x, split)
                b = Transpose<perm=[0,1,3,2,4,5]>(a)
                c = Reshape(b, folded)
                d = MatMul(c, w)
                e = Reshape(d, split_back)
                f = Transpose<perm=[0,1,3,2,4,5]>(e)
                y = Reshape(f, whole)
            }}""",
            split=ints(batch, 2, 4, 2, 4, 6),
            folded=ints(batch * 4, 16, 6),
            split_back=ints(batch, 2, 2, 4, 4, 6),
            whole=ints(batch, 8, 8, 6),
            w=np.random.default_rng(1).standard_normal((6, 6)).astype(np.float32),
        )
        check_varies(model, batch)

    @pytest.mark.parametrize("batch", [1, 2, 3])
    def test_batch_behind_other_axes(self, batch: int) -> None:
        """Attention: `[batch, places, 3 * heads * width]` -> `[3, batch, heads, places, width]`, then one of three."""
        model = fixed_graph(
            f"""(float[{batch},5,24] x) => (float[{batch},5,8] y) {{
                a = Reshape(x, parts)
                b = Transpose<perm=[2,0,3,1,4]>(a)
                q = Slice(b, zero, one, zero)
                c = Reshape(q, heads)
                d = Transpose<perm=[0,2,1,3]>(c)
                y = Reshape(d, whole)
            }}""",
            parts=ints(batch, 5, 3, 2, 4),
            heads=ints(batch, 2, 5, 4),
            whole=ints(batch, 5, 8),
            zero=ints(0),
            one=ints(1),
        )
        check_varies(model, batch)

    def test_reshape_that_splits_the_batch(self) -> None:
        model = fixed_graph("(float[4,3] x) => (float[2,6] y) { y = Reshape(x, shape) }", shape=ints(2, 6))
        with pytest.raises(ConversionError, match=r"Reshape 'node0': \[4, 3\] -> \[2, 6\] does not preserve"):
            run_passes(model, (VaryBatch(),))

    @settings(max_examples=50, deadline=None)
    @given(
        st.sampled_from([1, 2, 3]),
        st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4),
        st.permutations(range(5)),
        st.integers(0, 4),
    )
    def test_transposes_between_reshapes(self, batch: int, sizes: list[int], order: list[int], joined: int) -> None:
        """Two neighboring axes are joined after a transpose, and taken apart again."""
        if batch == 1:  # which of several axes of size 1 it is, no shape can tell
            sizes = [max(size, 2) for size in sizes]
        shape = [batch, *sizes]
        perm = [axis for axis in order if axis < len(shape)]
        turned = [shape[axis] for axis in perm]
        at = joined % (len(turned) - 1)
        folded = [*turned[:at], turned[at] * turned[at + 1], *turned[at + 2 :]]
        dims = ",".join(map(str, shape))
        back = [perm.index(axis) for axis in range(len(shape))]
        model = fixed_graph(
            f"""(float[{dims}] x) => (float[{dims}] y) {{
                a = Transpose<perm={perm}>(x)
                b = Reshape(a, folded)
                c = Sigmoid(b)
                d = Reshape(c, turned)
                y = Transpose<perm={back}>(d)
            }}""",
            folded=ints(*folded),
            turned=ints(*turned),
        )
        check_varies(model, batch)


class TestConstants:
    @pytest.mark.parametrize("batch", [1, 2, 3])
    def test_expanded_token(self, batch: int) -> None:
        model = fixed_graph(
            f"""(float[{batch},3,4] x) => (float[{batch},4,4] y) {{
                t = Expand(token, shape)
                y = Concat<axis=1>(t, x)
            }}""",
            token=np.ones((1, 1, 4), np.float32),
            shape=ints(batch, 1, 4),
        )
        check_varies(model, batch)

    def test_state_computed_from_an_expanded_constant(self) -> None:
        model = fixed_graph(
            """(float[2,3] x) => (float[2,3] y) {
                z = Expand(zero, shape)
                a = Reshape(z, flat)
                b = MatMul(a, w)
                c = Add(b, one)
                y = Mul(c, x)
            }""",
            zero=np.float32(0.5),
            shape=ints(1, 2, 3),
            flat=ints(2, 3),
            w=np.eye(3, dtype=np.float32),
            one=np.ones(3, np.float32),
        )
        check_varies(model, 2)

    def test_weight_repeated_for_each_sample(self) -> None:
        row = np.random.default_rng(0).standard_normal((1, 3)).astype(np.float32)
        check_varies(fixed_graph("(float[2,3] x) => (float[2,3] y) { y = Add(x, w) }", w=np.repeat(row, 2, axis=0)), 2)

    def test_weight_that_differs_between_samples(self) -> None:
        weight = np.arange(6, dtype=np.float32).reshape(2, 3)
        model = fixed_graph("(float[2,3] x) => (float[2,3] y) { y = Add(x, w) }", w=weight)
        with pytest.raises(ConversionError, match="Add 'node0': 'w' contains the saved batch"):
            run_passes(model, (VaryBatch(),))


class TestMixing:
    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("y = Softmax<axis=0>(x)", "works along the batch"),
            ("y = ReduceMean<keepdims=1>(x, zero)", "reduces over"),
            ("a = ReduceMax<keepdims=0>(x) y = Mul(x, a)", "reduces over"),
            ("y = Slice(x, zero, one, zero)", "selects some"),
            ("y = Concat<axis=0>(x, x)", "reorders"),
            ("y = Gather<axis=0>(x, zero)", "reorders"),
            ("y = GatherND(x, index)", "reorders"),
            ("y = CumSum(x, axis)", "sums over the batch"),
            ("a = Transpose<perm=[1,0]>(x) y = MatMul(a, x)", "it sums over the batch"),
            ("a = Transpose<perm=[1,0]>(x) y = MatMul(x, a)", "different axes"),
            ("y = Einsum<equation=\"ij,ik->jk\">(x, x)", "sums over the batch"),
            ("y = Einsum<equation=\"i...->i...\">(x)", "not supported"),
            ("y, z = Split<axis=0, num_outputs=2>(x)", "reorders"),
            ("y = Hardmax<axis=0>(x)", "works along the batch"),
            ("y = Tile(x, twos)", "reorders"),
        ],
    )  # fmt: skip
    def test_nodes_that_mix_samples(self, text: str, why: str) -> None:
        model = fixed_graph(
            f"(float[4,3] x) => (float[n,m] y) {{ {text} }}", zero=ints(0), one=ints(1), index=ints(0, 2)[:, None],
            twos=ints(2, 1), axis=np.int64(0),
        )  # fmt: skip
        with pytest.raises(ConversionError, match=f"saved batch of 4 .*.*{why}"):
            run_passes(model, (VaryBatch(),))

    @pytest.mark.parametrize(
        "text",
        [
            "(float[2,3,4] x, int64[2] shape) => (float[2,12] y) { y = Reshape(x, shape) }",
            "(float[2,1] x, int64[2] shape) => (float[2,3] y) { y = Expand(x, shape) }",
            "(float[2,3] x, int64[2] ends) => (float[2,3] y) { y = Slice(x, zeros, ends) }",
        ],
    )
    def test_settings_that_are_inputs(self, text: str) -> None:
        """They must not be replaced by the saved ones."""
        with pytest.raises(ConversionError, match="settings are computed from the batch"):
            run_passes(graph(text, **({"zeros": np.array([0, 0])} if "zeros" in text else {})), [VaryBatch()])

    def test_inputs_without_a_common_batch(self) -> None:
        model = fixed_graph("(float[2,3] x, float[4,3] y) => (float[2,3] z) { z = Identity(x) }")
        with pytest.raises(ConversionError, match=r"no common first dimension .* x \[2, 3\], y \[4, 3\]"):
            run_passes(model, (VaryBatch(),))


def test_output_without_the_batch_is_noted() -> None:
    model = fixed_graph("(float[2,3] x) => (float[3,2] y) { y = Transpose<perm=[1,0]>(x) }")
    (report,) = run_passes(model, (VaryBatch(),)).reports
    assert report.note == "the batch is not the first dimension of y"


BATCH = 3
TURN = "Transpose<perm=[1,0]>"
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "elementwise": ("y = Where(c, x, o)", "3,5", {"c": np.ones((1, 5), bool), "o": np.float32(2)}),
    "sum without the axis": ("s = ReduceSum<keepdims=0>(x, one) y = Exp(s)", "3", {"one": ints(1)}),
    "the largest": ("a = ArgMax<axis=1, keepdims=1>(x) y = Cast<to=1>(a)", "3,1", {}),
    "expanded": ("u = Unsqueeze(x, o) y = Expand(u, s)", "3,4,5", {"o": ints(1), "s": ints(BATCH, 4, 5)}),
    "columns before the batch": (f"t = {TURN}(x) g = Gather<axis=0>(t, i) y = {TURN}(g)", "3,2", {"i": ints(4, 1)}),
    "a matrix before the batch": (
        f"t = {TURN}(x) g = Gather<axis=0>(t, i) y = Transpose<perm=[2,0,1]>(g)",
        "3,2,2",
        {"i": np.array([[0, 1], [3, 4]])},
    ),
    "product from the left": (f"t = {TURN}(x) p = MatMul(w, t) y = {TURN}(p)", "3,4", {"w": draw(4, 5)}),
    "padded along a named axis": ("y = Pad(x, widths, , last)", "3,8", {"widths": ints(1, 2), "last": ints(-1)}),
    "a slice": ("y = Slice(x, one, four, one)", "3,3", {"one": ints(1), "four": ints(4)}),
    "flattened": ("u = Unsqueeze(x, a) y = Flatten(u)", "3,5", {"a": ints(2)}),
    "flattened behind it": ("f = Flatten<axis=0>(x) y = Reshape(f, s)", "3,5", {"s": ints(BATCH, 5)}),
    "squeezed": ("u = Unsqueeze(x, a) y = Squeeze(u)", "3,5", {"a": ints(0, 2)}),
    "squeezed by axes": ("u = Unsqueeze(x, a) y = Squeeze(u, a)", "3,5", {"a": ints(2)}),
    "split": ("y, z = Split<axis=1>(x, sizes)", "3,2", {"sizes": ints(2, 3)}),
    "all of the batch": ("y = Slice(x, zero, n, zero)", "3,5", {"zero": ints(0), "n": ints(BATCH)}),
    "each sample": ("y = Gather(x, all)", "3,5", {"all": ints(*range(BATCH))}),
    "each sample, by indices": ("y = GatherND(x, all)", "3,5", {"all": np.arange(BATCH)[:, None]}),
    "repeated": ("y = Tile(x, r)", "3,10", {"r": ints(1, 2)}),
    "a layer": ("y = Gemm<transB=1>(x, w, c)", "3,4", {"w": draw(4, 5), "c": np.repeat(draw(1, 4), BATCH, axis=0)}),
    "resized": (
        'u = Unsqueeze(x, a) r = Resize<mode="nearest">(u, , , s) y = Squeeze(r, a)',
        "3,10",
        {"a": ints(1), "s": ints(BATCH, 1, 10)},
    ),
    "a recurrent layer": (
        "u = Unsqueeze(x, a) s, h = GRU<hidden_size=2>(u, w, r, , , first) y = Squeeze(h, a)",
        "3,2",
        {"a": ints(0), "w": draw(1, 6, 5), "r": draw(1, 6, 2), "first": np.zeros((1, BATCH, 2), "f4")},
    ),
}  # nodes on `x`, FP32 [3, 5]; shape of `y`; weights


@pytest.mark.parametrize("kind", CASES)
def test_rows_are_computed_alike_at_any_batch(kind: str) -> None:
    body, dims, weights = CASES[kind]
    model, x = graph(f"(float[{BATCH},5] x) => (float[{dims}] y) {{ {body} }}", **weights), draw(6, 5)
    expected = np.concatenate([compute(model, x=x[start : start + BATCH])["y"] for start in (0, BATCH)])
    (report,) = run_passes(model, [VaryBatch()]).reports
    assert (report.ran, report.note) == (True, "")
    for size in (1, 2, 6):
        np.testing.assert_allclose(compute(model, x=x[:size])["y"], expected[:size], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "dims", "weights", "why"),
    [
        (f"t = {TURN}(x) y = LayerNormalization<axis=0>(t, w)", "5,4", {"w": draw(5, 4)}, "normalizes over"),
        (f"t = {TURN}(x) y = Softmax<axis=-1>(t)", "5,4", {}, "works along the batch"),
        ("y = Pad(x, widths)", "5,5", {"widths": ints(1, 0, 0, 0)}, "reorders"),
        ("y = Pad(x, widths, , turned)", "6,5", {"widths": ints(0, 1, 0, 1), "turned": ints(1, 0)}, "reorders"),
        (
            "e = Slice(x, n, n, one) y = Reshape<allowzero=1>(e, s)",
            "0,4",
            {"n": ints(0), "one": ints(1), "s": ints(0, 4)},
            "is empty",
        ),
        ("y = GatherElements<axis=0>(x, i)", "4,5", {"i": np.zeros((4, 5), np.int64)}, "reorders"),
        ("v = Reshape(x, flat) y = MatMul(w, v)", "3", {"flat": ints(20), "w": draw(3, 20)}, "sums over"),
    ],
)
def test_operators_that_mix_samples(body: str, dims: str, weights: dict[str, Any], why: str) -> None:
    model = graph(f"(float[4,5] x) => (float[{dims}] y) {{ {body} }}", **weights)
    with pytest.raises(ConversionError, match=why):
        run_passes(model, [VaryBatch()])


class TestSavedBatch:
    def test_common_first_dimension(self) -> None:
        assert saved_batch(graph("(float[4,3] x, float[4] z) => (float[4,3] y) { y = Relu(x) }")) == 4

    @pytest.mark.parametrize("inputs", ["float[b,3] x", "float x", "float[4,3] x, float[3,4] z"])
    def test_no_common_first_dimension(self, inputs: str) -> None:
        shape = inputs.split(maxsplit=1)[0].removeprefix("float").rstrip(",")
        with pytest.raises(ConversionError, match="no common first dimension"):
            saved_batch(graph(f"({inputs}) => (float{shape} y) {{ y = Relu(x) }}"))
