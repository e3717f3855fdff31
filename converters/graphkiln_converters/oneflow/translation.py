"""Translation of a saved graph to ONNX, operation by operation, with its saved batch size."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import numpy as np
import onnx_ir
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.files import MIB, read_text
from graphkiln_backend.passes.graph_file import OPSET
from graphkiln_converters.oneflow import operators
from graphkiln_converters.oneflow.building import (
    BY_PROTO_NAME,
    IR_VERSION,
    TRANSLATORS,
    GraphBuilder,
    Op,
    Translator,
    Value,
    dtype_from_mlir,
    dtype_from_number,
)
from graphkiln_converters.oneflow.mlir import Job, Operation, TensorType

# Operations that denote values of the graph -> number of operands.
_BOUNDARIES = {"input": 1, "output": 1, "variable": 0}


def translate(job: Job, folder: Path) -> onnx_ir.Model:
    """Translate a graph, with inputs `INPUT_<i>` and outputs `OUTPUT_<i>` in the order of the model's signature.

    The type and shape of every value are checked against OneFlow's graph.

    Raises:
        ConversionError: An operation or attribute is not supported, or a state tensor does not fit the graph.
    """
    translators = find_translators(operation.kind for operation in job.operations if operation.kind not in _BOUNDARIES)
    graph = GraphBuilder()
    arguments, returns = order_by_signature(job)
    inputs = {name: _input(job, name, number) for number, name in enumerate(arguments)}
    values: dict[str, Value] = dict(inputs)
    for operation in job.operations:
        values |= _translate(operation, values, graph, translators, folder)
    outputs = [_output(graph, values, name, number) for number, name in enumerate(returns)]
    used = {value for node in graph.nodes for value in node.inputs}
    return onnx_ir.Model(
        onnx_ir.Graph(
            list(inputs.values()),
            outputs,
            nodes=graph.nodes,
            initializers=[weight for weight in graph.weights.values() if weight in used],
            opset_imports={"": OPSET},
            name=job.name,
        ),
        ir_version=IR_VERSION,
    )


def _output(graph: GraphBuilder, values: Mapping[str, Value], name: str, number: int) -> Value:
    """Add an output for a value, which may be an input or have another output already."""
    if name not in values:
        raise ConversionError(f"the graph returns {name}, which the translation of its operation does not compute")
    node = onnx_ir.node("Identity", [values[name]], name=f"OUTPUT_{number}")
    (output,) = node.outputs
    output.name, output.type, output.shape = f"OUTPUT_{number}", values[name].type, values[name].shape
    graph.nodes.append(node)
    return output


def order_by_signature(job: Job) -> tuple[list[str], list[str]]:
    """Return the names of inputs and outputs in the order of the traced model's signature.

    A job lists them in order of computation. OneFlow numbers them in the order of the signature:
    `_G_54_output.0.0.0_3`, `_G_54_output.0.0.1_4`. Otherwise the job's order is kept.

    Source: OneFlow 0.9.0, `nn/graph/util.py`, `ArgsTree.gen_name_for_args`.
    """
    inputs = {each.operands[0]: each for each in job.operations if each.kind == "input" and each.operands}
    outputs = {each.results[0]: each for each in job.operations if each.kind == "output" and each.results}
    return _sort(list(job.arguments), inputs, "input"), _sort(list(job.returns), outputs, "output")


def _sort(names: list[str], operations: Mapping[str, Operation], kind: str) -> list[str]:
    numbers: dict[str, int] = {}
    for name in names:
        operation = operations.get(name)
        op_name = str(operation.attributes.get("op_name", "")) if operation else ""
        match = re.fullmatch(rf"_.+_{kind}\..*_(\d+)", op_name)
        if match:
            numbers[name] = int(match[1])
    return sorted(names, key=numbers.__getitem__) if len(set(numbers.values())) == len(names) else names


def _translate(
    operation: Operation,
    values: Mapping[str, Value],
    graph: GraphBuilder,
    translators: Mapping[str, Translator],
    folder: Path,
) -> dict[str, Value]:
    """Add the nodes of an operation, and return its results by name."""
    operands = [_operand(operation, name, values) for name in operation.operands]
    if operation.kind in _BOUNDARIES:
        value = _boundary(operation, operands, graph, folder)
        return {operation.results[0]: value}
    op = Op(operation=operation, inputs=operands, graph=graph)
    try:
        translated = translators[operation.kind](op)
    except (IndexError, KeyError, ValueError, OverflowError) as error:
        raise op.error(f"operands and attributes are not as expected: {error}") from error
    computed = [translated] if isinstance(translated, Value) else translated
    results: dict[str, Value] = {}
    for name, value, declared in zip(operation.results, computed, operation.result_types, strict=False):
        _check_result(operation, value, declared)
        results[name] = value
    return results  # a translator may leave out the last ones


def _boundary(operation: Operation, operands: list[Value], graph: GraphBuilder, folder: Path) -> Value:
    expected, found = (_BOUNDARIES[operation.kind], 1), (len(operands), len(operation.results))
    if found != expected:
        raise ConversionError(
            f"line {operation.line}: {operation.kind} has {found[0]} operands and {found[1]} results, "
            f"expected {expected[0]} and {expected[1]}"
        )
    return _variable(operation, graph, folder) if operation.kind == "variable" else operands[0]


def _operand(operation: Operation, name: str, values: Mapping[str, Value]) -> Value:
    if name not in values:  # a result that its operation does not compute, such as the indices of a pooling
        raise ConversionError(
            f"line {operation.line}: {operation.kind} takes {name}, which the translation of its operation does not "
            "compute"
        )
    return values[name]


def _input(job: Job, name: str, number: int) -> Value:
    type_ = job.arguments[name]
    if None in type_.shape:
        raise ConversionError(f"input {number} has the type {type_}, with a dynamic size")
    dtype = dtype_from_mlir(type_.element)
    for operation in job.operations:
        declared = operation.attributes.get("data_type")
        if operation.kind == "input" and operation.operands == (name,) and isinstance(declared, int):
            dtype = dtype_from_number(declared)  # MLIR has no name for OneFlow's bool: it calls it si8
    return Value(
        name=f"INPUT_{number}",
        shape=onnx_ir.Shape(dim for dim in type_.shape if dim is not None),
        type=onnx_ir.TensorType(onnx_ir.DataType.from_numpy(dtype.numpy)),
    )


def _variable(operation: Operation, graph: GraphBuilder, folder: Path) -> Value:
    name = str(operation.attributes.get("op_name", ""))
    tensor, declared = read_state(folder, name), operation.result_types[0]
    if tensor.shape != declared.shape or tensor.dtype not in _accepted_dtypes(declared.element):
        raise ConversionError(
            f"state tensor '{name}' is {tensor.dtype} {list(tensor.shape)}, "
            f"but line {operation.line} of the graph expects {declared}",
            hint="the graph and its weights are of different models: save the graph again (flow.save)",
        )
    return graph.weight(name, tensor.load())


def _accepted_dtypes(element: str) -> set[DType]:
    dtype = dtype_from_mlir(element)
    return {dtype, DType.BOOL} if dtype is DType.INT8 else {dtype}


def _check_result(operation: Operation, value: Value, declared: TensorType) -> None:
    """Check a translated value against its type in OneFlow's graph, and set its shape if it was not inferred."""
    expected = [dim for dim in declared.shape if dim is not None]
    if value.shape is None:
        value.shape = onnx_ir.Shape(expected)
    elif list(value.shape.numpy()) != expected:
        raise _mismatch(operation, f"shape {list(value.shape.numpy())}", str(expected))
    if value.dtype is None or DType.from_onnx(int(value.dtype)) not in _accepted_dtypes(declared.element):
        raise _mismatch(operation, f"type {value.dtype}", declared.element)


