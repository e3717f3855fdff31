"""The cases of ONNX's backend test suite, as the installed `onnx` has them.

Source: `onnx.backend.test.runner.Runner`, which is what runs them elsewhere.
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
from graphkiln_backend.repository.config import BACKEND, write_config
from graphkiln_backend.repository.overlay import complete_config

# When an answer is the expected one, by the suite's own rules.
#
# Source: `onnx.backend.test.runner.Runner.assert_similar_outputs`.

_BFLOAT16_RTOL = 2**-6  # what the suite allows, whatever else a case says
_LONGEST = 300


def differences(expected: Mapping[str, Any], got: Mapping[str, Any], rtol: float, atol: float) -> str:
    """Describe the first output that differs; "" if none does.

    Args:
        expected: Values by name: arrays, lists of values, or None.
        got: As many, by the same names.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
    """
    found = ((name, difference(value, got[name], rtol, atol)) for name, value in expected.items())
    return next((f"{name}: {text}" for name, text in found if text), "")


def difference(expected: Any, got: Any, rtol: float, atol: float) -> str:
    """Describe how a value differs; "" if it does not."""
    if isinstance(expected, list) or isinstance(got, list):
        return _difference_of_lists(expected, got, rtol, atol)
    if expected is None or got is None:
        return "" if expected is got else "a value in the place of none"
    if got.shape != expected.shape:
        return f"the shape {list(got.shape)} instead of {list(expected.shape)}"
    if expected.dtype.kind in "OSU":
        return "" if _texts(got) == _texts(expected) else f"{got.tolist()} instead of {expected.tolist()}"
    if got.dtype != expected.dtype:
        return f"{got.dtype} instead of {expected.dtype}"
    return _difference_of_numbers(expected, got, rtol, atol)


def _difference_of_lists(expected: Any, got: Any, rtol: float, atol: float) -> str:
    if not (isinstance(expected, list) and isinstance(got, list)) or len(expected) != len(got):
        return "another sequence"
    return next(filter(None, (difference(*pair, rtol, atol) for pair in zip(expected, got, strict=True))), "")


def _difference_of_numbers(expected: Any, got: Any, rtol: float, atol: float) -> str:
    if got.dtype.name == "bfloat16":  # which numpy does not promote with Python's numbers
        got, expected, rtol = got.astype(np.float32), expected.astype(np.float32), max(rtol, _BFLOAT16_RTOL)
    try:
        np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol)
    except AssertionError as error:
        return " ".join(str(error).split())[:_LONGEST]
    return ""


def _texts(array: AnyArray) -> list[str]:
    return [text.decode() if isinstance(text, bytes) else str(text) for text in array.ravel().tolist()]


# Cases as models of a model store, and their tensors as Triton's protocol has them.

_BACKENDS = frozenset({BACKEND})


def write_model(case: Case, store: Path, engine: str = "") -> Path:
    """Put a case's graph into a model store, and complete its configuration as `graphkiln serve` does.

    Returns:
        The model's folder.

    Raises:
        GraphkilnError: The graph cannot be served.
    """
    folder = store / case.served_name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(case.model.SerializeToString())
    lines = [f'backend: "{BACKEND}"', "instance_group { count: 1 kind: KIND_CPU }"]
    lines += [f'parameters {{ key: "engine" value {{ string_value: "{engine}" }} }}'] if engine else []
    (folder / "config.pbtxt").write_text("\n".join(lines))
    write_config(complete_config(folder, _BACKENDS, lambda version: version), folder / "config.pbtxt")
    return folder


def to_tensors(feeds: Mapping[str, Any], ranks: Mapping[str, int]) -> dict[str, AnyArray]:
    """Feeds as the server takes them: where it publishes `[1]` for a scalar, that is what it gets."""
    return {name: _as_published(np.asarray(value), ranks.get(name)) for name, value in feeds.items()}


def to_values(case: Case, outputs: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
    """Outputs as the graph computes them: a scalar that came as `[1]` is one again."""
    scalars = {value.name for value in case.model.graph.output if _is_scalar(value.type)}
    return {
        name: array.reshape(()) if name in scalars and array.shape == (1,) else array for name, array in outputs.items()
    }


def ranks_of(inputs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The rank of each input by its name, from a model's metadata."""
    return {each["name"]: len(each["shape"]) for each in inputs}


def _as_published(array: AnyArray, rank: int | None) -> AnyArray:
    return array.reshape(1) if array.ndim == 0 and rank == 1 else array


def _is_scalar(kind: Any) -> bool:
    return kind.HasField("tensor_type") and kind.tensor_type.HasField("shape") and not kind.tensor_type.shape.dim


