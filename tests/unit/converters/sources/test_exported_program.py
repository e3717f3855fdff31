"""Programs of torch.export: inputs, batches, refused programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recipes import recipe
from torch import nn

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.sources.exported_program import open_source
from graphkiln_converters.sources.pytorch import FixedBatchModel, TorchModel

OPTIONS = recipe()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(3.0))

    def forward(self, image: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": image * self.factor, "count": tokens + 1}


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Listed(nn.Module):
    def forward(self, both: list[torch.Tensor]) -> torch.Tensor:
        return both[0] + both[1]


EXAMPLE = {"image": torch.zeros(2, 3), "tokens": torch.tensor([[1, 7], [2, 3]])}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Saved programs by how they were exported; exporting takes a second each."""
    folder = tmp_path_factory.mktemp("programs")
    batch = torch.export.Dim("batch")
    shapes = {name: {0: batch} for name in EXAMPLE}
    exports: dict[str, Callable[[], Any]] = {
        "positional": lambda: torch.export.export(Scaled(), tuple(EXAMPLE.values()), dynamic_shapes=shapes),
        "keywords": lambda: torch.export.export(Scaled(), (), EXAMPLE, dynamic_shapes=shapes),
        "mixed": lambda: torch.export.export(
            Scaled(), (EXAMPLE["image"],), {"tokens": EXAMPLE["tokens"]}, dynamic_shapes=shapes
        ),
        "fixed": lambda: torch.export.export(Scaled(), tuple(EXAMPLE.values())),
        "length": lambda: torch.export.export(
            Scaled(), tuple(EXAMPLE.values()), dynamic_shapes=(None, {1: torch.export.Dim("t", min=2)})
        ),
        "bf16": lambda: torch.export.export(Doubled(), (torch.zeros(2, 3, dtype=torch.bfloat16),)),
        "training": lambda: torch.export.export(
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout()).train(), (torch.zeros(2, 3),)
        ),
        "listed": lambda: torch.export.export(Listed(), ([torch.zeros(2, 3), torch.zeros(2, 3)],)),
    }
    paths = {}
    for name, export in exports.items():
        paths[name] = folder / f"{name}.pt2"
        torch.export.save(export(), paths[name])
    return paths


@pytest.mark.parametrize("kind", ["positional", "keywords"])
def test_inputs_are_those_of_the_example(programs: dict[str, Path], kind: str) -> None:
    model = open_source(str(programs[kind]), OPTIONS)
    assert isinstance(model, TorchModel)
    image, tokens = model.inputs
    assert (image.name, image.dtype, image.shape) == ("image", DType.FP32, (3,))
    assert (tokens.name, tokens.dtype, tokens.shape, tokens.high) == ("tokens", DType.INT64, (2,), 8)
    assert model.keywords == (kind == "keywords")


@pytest.mark.parametrize("kind", ["positional", "keywords"])
def test_a_program_runs_with_any_batch(programs: dict[str, Path], kind: str) -> None:
    feeds = {"image": np.ones((5, 3), "f4"), "tokens": np.zeros((5, 2), np.int64)}
    outputs = open_source(str(programs[kind]), OPTIONS).run(feeds)
    np.testing.assert_array_equal(outputs["scores"], np.full((5, 3), 3, "f4"))
    np.testing.assert_array_equal(outputs["count"], np.ones((5, 2)))


def test_a_fixed_batch_is_made_dynamic(programs: dict[str, Path]) -> None:
    model = open_source(str(programs["fixed"]), OPTIONS)
    assert isinstance(model, FixedBatchModel)
    assert (model.batch_size, model.whole, [spec.shape for spec in model.inputs]) == (2, "", [(3,), (2,)])
    assert [value.shape and str(value.shape[0]) for value in model.export().graph.inputs] == ["batch", "batch"]


def test_a_dynamic_size_beside_a_fixed_batch_has_its_range(programs: dict[str, Path]) -> None:
    model = open_source(str(programs["length"]), recipe(batch="fixed"))
    assert isinstance(model, FixedBatchModel)
    assert model.inputs[1].dynamic == {1: (2, 4)}


def test_bf16_programs_run(programs: dict[str, Path]) -> None:
    model = open_source(str(programs["bf16"]), recipe(batch="fixed"))
    (spec,) = model.inputs
    assert spec.dtype is DType.BF16
    (found,) = model.run({spec.name: np.ones((2, 3), DType.BF16.numpy)}).values()
    assert found.dtype == DType.BF16.numpy
    np.testing.assert_array_equal(found.astype("f4"), np.full((2, 3), 2))


class TestErrors:
    def test_training_mode_is_refused(self, programs: dict[str, Path]) -> None:
        with pytest.raises(ConversionError, match=r"exported in training mode, .*: batch_norm and 1 more") as caught:
            open_source(str(programs["training"]), OPTIONS)
        assert "model.eval()" in caught.value.hint

    def test_lists_of_tensors_are_refused(self, programs: dict[str, Path]) -> None:
        with pytest.raises(ConversionError, match="takes lists or dicts of tensors"):
            open_source(str(programs["listed"]), OPTIONS)

    def test_inputs_by_position_and_by_name_are_refused(self, programs: dict[str, Path]) -> None:
        with pytest.raises(ConversionError, match="takes positional and keyword inputs"):
            open_source(str(programs["mixed"]), OPTIONS)

    def test_missing_example_inputs_are_refused(
        self, programs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        program = torch.export.load(programs["positional"])
        monkeypatch.setattr(type(program), "example_inputs", None)
        monkeypatch.setattr(torch.export, "load", lambda _: program)
        with pytest.raises(ConversionError, match="was saved without example inputs"):
            open_source(str(programs["positional"]), OPTIONS)


@pytest.mark.parametrize("content", [b"", b"no archive", None])
def test_other_files_are_refused_without_a_traceback(
    tmp_path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "weights.pt2"
    if content is None:
        torch.save({"weight": torch.zeros(2)}, path)
    else:
        path.write_bytes(content)
    with pytest.raises(ConversionError, match=r"is not a torch.export program: .*torch\.export\.save"):
        open_source(str(path), OPTIONS)
    assert not caplog.records