def _mismatch(operation: Operation, found: str, expected: str) -> ConversionError:
    return ConversionError(
        f"line {operation.line}: the translation of {operation.kind} "
        f"'{operation.attributes.get('op_name', '')}' has the {found}, OneFlow's has {expected}",
        hint="the translator does not handle the attributes of this operation: report the model",
    )


# Translators by the operation's name.
#
# Built-in translators are functions of `operators/` registered with `translates`. Third parties add translators as
# entry points of the group `graphkiln.oneflow_operators`: the name is that of the operation (without the dialect), the
# value a function that takes an `Op` and returns its outputs. Third-party translators replace built-in ones.

GROUP = "graphkiln.oneflow_operators"


def find_translators(kinds: Iterable[str]) -> dict[str, Translator]:
    """Return the translators of a graph's operations by kind.

    Raises:
        ConversionError: Operations are not supported; the message lists them with their counts.
    """
    counts = Counter(kinds)
    third_party = {entry.name: entry for entry in entry_points(group=GROUP)}
    built_in = built_in_translators()
    unknown = {kind: count for kind, count in counts.items() if kind not in third_party and kind not in built_in}
    if unknown:
        listed = ", ".join(f"{kind} ({count} times)" for kind, count in sorted(unknown.items()))
        raise ConversionError(
            f"{len(unknown)} of {len(counts)} kinds of operations cannot be translated: {listed}",
            hint=f"add translators as entry points of the group {GROUP}, or report the model",
        )
    return {kind: third_party[kind].load() if kind in third_party else built_in[kind] for kind in counts}


@cache
def built_in_translators() -> dict[str, Translator]:
    """Return the translators in `operators/` by kind of operation."""
    for module in iter_modules(operators.__path__):
        import_module(f"{operators.__name__}.{module.name}")
    return dict(TRANSLATORS)


