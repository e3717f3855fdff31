"""The cases of ONNX's backend test suite, from the installed `onnx`, and the comparison of answers by its rules.

Source: `onnx.backend.test.runner.Runner`, which runs the suite elsewhere.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.case.node import collect_testcases
from onnx.backend.test.loader import DATA_DIR, load_model_tests

from graphkiln_backend.graph.dtypes import AnyArray

_FOLDERS = ("simple", "pytorch-operator", "pytorch-converted")
_LIGHT_TOLERANCE = (2e-3, 1e-7)  # relative and absolute: the widest that the suite gives to one of them
_BFLOAT16_RTOL = 2**-6  # the suite's, for every case
_LONGEST = 300


@dataclass(frozen=True, kw_only=True)
class Case:
    """A graph and its expected outputs.

    Attributes:
        kind: Part of the suite.
        name: The suite's name.
        model: The graph.
        samples: Values of the inputs in the graph's order, with the expected values of the outputs. A value is an
            array, or what the suite has for a sequence or an optional value.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
    """

    kind: str
    name: str
    model: onnx.ModelProto
    samples: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    rtol: float
    atol: float

    @property
    def served_name(self) -> str:
        """Unique name of its model: parts of the suite share names."""
        return re.sub(r"\W", "_", f"{self.kind}.{self.name.removeprefix('test_')}")

    def feeds(self, sample: int) -> dict[str, Any]:
        """Inputs of a sample by name, without optional values that are absent and inputs with an initializer."""
        names = [value.name for value in self.model.graph.input]
        if {len(inputs) for inputs, _ in self.samples} != {len(names)}:
            initialized = {tensor.name for tensor in self.model.graph.initializer}
            names = [name for name in names if name not in initialized]
        named = zip(names, map(_as_value, self.samples[sample][0]), strict=False)
        return {name: value for name, value in named if value is not None}

    def expected(self, sample: int) -> dict[str, Any]:
        """Outputs of a sample by name."""
        names = [value.name for value in self.model.graph.output]
        return dict(zip(names, map(_as_value, self.samples[sample][1]), strict=True))

    def difference(self, sample: int, outputs: Mapping[str, Any]) -> str:
        """Describe how outputs differ from the expected ones by the suite's rules; "" if they do not.

        Args:
            sample: Index of the sample.
            outputs: Values by name. An output that is not a tensor may be missing: Triton leaves it out.
        """
        expected = self.expected(sample)
        left_out = {value.name for value in self.model.graph.output if not value.type.HasField("tensor_type")}
        if missing := expected.keys() - outputs.keys() - left_out:
            return f"no output {', '.join(sorted(missing))}"
        found = {name: difference(expected[name], value, self.rtol, self.atol) for name, value in outputs.items()}
        return next((f"{name}: {found[name]}" for name in expected if found.get(name)), "")


def difference(expected: Any, got: Any, rtol: float, atol: float) -> str:
    """Describe how a value (an array, a list of values, or None) differs from the expected one; "" if it does not."""
    if isinstance(expected, list) or isinstance(got, list):
        if not (isinstance(expected, list) and isinstance(got, list)) or len(expected) != len(got):
            return "another sequence"
        return next(filter(None, (difference(*pair, rtol, atol) for pair in zip(expected, got, strict=True))), "")
    if expected is None or got is None:
        return "" if expected is got else "a value instead of none, or none instead of a value"
    if got.shape != expected.shape:
        return f"the shape {list(got.shape)} instead of {list(expected.shape)}"
    if expected.dtype.kind in "OSU":
        return "" if _texts(got) == _texts(expected) else f"{got.tolist()} instead of {expected.tolist()}"
    return _difference_of_numbers(expected, got, rtol, atol)


def _difference_of_numbers(expected: Any, got: Any, rtol: float, atol: float) -> str:
    if got.dtype != expected.dtype:
        return f"{got.dtype} instead of {expected.dtype}"
    if got.dtype.name == "bfloat16":  # numpy does not promote it with Python's numbers
        got, expected, rtol = got.astype(np.float32), expected.astype(np.float32), max(rtol, _BFLOAT16_RTOL)
    try:
        np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol)
    except AssertionError as error:
        return " ".join(str(error).split())[:_LONGEST]
    return ""


def _texts(array: AnyArray) -> list[str]:
    return [text.decode() if isinstance(text, bytes) else str(text) for text in array.ravel().tolist()]


def select(pattern: str = "") -> list[Case]:
    """The cases whose names match a regular expression."""
    return [case for case in all_cases() if re.search(pattern, case.served_name)]


@cache
def all_cases() -> tuple[Case, ...]:
    """All cases of the suite whose data are installed."""
    return (*_node_cases(), *_folder_cases(), *_light_cases())


def _node_cases() -> Iterator[Case]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the suite divides by zero on purpose
        found = collect_testcases(None)
    for each in found:
        if each.model is not None and each.data_sets is not None:
            samples = tuple(each.data_sets)
            yield Case(kind="node", name=each.name, model=each.model, samples=samples, rtol=each.rtol, atol=each.atol)


def _folder_cases() -> Iterator[Case]:
    for kind in _FOLDERS:
        for each in sorted(load_model_tests(kind=kind), key=lambda each: each.name):
            folder = Path(str(each.model_dir))
            model = onnx.load(folder / "model.onnx")
            samples = tuple(
                (_read_values(path, "input", model.graph.input), _read_values(path, "output", model.graph.output))
                for path in sorted(folder.glob("test_data_set_*"))
            )
            yield Case(kind=kind, name=each.name, model=model, samples=samples, rtol=each.rtol, atol=each.atol)


def _light_cases() -> Iterator[Case]:
    """Architectures with constant weights, fed with ascending numbers as the suite does."""
    rtol, atol = _LIGHT_TOLERANCE
    for path in sorted(Path(DATA_DIR, "light").glob("*.onnx")):
        model = onnx.load(path)
        initialized = {tensor.name for tensor in model.graph.initializer}
        inputs = []
        for value in model.graph.input:
            if value.name not in initialized:
                shape = [dim.dim_value or 1 for dim in value.type.tensor_type.shape.dim]
                size = int(np.prod(shape))
                inputs.append((np.arange(size).reshape(shape) / size).astype(np.float32))
        outputs = _read_values(path.parent, f"{path.stem}_output", model.graph.output)
        yield Case(kind="light", name=path.stem, model=model, samples=((inputs, outputs),), rtol=rtol, atol=atol)


def _read_values(folder: Path, prefix: str, values: Iterable[onnx.ValueInfoProto]) -> list[Any]:
    files = [(folder / f"{prefix}_{index}.pb", value) for index, value in enumerate(values)]
    return [_read_value(path, value) for path, value in files if path.exists()]


def _read_value(path: Path, value: onnx.ValueInfoProto) -> Any:
    content = path.read_bytes()
    kind = value.type.WhichOneof("value")
    if kind == "sequence_type":
        return numpy_helper.to_list(onnx.SequenceProto.FromString(content))
    if kind == "optional_type":
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(content))
    return numpy_helper.to_array(onnx.TensorProto.FromString(content))


def _as_value(value: Any) -> Any:
    """Convert a value of the suite to arrays: some are protobufs, some are numpy scalars."""
    if isinstance(value, (list, tuple)):
        return [_as_value(element) for element in value]
    value = numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value
    return value if value is None else np.asarray(value)
