"""What does nothing goes, what undoes itself goes, what is computed twice is computed once."""

from __future__ import annotations

import numpy as np
import pytest
from graphs import compute, draw, graph, ints, operators

from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.pipeline import CleanUp

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
def test_goes(body: str, left: list[str]) -> None:
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
def test_stays(body: str, left: list[str]) -> None:
    """Two casts through a narrower type round: they are not one."""
    used = {name: array for name, array in WEIGHTS.items() if name in body.replace(")", " ").replace(",", " ").split()}
    model, x = graph(f"(float[b,3,4] x) => (float[b,3,4] y) {{ {body} }}", **used), draw(2, 3, 4)
    expected = compute(model, x=x)["y"]
    run_passes(model, [CleanUp()])
    assert operators(model) == left
    np.testing.assert_allclose(compute(model, x=x)["y"], expected, rtol=1e-6)


def test_an_expansion_to_its_own_shape_goes() -> None:
    model = graph("(float[2,3,4] x) => (float[2,3,4] y) { a = Expand(x, same) y = Relu(a) }", same=WEIGHTS["same"])
    run_passes(model, [CleanUp()])
    assert operators(model) == ["Relu"]


def test_random_numbers_that_look_alike_are_not_shared() -> None:
    text = """(float[b,3] x) => (float[b,3] y) {
        a = RandomUniformLike(x)
        b = RandomUniformLike(x)
        y = Sub(a, b)
    }"""
    model = graph(text)
    run_passes(model, [CleanUp()])
    assert operators(model) == ["RandomUniformLike", "RandomUniformLike", "Sub"]


def test_an_output_that_is_an_identity_keeps_its_name() -> None:
    model, x = graph("(float[b,3] x) => (float[b,3] y, float[b,3] z) { y = Relu(x) z = Identity(y) }"), draw(2, 3)
    for _ in range(2):
        run_passes(model, [CleanUp()])
        found = compute(model, x=x)
        assert list(found) == ["y", "z"]
        np.testing.assert_array_equal(found["y"], np.maximum(x, 0))
        np.testing.assert_array_equal(found["y"], found["z"])


def test_outputs_of_a_loop_stay_apart() -> None:
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