# State tensors of a `flow.save` folder: a folder for each, with the elements in `out`, type and shape in `meta`.
#
# OneFlow saves the whole state, including tensors that the graph does not use (`num_batches_tracked`).
#
# Source: OneFlow 0.9.0, `framework/check_point_v2.py`, `core/framework/variable_meta_info.proto`.

_DATA, _META = "out", "meta"
_EAGER = "FreeEagerTensor"
_UNSAVED_HINT = (
    "flow.save writes parameters and buffers only, and this tensor is neither: register_buffer() it in its module "
    "(LeViT keeps one in the attribute 'ab'), then trace and save the graph again"
)
_HINT = "the folder is incomplete: save the graph again (flow.save), or copy it again"


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTensor:
    """A saved parameter or buffer.

    Attributes:
        name: Name in OneFlow, and of its folder.
        path: File with the elements, little-endian and contiguous.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    path: Path

    def load(self) -> AnyArray:
        """Return a read-only memory map of the elements."""
        if 0 in self.shape:
            return np.zeros(self.shape, self.dtype.numpy)
        array: AnyArray = np.memmap(self.path, self.dtype.numpy, mode="r", shape=self.shape)
        return array


def read_state(folder: Path, name: str) -> StateTensor:
    """Find a tensor in a folder of `flow.save` and check its files.

    Raises:
        ConversionError: A file is missing, unreadable, unknown, too short or too long.
    """
    if Path(name).name != name or name in {".", ".."}:
        raise ConversionError(f"state tensor '{name}': the name leads out of {folder}", hint=_HINT)
    if not name.isprintable():
        raise ConversionError(f"state tensor {name!r}: the name contains control characters", hint=_HINT)
    tensor = folder / name
    found = {path.name for path in tensor.iterdir()} if tensor.is_dir() else set()
    for missing in sorted({_DATA, _META} - found):
        hint = _UNSAVED_HINT if _EAGER in name else _HINT
        raise ConversionError(f"state tensor '{name}': there is no {tensor / missing}", hint=hint)
    for unknown in sorted(found - {_DATA, _META}):
        raise ConversionError(
            f"state tensor '{name}': {tensor / unknown} is unknown",
            hint=f"a tensor's folder holds {_DATA} and {_META} only: remove the file",
        )
    dtype, shape = _read_meta(tensor / _META, name)
    expected, size = math.prod(shape) * dtype.numpy.itemsize, (tensor / _DATA).stat().st_size
    if size != expected:
        raise ConversionError(
            f"state tensor '{name}': {tensor / _DATA} has {size} bytes, expected {expected} for "
            f"{dtype} {list(shape)}: it is {'too short' if size < expected else 'too long'}",
            hint=_HINT,
        )
    return StateTensor(name=name, dtype=dtype, shape=shape, path=tensor / _DATA)


def _read_meta(path: Path, name: str) -> tuple[DType, tuple[int, ...]]:
    meta = _meta_class()()
    try:
        text_format.Parse(read_text(path, MIB), meta, allow_unknown_field=True)
    except (OSError, UnicodeDecodeError, RecursionError, text_format.ParseError) as error:
        raise ConversionError(f"state tensor '{name}': {path} cannot be read: {error}", hint=_HINT) from error
    if not meta.data_type:
        raise ConversionError(
            f"state tensor '{name}': {path} has no data_type", hint=f"supported: {', '.join(BY_PROTO_NAME)}"
        )
    shape = tuple(int(dim) for dim in meta.shape.dim)
    if any(dim < 0 for dim in shape):
        raise ConversionError(f"state tensor '{name}': {path} has the shape {list(shape)}", hint=_HINT)
    return list(BY_PROTO_NAME.values())[meta.data_type - 1], shape


@cache
def _meta_class() -> Any:
    """Make the message class of a `meta` file; data types are numbered in the order of `BY_PROTO_NAME`, from 1."""
    types = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="graphkiln/oneflow_meta.proto", package="graphkiln.oneflow")
    dtypes = file.enum_type.add(name="DataType")
    for number, dtype in enumerate(("kInvalidDataType", *BY_PROTO_NAME)):
        dtypes.value.add(name=dtype, number=number)
    shape = file.message_type.add(name="Shape")
    shape.field.add(name="dim", number=1, type=types.TYPE_INT64, label=types.LABEL_REPEATED)
    meta = file.message_type.add(name="Meta")
    shape_field = meta.field.add(name="shape", number=1, type=types.TYPE_MESSAGE, label=types.LABEL_OPTIONAL)
    shape_field.type_name = ".graphkiln.oneflow.Shape"
    dtype_field = meta.field.add(name="data_type", number=2, type=types.TYPE_ENUM, label=types.LABEL_OPTIONAL)
    dtype_field.type_name = ".graphkiln.oneflow.DataType"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("graphkiln.oneflow.Meta"))
