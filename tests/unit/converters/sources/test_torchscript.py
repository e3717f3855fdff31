"""Programs of torch.jit: traced, scripted, and programs that access files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir
import pytest
import torch
from graphs import compute
from recipes import recipe
from torch import nn

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.sources.pytorch import FixedBatchModel
from graphkiln_converters.sources.torchscript import open_source

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated


class Looping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, times: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
        first = x
        for _ in range(times):
            x = torch.relu(self.linear(x))
        return x, first + 1


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens).sum(1)  # type: ignore[no-any-return]


class Saving(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.save(x, "stolen")
        return x


class Baked(nn.Module):
    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch
        self.linear = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.reshape(self.batch, -1))


def script(module: nn.Module, path: Path) -> str:
    torch.jit.script(module.eval()).save(path)  # type: ignore[no-untyped-call]
    return str(path)


def test_a_scripted_loop_with_a_default_argument(tmp_path: Path) -> None:
    model = open_source(script(Looping(), tmp_path / "m.pt"), recipe(shapes={"": (4,)}))
    assert [spec.name for spec in model.inputs] == ["x"]
    outputs = model.run({"x": np.ones((3, 4), np.float32)})
    assert [output.shape for output in outputs.values()] == [(3, 4), (3, 4)]
    graph = model.export().graph
    assert [value.name for value in graph.outputs] == list(outputs)
    assert isinstance(graph.inputs[0].shape[0], onnx_ir.SymbolicDim)  # type: ignore[index]


def test_inputs_are_recognized_by_the_samples(tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", INPUT_0=np.full((5, 7), 9))
    model = open_source(script(Embedding(), tmp_path / "m.pt"), recipe(samples=tmp_path / "s.npz"))
    (tokens,) = model.inputs
    assert (tokens.name, tokens.dtype, tokens.shape, tokens.high) == ("tokens", DType.INT64, (7,), 10)
    varying = replace(model, inputs=(replace(tokens, dynamic={0: (1, 9)}),)).export().graph.inputs[0].shape
    assert not any(isinstance(size, int) for size in varying or (0,))


def test_text_samples_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", tokens=np.array([["a", "b"]]))
    with pytest.raises(ConversionError, match=r"text for 'tokens'.*tokenizer"):
        open_source(script(Embedding(), tmp_path / "m.pt"), recipe(samples=tmp_path / "s.npz"))


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_traced_batch_is_made_dynamic(tmp_path: Path, batch: int) -> None:
    example = torch.rand(batch, 3, 4)
    torch.jit.trace(Baked(batch).eval(), example).save(tmp_path / "m.pt")  # type: ignore[no-untyped-call]
    model = open_source(str(tmp_path / "m.pt"), recipe(shapes={"": (3, 4)}))
    assert isinstance(model, FixedBatchModel)
    assert (model.batch_size, model.whole) == (batch, "")
    rows = {"x": np.random.default_rng(0).standard_normal((4, 3, 4)).astype(np.float32)}
    (expected,) = model.run(rows).values()
    (found,) = compute(model.export(), **rows).values()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_unknown_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"inputs are not known: tokens.*--shape tokens="):
        open_source(script(Embedding(), tmp_path / "m.pt"), recipe())


def test_a_program_that_writes_files_needs_allow_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # it is run, and writes
    path = script(Saving(), tmp_path / "m.pt")
    with pytest.raises(ConversionError, match=r"accesses files or other machines \(save\).*--allow-code"):
        open_source(path, recipe(shapes={"": (4,)}))
    assert open_source(path, recipe(shapes={"": (4,)}, allow_code=True)).inputs


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"nonsense"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.pt").write_bytes(content)
    with pytest.raises(ConversionError, match=r"is not a program of torch\.jit"):
        open_source(str(tmp_path / "m.pt"), recipe())
