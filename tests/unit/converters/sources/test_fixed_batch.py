"""Programs with a fixed batch: freed and proven, or whole with the reason."""

from __future__ import annotations

import numpy as np
import onnx_ir
import pytest
import torch
from graphs import compute, draw, graph
from torch import nn

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.sources.base import InputSpec, SourceOptions
from graphkiln_converters.sources.fixed_batch import FixedBatchModel, with_free_batch
from graphkiln_converters.sources.pytorch import TorchModel

SIZE = 3


class Only(nn.Module):
    """Takes batches of three, as a program with a fixed batch does."""

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

    return with_free_batch(program, export, SourceOptions(free_batch=free), "export it otherwise")


def test_a_freed_batch_computes_what_the_program_does_at_any_size() -> None:
    model = opened("plain")
    assert (model.batch_size, model.whole, model.notes) == (SIZE, "", ())
    assert model.inputs[0].shape == (4,)
    for rows in (1, 2, 3, 7):
        x = draw(rows, 4)
        np.testing.assert_allclose(model.run({"x": x})["output"], np.exp(x), rtol=1e-6)
        np.testing.assert_allclose(model.run_alone({"x": x})["output"], np.exp(x), rtol=1e-6)
        np.testing.assert_allclose(compute(model.export({}), x=x)["output"], np.exp(x), rtol=1e-6)


def test_a_range_of_another_size_moves_with_the_batch() -> None:
    assert opened("plain", dynamic={0: (1, 9), 1: (2, 8)}).inputs[0].dynamic == {0: (2, 8)}


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("mixing", "(float[3,4] x) => (float[3,4] output) { output = Softmax<axis=0>(x) }", "along the batch (export"),
        ("other", "(float[3,4] x) => (float[3,4] output) { output = Exp(x) }", "a row depends on the other rows"),
        ("plain", "(float[3,4] x) => (float[1,12] output) { e = Exp(x) output = Flatten<axis=0>(e) }", "no common"),
    ],
)
def test_what_is_not_proven_is_served_whole(kind: str, text: str, reason: str) -> None:
    model = opened(kind, text)
    (note,) = model.notes
    assert note.startswith("served whole, with max_batch_size 0: ")
    assert reason in note
    assert model.inputs[0].shape == (SIZE, 4)
    assert list(model.export({}).graph.inputs[0].shape or ()) == [SIZE, 4]
    x = draw(SIZE, 4)
    assert model.run({"x": x})["output"].shape == (SIZE, 4)


def test_a_fixed_batch_may_stay() -> None:
    assert opened("plain", free=False).whole == "--batch fixed"


def test_sizes_that_were_saved_do_not_vary() -> None:
    with pytest.raises(ConversionError, match="takes only 4 in dimension 1 of 'x'"):
        opened("plain").export({"x": {0: (1, 9)}})
    with pytest.raises(ConversionError, match="takes only 3 in dimension 0 of 'x'"):
        opened("plain", free=False).export({"x": {0: (1, 9)}})
