"""Independence of rows, and fixed batches that are made dynamic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir
import pytest
import torch
from graphs import compute, draw, graph
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recipes import recipe
from torch import nn

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ConversionError, ExecutionError
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.proof.policy import EXPORT
from graphkiln_converters.sources.base import InputSpec
from graphkiln_converters.sources.batches import (
    dependent_rows,
    free_batch,
    saved_size,
    without_batch,
)
from graphkiln_converters.sources.pytorch import FixedBatchModel, TorchModel, with_free_batch

X = (InputSpec(name="x", shape=(4,)),)


def signature(inputs: Sequence[tuple[Any, ...]], outputs: Sequence[tuple[Any, ...]]) -> Signature:
    specs = [
        tuple(TensorSpec(name=f"{kind}{i}", dtype=DType.FP32, shape=shape) for i, shape in enumerate(shapes))
        for kind, shapes in (("x", inputs), ("y", outputs))
    ]
    return Signature(inputs=specs[0], outputs=specs[1])


class TestSignatures:
    @pytest.mark.parametrize(
        ("inputs", "outputs", "size"),
        [
            ([(4, 3), (4,)], [(4, 2)], 4),
            ([(1, 3)], [("n", 2)], 1),
            ([(1, 3), (100, 4)], [(1, 2)], 0),
            ([(1, 3)], [()], 0),
            ([("n", 3)], [(1, 2)], 0),
            ([(0, 3)], [(0, 2)], 0),
        ],
    )
    def test_a_fixed_batch_is_common_to_inputs_and_outputs(self, inputs: Any, outputs: Any, size: int) -> None:
        found = signature(inputs, outputs)
        assert saved_size(found) == size
        assert bool(without_batch(found)) == (size == 0)


class TestRows:
    @pytest.mark.parametrize(
        "mix",
        [
            lambda x: x - x.mean(0, keepdims=True),
            lambda x: np.sort(x, 0),
            lambda x: x[::-1],
        ],
    )
    def test_dependent_rows_are_detected(self, mix: Any) -> None:
        def run(feeds: Any) -> dict[str, AnyArray]:
            return {"y": mix(feeds["x"])}

        assert "depends on the other rows, 3 at once: y: relative L2" in dependent_rows(run, run, X, EXPORT)

    def test_a_graph_of_one_row_is_not_batched(self) -> None:
        def run(feeds: Any) -> dict[str, AnyArray]:
            if len(feeds["x"]) > 1:
                raise ExecutionError("baked in")
            return {"y": feeds["x"]}

        assert dependent_rows(run, run, X, EXPORT) == "it does not run with 3 rows at once: baked in"

    def test_an_output_without_rows_is_not_batched(self) -> None:
        assert "'y' has the shape [4]" in dependent_rows(lambda f: {"y": f["x"]}, lambda f: {"y": f["x"][0]}, X, EXPORT)

    def test_a_graph_that_rejects_all_samples_is_left_to_the_proof(self) -> None:
        def run(_: Any) -> dict[str, AnyArray]:
            raise ExecutionError("no")

        assert dependent_rows(run, run, X, EXPORT) == ""


class TestFreeing:
    def test_symbolic_shapes_of_exporters_are_replaced(self) -> None:
        """PyTorch's older exporter gives every dimension another name."""
        model = graph(
            """(float[2,4] x) => (float[a,b] y) <float[q,r,s] e> {
                ones = ConstantOfShape<value=int64[1] {1}>(three)
                shape = Mul(ones, sizes)
                e = Expand(token, shape)
                u = Unsqueeze(x, one)
                c = Concat<axis=1>(e, u)
                y = Flatten(c)
            }""",
            three=np.array([3]), sizes=np.array([2, 1, 4]), token=draw(1, 1, 4), one=np.array([1]),
        )  # fmt: skip
        x = draw(6, 4)
        expected = np.concatenate([compute(model, x=x[i : i + 2])["y"] for i in (0, 2, 4)])
        freed = free_batch(model)
        for rows in (1, 3, 6):
            np.testing.assert_array_equal(compute(freed, x=x[:rows])["y"], expected[:rows])

    def test_an_output_without_the_batch_is_refused(self) -> None:
        model = graph("(float[1,4] x) => (float[1,4] y, float[3] z) { y = Relu(x) z = Identity(w) }", w=draw(3))
        with pytest.raises(ConversionError, match="batch is not the first dimension of z"):
            free_batch(model)


