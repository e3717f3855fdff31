"""Factories in files and modules: returned modules, nested examples, errors."""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from recipes import recipe
from torch import nn

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.sources.python_module import Flattened, flat_inputs, open_source

CODE = """
import torch
from torch import nn

import a_neighbor

class Doubled(nn.Module):
    def __init__(self, factor=2.0):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor, dtype=torch.float64))

    def forward(self, image):
        return image * self.factor

def make():
    return Doubled(), torch.zeros(2, 3)

def named():
    return Doubled(), {"image": torch.zeros(2, 3)}

class Cached(nn.Module):
    def forward(self, token, past):
        return {"present": [(key + token, value * token) for key, value in past]}

def nested():
    return Cached(), {"token": torch.zeros(2, 1), "past": [(torch.zeros(2, 3), torch.zeros(2, 3))]}

def alone():
    return Doubled()

def triple():
    return Doubled(), torch.zeros(2, 3), "more"

def broken():
    raise LookupError("no checkpoint at hand")

"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "a_neighbor.py").write_text("")
    path = tmp_path / "a_models_file.py"
    path.write_text(CODE)
    before = list(sys.path)
    yield path
    sys.path[:] = before
    for name in ("a_neighbor", "a_models_file"):
        sys.modules.pop(name, None)


OPTIONS = recipe()


class TestFactories:
    @pytest.mark.parametrize("factory", ["make", "named"])
    def test_a_module_with_an_example(self, file: Path, factory: str) -> None:
        model = open_source(f"{file}:{factory}", OPTIONS)
        (spec,) = model.inputs
        assert (spec.name, spec.shape, spec.dtype) == ("image", (3,), DType.FP32)
        np.testing.assert_array_equal(model.run({"image": np.ones((4, 3), "f4")})["output"], np.full((4, 3), 2))
        assert model.description == f"python:{file}:{factory}"

    def test_tensors_in_tuples_and_lists_are_separate_inputs(self, file: Path) -> None:
        model = open_source(f"{file}:nested", OPTIONS)
        assert [(spec.name, spec.shape) for spec in model.inputs] == [
            *(("token", (1,)), ("past_0_0", (3,)), ("past_0_1", (3,))),
        ]
        key, value = np.arange(6, dtype="f4").reshape(2, 3), np.ones((2, 3), "f4")
        found = model.run({"token": np.full((2, 1), 2, "f4"), "past_0_0": key, "past_0_1": value})
        np.testing.assert_array_equal(found["present_0_0"], key + 2)
        np.testing.assert_array_equal(found["present_0_1"], value * 2)

    def test_a_module_with_a_given_shape(self, file: Path) -> None:
        model = open_source(f"{file}:alone", recipe(shapes={"": (3,)}))
        assert [(spec.name, spec.shape) for spec in model.inputs] == [("input", (3,))]
        assert not model.keywords

    def test_shapes_by_name_are_passed_by_name(self, file: Path) -> None:
        model = open_source(f"{file}:alone", recipe(shapes={"image": (3,)}))
        assert model.keywords
        assert model.run({"image": np.ones((1, 3), "f4")})["output"].tolist() == [[2, 2, 2]]

    def test_weights_are_loaded(self, file: Path, tmp_path: Path) -> None:
        torch.save({"factor": torch.tensor(5.0)}, tmp_path / "w.pth")
        model = open_source(f"{file}:make", recipe(weights=tmp_path / "w.pth"))
        assert model.run({"image": np.ones((1, 3), "f4")})["output"][0, 0] == 5


class TestErrors:
    @pytest.mark.parametrize(
        ("factory", "message"),
        [
            ("makes", "has no function 'makes'.*did you mean 'make'"),
            ("triple", "returns a tuple, expected a torch.nn.Module"),
            ("broken", "broken of .* fails: LookupError: no checkpoint at hand"),
            ("alone", "the shape of alone's input is unknown.*--shape 3x224x224"),
        ],
    )
    def test_errors_of_the_factory(self, file: Path, factory: str, message: str) -> None:
        with pytest.raises(ConversionError, match=message):
            open_source(f"{file}:{factory}", OPTIONS)

    @pytest.mark.parametrize("location", ["model.py", ""])
    def test_a_location_without_factory_is_refused(self, location: str) -> None:
        with pytest.raises(ConversionError, match=f"'python:{location}' has no factory"):
            open_source(location, OPTIONS)

    @pytest.mark.parametrize(
        ("code", "error"),
        [("def make(:", "SyntaxError"), ("import not_there", "ModuleNotFoundError")],
    )
    def test_an_import_error_is_reported(self, file: Path, code: str, error: str) -> None:
        file.write_text(code)
        with pytest.raises(ConversionError, match=f"cannot import .*: {error}"):
            open_source(f"{file}:make", OPTIONS)


# Examples with tensors in tuples, lists and dicts.


class Pair(NamedTuple):
    key: torch.Tensor
    value: torch.Tensor


class Step(nn.Module):
    """Return the inputs."""

    def forward(self, x: torch.Tensor, past: Any = None, scale: float = 1.0) -> Any:
        return x, past, scale


def tensor(number: int) -> torch.Tensor:
    return torch.full((2, 3), float(number))


NESTED = {
    "x": tensor(0),
    "past": [(tensor(1), tensor(2)), Pair(tensor(3), tensor(4)), UserDict(key=tensor(5), flag=True, none=None)],
    "scale": 0.5,
}


def test_inputs_are_named_by_their_paths() -> None:
    assert list(flat_inputs(Step(), NESTED)) == [
        *("x", "past_0_0", "past_0_1", "past_1_0", "past_1_1", "past_2_key"),
    ]
    assert list(flat_inputs(Step(), (tensor(0), [tensor(1)]))) == ["x", "past_0"]


@pytest.mark.parametrize("example", [NESTED, UserDict(NESTED), (NESTED["x"], NESTED["past"], 0.5)])
def test_the_module_gets_the_structure_of_the_example(example: Any) -> None:
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
        ({"a_0": tensor(0), "a": (tensor(1),)}, "would have the name 'a_0'"),
        ({"x": object()}, "input 'x' is a object, expected tensors in tuples"),
        ({"x": (), "scale": 2.0}, "has no tensor"),
    ],
)
def test_invalid_examples_are_refused(example: Any, words: str) -> None:
    with pytest.raises(ConversionError, match=words):
        flat_inputs(Step(), example)
