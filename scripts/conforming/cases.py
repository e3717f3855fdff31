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

from conforming.comparison import differences
from graphkiln_backend.graph.dtypes import AnyArray

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
        """How outputs differ from the expected ones by the suite's own rules; empty where they do not.

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
    """What the suite has for a value, as arrays: some are protobufs, some are numpy's scalars."""
    if isinstance(value, (list, tuple)):
        return [_as_value(element) for element in value]
    value = numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value
    return value if value is None else np.asarray(value)