OPERATIONS = [
    "Relu({0})", "Softmax<axis={axis}>({0})", "Transpose<perm=[{perm}]>({0})", "Add({0}, {1})", "MatMul({0}, {1})",
    "Concat<axis={axis}>({0}, {1})", "ReduceMean<keepdims=1>({0}, k{axis})", "CumSum({0}, a{axis})",
    "Gather<axis={axis}>({0}, zero)", "Reshape({0}, flat)", "Flatten<axis={axis}>({0})",
]  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 3), st.lists(st.tuples(*[st.integers(0, 60)] * 4), min_size=1, max_size=5))
def test_a_batch_is_made_dynamic_correctly_or_not_at_all(batch: int, picks: list[tuple[int, ...]]) -> None:
    """Random graphs over `[batch, 3, 2]`, many of which mix rows."""
    names, body = ["x"], []
    for number, (operation, first, second, axis) in enumerate(picks):
        text = OPERATIONS[operation % len(OPERATIONS)]
        perm = [[0, 1, 2], [1, 0, 2], [0, 2, 1], [2, 1, 0]][axis % 4]
        values = names[first % len(names)], names[second % len(names)]
        body.append(f"t{number} = " + text.format(*values, axis=axis % 3, perm=",".join(map(str, perm))))
        names.append(f"t{number}")
    try:
        constants = {f"k{i}": np.array([i]) for i in range(3)} | {f"a{i}": np.int64(i) for i in range(3)}
        made = f"(float[{batch},3,2] x) => (float[p,q,r] y) {{ {' '.join(body)} y = Identity({names[-1]}) }}"
        model = graph(made, zero=np.array([0]), flat=np.array([batch, -1]), **constants)
        x = np.random.default_rng(0).standard_normal((5, 3, 2)).astype(np.float32)
        rows = [compute(model, x=np.repeat(x[i : i + 1], batch, axis=0))["y"][:1] for i in range(5)]
        freed = free_batch(model)
    except Exception:
        return  # not a graph, or not freed
    for count in (1, 3, 5):
        np.testing.assert_allclose(compute(freed, x=x[:count])["y"], np.concatenate(rows[:count]), rtol=1e-5, atol=1e-5)


# Programs with a fixed batch.

SIZE = 3


class Only(nn.Module):
    """A program with a fixed batch of three."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert len(x) == SIZE
        return torch.softmax(x, 0) if self.kind == "mixing" else x.exp() * (1.01 if self.kind == "other" else 1)


def opened(kind: str, text: str = "(float[3,4] x) => (float[3,4] output) { output = Exp(x) }", free: bool = True,
           dynamic: dict[int, tuple[int, int]] | None = None) -> FixedBatchModel:  # fmt: skip
    spec = InputSpec(name="x", shape=(SIZE, 4), dynamic=dynamic or {})
    program = TorchModel(module=Only(kind), description="m", libraries=("torch",), inputs=(spec,))

    def export() -> onnx_ir.Model:
        return graph(text)

    return with_free_batch(program, export, recipe(batch="free" if free else "fixed"), "export it otherwise")


def test_a_dynamic_batch_computes_the_same_as_the_program() -> None:
    model = opened("plain")
    assert (model.batch_size, model.whole, model.notes) == (SIZE, "", ())
    assert model.inputs[0].shape == (4,)
    for rows in (1, 2, 3, 7):
        x = draw(rows, 4)
        np.testing.assert_allclose(model.run({"x": x})["output"], np.exp(x), rtol=1e-6)
        np.testing.assert_allclose(compute(model.export(), x=x)["output"], np.exp(x), rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("mixing", "(float[3,4] x) => (float[3,4] output) { output = Softmax<axis=0>(x) }", "along the batch (export"),
        ("other", "(float[3,4] x) => (float[3,4] output) { output = Exp(x) }", "a row depends on the other rows"),
        ("plain", "(float[3,4] x) => (float[1,12] output) { e = Exp(x) output = Flatten<axis=0>(e) }", "no common"),
    ],
)
def test_a_batch_that_cannot_be_proven_stays_fixed(kind: str, text: str, reason: str) -> None:
    model = opened(kind, text)
    assert reason in model.whole
    assert model.inputs[0].shape == (SIZE, 4)
    assert list(model.export().graph.inputs[0].shape or ()) == [SIZE, 4]
    x = draw(SIZE, 4)
    assert model.run({"x": x})["output"].shape == (SIZE, 4)


def test_a_fixed_batch_can_be_requested() -> None:
    assert opened("plain", free=False).whole == "--batch fixed"


def test_other_fixed_sizes_cannot_be_dynamic() -> None:
    varying = (InputSpec(name="x", shape=(4,), dynamic={0: (1, 9)}),)
    with pytest.raises(ConversionError, match="takes only 4 in dimension 1 of 'x'"):
        replace(opened("plain"), inputs=varying).export()
    with pytest.raises(ConversionError, match="takes only 3 in dimension 0 of 'x'"):
        replace(opened("plain", free=False), inputs=varying).export()
