"""`len` of tensors while a module is exported: a size in the module's own file, the same as ever anywhere else."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn

from graphkiln_converters.sources import pytorch as lengths
from graphkiln_converters.sources.pytorch import first_size, varying_lengths

HERE = sys.modules[__name__]


def counted(tensor: torch.Tensor) -> Any:
    return len(tensor)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.inner(image) * counted(image)


class Decorated(Counting):
    """As transformers decorates `forward`: the function that is called stands in another file."""

    forward = torch.no_grad()(Counting.forward)


@pytest.mark.parametrize("kind", [Counting, Decorated])
def test_a_tensor_has_the_size_of_its_shape(kind: type[nn.Module]) -> None:
    with torch.device("meta"):
        varying = torch.empty(3, 2)
    with varying_lengths(kind()):
        assert "len" in vars(HERE), "the file of the module's code is meant"
        assert counted(varying) == 3
        assert counted([1, 2]) == 2  # type: ignore[arg-type]
    assert "len" not in vars(HERE)


def test_what_was_exported_takes_any_batch() -> None:
    batch = torch.export.Dim("batch")
    with varying_lengths(Counting()):
        program = torch.export.export(Counting(), (torch.zeros(2, 2),), dynamic_shapes=({0: batch},))
    assert program.module()(torch.zeros(5, 2)).shape == (5, 2)


def test_after_an_error_everything_is_as_before() -> None:
    with pytest.raises(KeyError), varying_lengths(Counting()):
        raise KeyError
    assert "len" not in vars(HERE)


def test_torchs_own_files_and_those_with_a_len_of_their_own_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lengths._namespaces(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == []
    monkeypatch.setattr(HERE, "len", first_size, raising=False)
    assert lengths._namespaces(Counting()) == []


def test_what_is_no_module_changes_nothing() -> None:
    with varying_lengths(object()):
        assert "len" not in vars(HERE)


@pytest.mark.parametrize(("items", "length"), [([], 0), ("abc", 3), (torch.zeros(4, 1), 4)])
def test_lengths(items: Any, length: int) -> None:
    assert first_size(items) == length


def test_a_tensor_without_dimensions_has_none() -> None:
    with pytest.raises(TypeError, match="0-d"):
        first_size(torch.tensor(1.0))