FOLDERS = ("simple", "pytorch-operator", "pytorch-converted")
LIGHT_TOLERANCE = (2e-3, 1e-7)  # the widest that the suite gives to one of them, relative and absolute


@dataclass(frozen=True, kw_only=True)
class Case:
    """A graph, and what it must compute.

    Attributes:
        kind: The part of the suite.
        name: As the suite names it.
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
        """A name for its model: the suite's, which some parts of it share."""
        return re.sub(r"\W", "_", f"{self.kind}.{self.name.removeprefix('test_')}")

    @property
    def required_inputs(self) -> list[str]:
        """Names of the inputs that a sample holds values of."""
        held = {tensor.name for tensor in self.model.graph.initializer}
        names = [value.name for value in self.model.graph.input]
        counts = {len(inputs) for inputs, _ in self.samples}
        return names if counts == {len(names)} else [name for name in names if name not in held]

    def feeds(self, sample: int) -> dict[str, Any]:
        """The inputs of a sample by name; an optional value that is not there is left out."""
        values = map(_as_value, self.samples[sample][0])
        named = zip(self.required_inputs, values, strict=False)
        return {name: value for name, value in named if value is not None}

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs, in the graph's order."""
        return [value.name for value in self.model.graph.output]

    def expected(self, sample: int) -> dict[str, Any]:
        """The outputs of a sample by name."""
        return dict(zip(self.output_names, map(_as_value, self.samples[sample][1]), strict=True))

    def difference(self, sample: int, outputs: Mapping[str, Any]) -> str:
        """Describe how outputs differ from the expected ones by the suite's rules; "" if they do not.

        Args:
            sample: Index of the sample.
            outputs: By name. One that is no tensor may be missing: a server of tensors leaves it out.
        """
        expected = self.expected(sample)
        left_out = {value.name for value in self.model.graph.output if not value.type.HasField("tensor_type")}
        if missing := expected.keys() - outputs.keys() - left_out:
            return f"no output {', '.join(sorted(missing))}"
        return differences({name: expected[name] for name in outputs}, outputs, self.rtol, self.atol)


@cache
def all_cases() -> tuple[Case, ...]:
    """Every case of the suite whose data are installed."""
    return (*_node_cases(), *_folder_cases(), *_light_cases())


def select(pattern: str = "") -> list[Case]:
    """The cases whose names match a regular expression."""
    return [case for case in all_cases() if re.search(pattern, case.served_name)]


def _node_cases() -> Iterator[Case]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the suite divides by zero, and means it
        cases = collect_testcases(None)
    for case in cases:
        if case.model is not None and case.data_sets is not None:
            yield Case(
                kind="node",
                name=case.name,
                model=case.model,
                samples=tuple(case.data_sets),
                rtol=case.rtol,
                atol=case.atol,
            )


def _folder_cases() -> Iterator[Case]:
    for kind in FOLDERS:
        for case in sorted(load_model_tests(kind=kind), key=lambda case: case.name):
            folder = Path(str(case.model_dir))
            model = onnx.load(folder / "model.onnx")
            samples = [_read_sample(path, model.graph) for path in sorted(folder.glob("test_data_set_*"))]
            yield Case(kind=kind, name=case.name, model=model, samples=tuple(samples), rtol=case.rtol, atol=case.atol)


def _light_cases() -> Iterator[Case]:
    """Architectures with constant weights, fed with ascending numbers as the suite does."""
    for path in sorted(Path(DATA_DIR, "light").glob("*.onnx")):
        model = onnx.load(path)
        held = {tensor.name for tensor in model.graph.initializer}
        inputs = [_ascending(value) for value in model.graph.input if value.name not in held]
        outputs = [
            _read_value(path.with_name(f"{path.stem}_output_{index}.pb"), value)
            for index, value in enumerate(model.graph.output)
        ]
        rtol, atol = LIGHT_TOLERANCE
        yield Case(kind="light", name=path.stem, model=model, samples=((inputs, outputs),), rtol=rtol, atol=atol)


def _ascending(value: onnx.ValueInfoProto) -> AnyArray:
    shape = [dim.dim_value or 1 for dim in value.type.tensor_type.shape.dim]
    size = int(np.prod(shape))
    return (np.arange(size).reshape(shape) / size).astype(np.float32)


def _read_sample(folder: Path, graph: onnx.GraphProto) -> tuple[list[Any], list[Any]]:
    return _read_values(folder, "input", graph.input), _read_values(folder, "output", graph.output)


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
    """Convert a value of the suite to arrays: some are protobufs, some are numpy's scalars."""
    if isinstance(value, (list, tuple)):
        return [_as_value(element) for element in value]
    value = numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value
    return value if value is None else np.asarray(value)
