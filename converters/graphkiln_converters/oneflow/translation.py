"""From a saved graph to the ONNX graph that says the same, operation by operation, at the batch it was saved with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import onnx_ir

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.passes.graph_file import OPSET
from graphkiln_converters.oneflow.building import IR_VERSION, GrowingGraph, Op, Value
from graphkiln_converters.oneflow.elements import of_mlir, of_number
from graphkiln_converters.oneflow.mlir import Job, Operation, TensorType
from graphkiln_converters.oneflow.registry import Translator, translators
from graphkiln_converters.oneflow.state import read_state

_EDGES = {"input": 1, "output": 1, "variable": 0}
"""Operations that are values of the graph, and how many operands they have."""


def translate(job: Job, folder: Path) -> onnx_ir.Model:
    """Makes the graph: inputs `INPUT_<i>` and outputs `OUTPUT_<i>` in the order of the model's signature.

    Every value that OneFlow's graph names is held to the type and shape that it has there.

    Args:
        job: The saved graph.
        folder: Where its state tensors lie.

    Raises:
        ConversionError: An operation is not known or its attributes are not, or a state tensor is not what it must be.
    """
    known = translators(each.kind for each in job.operations if each.kind not in _EDGES)
    graph = GrowingGraph()
    arguments, returns = in_signature_order(job)
    inputs = {name: _input(job, name, number) for number, name in enumerate(arguments)}
    values: dict[str, Value] = dict(inputs)
    for operation in job.operations:
        values |= _made(operation, values, graph, known, folder)
    outputs = []
    for number, name in enumerate(returns):
        outputs.append(_output(graph, values, name, number))
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


def _output(graph: GrowingGraph, values: Mapping[str, Value], name: str, number: int) -> Value:
    """A value under the name of an output; it may be answered twice, or be an input."""
    if name not in values:
        raise ConversionError(f"the graph answers {name}, which its operation was not asked for")
    node = onnx_ir.node("Identity", [values[name]], name=f"OUTPUT_{number}")
    (output,) = node.outputs
    output.name, output.type, output.shape = f"OUTPUT_{number}", values[name].type, values[name].shape
    graph.nodes.append(node)
    return output


def in_signature_order(job: Job) -> tuple[list[str], list[str]]:
    """Names of inputs and outputs as the traced model takes and answers them.

    The job has them in the order in which they are computed. OneFlow numbers them as it walks through the signature:
    `_G_54_output.0.0.0_3`, `_G_54_output.0.0.1_4`. Where the names are others, the job's order counts.

    Source: OneFlow 0.9.0, `nn/graph/util.py`, `ArgsTree.gen_name_for_args`.
    """
    takes = {each.operands[0]: each for each in job.operations if each.kind == "input" and each.operands}
    makes = {each.results[0]: each for each in job.operations if each.kind == "output" and each.results}
    return _numbered(list(job.arguments), takes, "input"), _numbered(list(job.returns), makes, "output")


def _numbered(names: list[str], operations: Mapping[str, Operation], kind: str) -> list[str]:
    numbers: dict[str, int] = {}
    for name in names:
        found = operations.get(name)
        match = re.fullmatch(rf"_.+_{kind}\..*_(\d+)", str(found.attributes.get("op_name", "")) if found else "")
        if match:
            numbers[name] = int(match[1])
    return sorted(names, key=numbers.__getitem__) if len(set(numbers.values())) == len(names) else names


def _made(
    operation: Operation,
    values: Mapping[str, Value],
    graph: GrowingGraph,
    known: Mapping[str, Translator],
    folder: Path,
) -> dict[str, Value]:
    """What an operation makes, by name."""
    taken = [_taken(operation, name, values) for name in operation.operands]
    if operation.kind in _EDGES and (len(taken), len(operation.results)) != (_EDGES[operation.kind], 1):
        raise ConversionError(
            f"line {operation.line}: {operation.kind} has {len(taken)} operands and {len(operation.results)} results, "
            f"expected {_EDGES[operation.kind]} and 1"
        )
    if operation.kind == "variable":
        return {operation.results[0]: _variable(operation, graph, folder)}
    if operation.kind in _EDGES:
        return {operation.results[0]: taken[0]}
    op = Op(operation=operation, inputs=taken, graph=graph)
    try:
        answered = known[operation.kind](op)
    except (IndexError, KeyError, ValueError, OverflowError) as error:
        raise op.error(f"its operands and attributes are not what they must be: {error}") from error
    results: dict[str, Value] = {}
    made = [answered] if isinstance(answered, Value) else list(answered)
    for name, value, declared in zip(operation.results, made, operation.result_types, strict=False):
        _check(operation, value, declared)
        results[name] = value
    return results  # those that nobody asked for are left out


def _taken(operation: Operation, name: str, values: Mapping[str, Value]) -> Value:
    if name not in values:  # a result that its operation was not asked for, such as the indices of a pooling
        raise ConversionError(f"line {operation.line}: {operation.kind} takes {name}, which was not asked for")
    return values[name]


def _input(job: Job, name: str, number: int) -> Value:
    type_ = job.arguments[name]
    if None in type_.shape:
        raise ConversionError(f"input {number} has the type {type_}: a size is not known")
    dtype = of_mlir(type_.element)
    for operation in job.operations:
        declared = operation.attributes.get("data_type")
        if operation.kind == "input" and operation.operands == (name,) and isinstance(declared, int):
            dtype = of_number(declared)  # MLIR has no name for OneFlow's bool: it calls it si8
    return Value(
        name=f"INPUT_{number}",
        shape=onnx_ir.Shape(dim for dim in type_.shape if dim is not None),
        type=onnx_ir.TensorType(onnx_ir.DataType.from_numpy(dtype.numpy)),
    )


def _variable(operation: Operation, graph: GrowingGraph, folder: Path) -> Value:
    name = str(operation.attributes.get("op_name", ""))
    tensor, declared = read_state(folder, name), operation.result_types[0]
    if tensor.shape != declared.shape or tensor.dtype not in _alike(declared.element):
        raise ConversionError(
            f"state tensor '{name}' is {tensor.dtype} {list(tensor.shape)}, "
            f"but line {operation.line} of the graph expects {declared}",
            hint="the graph and its weights are of different models: save the graph again (flow.save)",
        )
    return graph.weight(name, tensor.load())


def _alike(element: str) -> set[DType]:
    dtype = of_mlir(element)
    return {dtype, DType.BOOL} if dtype is DType.INT8 else {dtype}


def _check(operation: Operation, value: Value, declared: TensorType) -> None:
    """Holds what a translator made to what OneFlow's graph says; fills in a shape that could not be inferred."""
    expected = [dim for dim in declared.shape if dim is not None]
    if value.shape is None:
        value.shape = onnx_ir.Shape(expected)
    elif list(value.shape.numpy()) != expected:
        raise _contradiction(operation, f"shape {list(value.shape.numpy())}", str(expected))
    if value.dtype is None or DType.from_onnx(int(value.dtype)) not in _alike(declared.element):
        raise _contradiction(operation, f"type {value.dtype}", declared.element)


def _contradiction(operation: Operation, found: str, expected: str) -> ConversionError:
    return ConversionError(
        f"line {operation.line}: the translation of {operation.kind} "
        f"'{operation.attributes.get('op_name', '')}' has the {found}, OneFlow's has {expected}",
        hint="the operation's attributes mean something that its translator does not know: report it",
    )
