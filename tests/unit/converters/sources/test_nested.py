"""Examples with tensors in tuples, lists and dicts: what inputs are called, and what the module gets."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.sources.python_module import Flattened, flat_inputs, is_nested


class Pair(NamedTuple):
    key: torch.Tensor
    value: torch.Tensor


class Step(nn.Module):
    """Returns what it gets, to be looked at."""

    def forward(self, x: torch.Tensor, past: Any = None, scale: float = 1.0) -> Any:
        return x, past, scale


def tensor(number: int) -> torch.Tensor:
    return torch.full((2, 3), float(number))


NESTED = {
    "x": tensor(0),
    "past": [(tensor(1), tensor(2)), Pair(tensor(3), tensor(4)), {"key": tensor(5), "flag": True, "none": None}],
    "scale": 0.5,
}


@pytest.mark.parametrize(
    ("example", "nested"),
    [
        (tensor(0), False),
        ((tensor(0), tensor(1)), False),
        ({"x": tensor(0)}, False),
        (None, False),
        (NESTED, True),
        ((tensor(0), (tensor(1),)), True),
        ({"x": tensor(0), "scale": 2}, True),
    ],
)
def test_what_is_nested(example: Any, nested: bool) -> None:
    assert is_nested(example) == nested


def test_inputs_are_called_after_their_places() -> None:
    assert list(flat_inputs(Step(), NESTED)) == [
        *("x", "past_0_0", "past_0_1", "past_1_0", "past_1_1", "past_2_key"),
    ]
    assert list(flat_inputs(Step(), (tensor(0), [tensor(1)]))) == ["x", "past_0"]


@pytest.mark.parametrize("example", [NESTED, (NESTED["x"], NESTED["past"], 0.5)])
def test_the_module_gets_what_the_example_holds(example: Any) -> None:
    flat = Flattened(Step(), example)
    numbers = [10 + number for number in range(6)]
    x, past, scale = flat(*map(tensor, numbers))
    assert scale == 0.5
    pair, named, other = past
    assert isinstance(named, Pair)
    assert (other["flag"], other["none"]) == (True, None)
    found = [x, *pair, named.key, named.value, other["key"]]
    assert [each[0, 0].item() for each in found] == numbers
    assert not list(flat.buffers())
    assert not list(flat.parameters())


@pytest.mark.parametrize(
    ("example", "words"),
    [
        ({"a_0": tensor(0), "a": (tensor(1),)}, "two tensors that would be called 'a_0'"),
        ({"x": object()}, "input 'x' is a object, expected tensors in tuples"),
        ({"x": (), "scale": 2.0}, "holds no tensor"),
    ],
)
def test_what_cannot_be_an_input(example: Any, words: str) -> None:
    with pytest.raises(ConversionError, match=words):
        flat_inputs(Step(), example)
