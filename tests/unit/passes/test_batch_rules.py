"""Where each operator leaves the batch: beside the shapes that it really answers at another batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import compute, draw, graph, ints

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.batch import VaryBatch, saved_batch

BATCH = 3
TURN = "Transpose<perm=[1,0]>"
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "elementwise": ("y = Where(c, x, o)", "3,5", {"c": np.ones((1, 5), bool), "o": np.float32(2)}),
    "sum of an axis": ("y = ReduceSum<keepdims=1>(x, one)", "3,1", {"one": ints(1)}),
    "sum without the axis": ("s = ReduceSum<keepdims=0>(x, one) y = Exp(s)", "3", {"one": ints(1)}),
    "the largest": ("a = ArgMax<axis=1, keepdims=1>(x) y = Cast<to=1>(a)", "3,1", {}),
    "joined": ("y = Concat<axis=1>(x, x)", "3,10", {}),
    "cumulative sum": ("y = CumSum(x, one)", "3,5", {"one": np.int64(1)}),
    "expanded": ("u = Unsqueeze(x, o) y = Expand(u, s)", "3,4,5", {"o": ints(1), "s": ints(BATCH, 4, 5)}),
    "picked columns": ("y = Gather<axis=1>(x, index)", "3,2", {"index": ints(0, 2)}),
    "a matrix of columns": ("y = Gather<axis=1>(x, index)", "3,2,2", {"index": np.array([[0, 1], [3, 4]])}),
    "columns before the batch": (f"t = {TURN}(x) g = Gather<axis=0>(t, i) y = {TURN}(g)", "3,2", {"i": ints(4, 1)}),
    "a matrix before the batch": (
        f"t = {TURN}(x) g = Gather<axis=0>(t, i) y = Transpose<perm=[2,0,1]>(g)",
        "3,2,2",
        {"i": np.array([[0, 1], [3, 4]])},
    ),
    "normalized": ("y = LayerNormalization<axis=1>(x, w)", "3,5", {"w": draw(5)}),
    "product": ("y = MatMul(x, w)", "3,4", {"w": draw(5, 4)}),
    "product from the left": (f"t = {TURN}(x) p = MatMul(w, t) y = {TURN}(p)", "3,4", {"w": draw(4, 5)}),
    "padded": ("y = Pad(x, widths)", "3,8", {"widths": ints(0, 1, 0, 2)}),
    "padded along a named axis": ("y = Pad(x, widths, , last)", "3,8", {"widths": ints(1, 2), "last": ints(-1)}),
    "a slice": ("y = Slice(x, one, four, one)", "3,3", {"one": ints(1), "four": ints(4)}),
    "probabilities": ("y = Softmax<axis=1>(x)", "3,5", {}),
    "logarithms": ("y = LogSoftmax<axis=-1>(x)", "3,5", {}),
    "another axis": ("u = Unsqueeze(x, a) y = ReduceMax<keepdims=0>(u, a)", "3,5", {"a": ints(0)}),
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
    "an equation": ('y = Einsum<equation="bi,ij->bj">(x, w)', "3,4", {"w": draw(5, 4)}),
    "one hot": ("i = Cast<to=7>(x) y = OneHot<axis=-1>(i, d, v)", "3,5,2", {"d": np.int64(2), "v": draw(2)}),
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
    "turned": (f"t = {TURN}(x) e = Exp(t) y = {TURN}(e)", "3,5", {}),
}
"""What is done to `x`, FP32 `[3, 5]`; the shape of `y`; and the weights."""


@pytest.mark.parametrize("kind", CASES)
def test_the_graph_of_any_batch_computes_row_by_row(kind: str) -> None:
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
        ("y = ReduceMax<keepdims=0>(x, zero)", "5", {"zero": ints(0)}, "reduces over"),
        ("y = GatherElements<axis=0>(x, i)", "4,5", {"i": np.zeros((4, 5), np.int64)}, "reorders"),
        (f"t = {TURN}(x) y = MatMul(t, x)", "5,5", {}, "it sums over the batch"),
        ("v = Reshape(x, flat) y = MatMul(w, v)", "3", {"flat": ints(20), "w": draw(3, 20)}, "sums over"),
        ("y = MatMul(w, x)", "3,5", {"w": draw(3, 4)}, "it sums over the batch"),
    ],
)
def test_what_mixes_samples_is_refused(body: str, dims: str, weights: dict[str, Any], why: str) -> None:
    model = graph(f"(float[4,5] x) => (float[{dims}] y) {{ {body} }}", **weights)
    with pytest.raises(ConversionError, match=why):
        run_passes(model, [VaryBatch()])


class TestSavedBatch:
    def test_is_the_first_dimension_of_all_inputs(self) -> None:
        assert saved_batch(graph("(float[4,3] x, float[4] z) => (float[4,3] y) { y = Relu(x) }")) == 4

    @pytest.mark.parametrize("inputs", ["float[b,3] x", "float x", "float[4,3] x, float[3,4] z"])
    def test_or_there_is_none(self, inputs: str) -> None:
        shape = inputs.split(maxsplit=1)[0].removeprefix("float").rstrip(",")
        with pytest.raises(ConversionError, match="no common first dimension"):
            saved_batch(graph(f"({inputs}) => (float{shape} y) {{ y = Relu(x) }}"))
