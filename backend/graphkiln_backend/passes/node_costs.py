"""Statistics of a graph, and costs of its nodes for splitting the graph over devices."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir
from onnx_ir.passes.common import (
    InlinePass,
    LiftConstantsToInitializersPass,
    RemoveUnusedNodesPass,
    ShapeInferencePass,
    TopologicalSortPass,
)

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import LoweringError, ManifestError, RepositoryError
from graphkiln_backend.graph.graph_costs import GraphCosts, NodeCost
from graphkiln_backend.passes.constants import bring_to_readers, find_constant_nodes
from graphkiln_backend.passes.graph_file import load
from graphkiln_backend.repository.onnx_file import PRODUCTS
from graphkiln_backend.repository.openvino_ir import is_ir, read_ir

ALL_REDUCE = "AllReduce"  # graphkiln's own operator: the sum of a tensor over all shards of a stage
PARTIAL = "_partial"  # suffix of the partial sum that an `AllReduce` reads; the sum has the original name
# Operators that runtimes fuse into the preceding node: a cut before one would change the rounding. Source:
# ONNX Runtime, "Graph Optimizations in ONNX Runtime" (extended and layout optimizations).
_FUSING = frozenset(
    (
        *("Relu", "LeakyRelu", "PRelu", "Clip", "Elu", "Selu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Gelu"),
        *("Erf", "Mish", "Softplus", "Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Transpose", "Cast", "QuantizeLinear"),
        *("BatchNormalization", "LayerNormalization", "SimplifiedLayerNormalization", "InstanceNormalization"),
        ALL_REDUCE,
    )
)
_OPENING = frozenset(("DequantizeLinear", "Pad", "Transpose"))  # runtimes fuse these into the following node
# Operators that return sequences or optionals.
_NO_TENSORS = frozenset(
    (
        *("Optional", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert", "SequenceMap"),
        "SplitToSequence",
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Census:
    """Statistics of a graph.

    Attributes:
        operators: Operator type -> number of nodes, most frequent first.
        parameters: Number of elements of all weights.
        weight_bytes: Total size of the weights.
        precisions: Element type -> number of weight elements.
        flops: Floating-point operations of convolutions and matrix products for one sample (a multiply-add counts as
            two; dynamic dimensions count as 1). None if a shape is unknown, and for other formats than ONNX.
        opset: Version of the ONNX operator set; None for other formats.
        ir_version: Version of the file format.
    """

    operators: dict[str, int]
    parameters: int
    weight_bytes: int
    precisions: dict[str, int]
    flops: int | None
    opset: int | None
    ir_version: int


def census(graph_path: Path) -> Census:
    """Compute the statistics of a graph in ONNX or OpenVINO IR.

    Raises:
        RepositoryError: The file cannot be read.
        ManifestError: The graph is in OpenVINO IR, and Triton does not support an element type.
    """
    if is_ir(graph_path):
        ir = read_ir(graph_path)
        return Census(
            operators=dict(ir.operators),
            parameters=sum(ir.weights.values()),
            weight_bytes=ir.weight_bytes,
            precisions={_openvino_name(name): count for name, count in ir.weights.items()},
            flops=None,
            opset=None,
            ir_version=ir.version,
        )
    try:
        model = onnx_ir.load(graph_path)
        ShapeInferencePass()(model)
    except Exception as error:  # protobuf's and onnx_ir's own errors have no common base
        raise RepositoryError(f"{graph_path} is not an ONNX graph: {error}", hint="the file is damaged") from error
    weights = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    precisions: Counter[str] = Counter()
    for weight in weights:
        precisions[_name(weight.dtype)] += weight.size
    flops = [flops_of(node) for node in model.graph if node.op_type in PRODUCTS]
    operators = Counter(node.op_type if not node.domain else f"{node.domain}.{node.op_type}" for node in model.graph)
    return Census(
        operators=dict(operators.most_common()),
        parameters=sum(weight.size for weight in weights),
        weight_bytes=sum(weight.nbytes for weight in weights),
        precisions=dict(precisions.most_common()),
        flops=None if None in flops else sum(filter(None, flops)),
        opset=model.opset_imports.get("") or 0,
        ir_version=model.ir_version,
    )


def flops_of(node: onnx_ir.Node) -> int | None:
    """Return the floating-point operations of a product: output elements, times twice the length of each sum.

    Dynamic dimensions count as 1. None if a shape is unknown.
    """
    output, weight = node.outputs[0].shape, node.inputs[1].shape if node.inputs[1] is not None else None
    first = node.inputs[0].shape if node.inputs[0] is not None else None
    if output is None or weight is None or first is None:
        return None
    elements = _elements(output)
    if node.op_type == "Conv":
        return 2 * elements * _elements(weight, start=1)
    if node.op_type == "ConvTranspose":
        return 2 * _elements(first) * _elements(weight, start=1)
    transposed = node.op_type == "Gemm" and node.attributes.get_int("transA")
    summed = first[0] if transposed else first[-1]
    return 2 * elements * (summed if isinstance(summed, int) else 1)


def _elements(shape: onnx_ir.Shape, start: int = 0) -> int:
    return math.prod(dim if isinstance(dim, int) else 1 for dim in list(shape)[start:])


def _openvino_name(element: str) -> str:
    try:
        return str(DType.from_openvino(element))
    except ManifestError:
        return element.upper()


def _name(dtype: onnx_ir.DataType) -> str:
    try:
        return str(DType.from_onnx(int(dtype)))
    except ManifestError:
        return dtype.name


def load_for_splitting(graph_path: Path, *, weights: bool = True) -> onnx_ir.Model:
    """Load a graph, sort it topologically and infer shapes. No node is rewritten.

    Args:
        graph_path: The graph.
        weights: As for `graph_file.load`; costs do not depend on them.

    Raises:
        LoweringError: The graph cannot be read, or has an optional input (a weight that a request may replace).
    """
    try:
        model = load(graph_path, weights=weights)
        InlinePass()(model)
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        RemoveUnusedNodesPass()(model)
        TopologicalSortPass()(model)
        bring_to_readers(model)
        ShapeInferencePass()(model)
        _name_nodes(model)
    except Exception as error:  # protobuf's and onnx_ir's own errors have no common base
        raise LoweringError(f"cannot split {graph_path}", attempts=(str(error),)) from error
    defaults = [str(value.name) for value in model.graph.inputs if value.name in model.graph.initializers]
    if defaults:
        raise LoweringError(
            f"cannot split {graph_path}",
            attempts=(f"a request may replace the weight '{defaults[0]}'",),
            hint="remove it from the graph's inputs, or remove `parallel` from the settings",
        )
    return model


def _name_nodes(model: onnx_ir.Model) -> None:
    """Make node names of the main graph unique; they are the keys of costs and times."""
    taken = set[str]()
    for position, node in enumerate(model.graph):
        node.name = node.name if node.name and node.name not in taken else f"{node.name or node.op_type}#{position}"
        taken.add(node.name)


def bind_sizes(model: onnx_ir.Model, shapes: Mapping[str, Sequence[int]]) -> None:
    """Replace dynamic sizes with those of a request, in place, to count costs. Do not save the graph afterwards.

    Args:
        model: The graph.
        shapes: Input name -> shape.
    """
    for value in model.graph.inputs:
        value.shape = onnx_ir.Shape(shapes[str(value.name)]) if value.name in shapes else value.shape
    varying = [value for node in model.graph for value in node.outputs if value.shape and value.shape.is_dynamic()]
    before = [value.shape for value in varying]
    for value in varying:
        value.shape = None
    ShapeInferencePass()(model)
    for value, shape in zip(varying, before, strict=True):
        value.shape = shape if value.shape is None else value.shape  # keep a partial shape if inference adds nothing


def bind_shard(shard: onnx_ir.Model, whole: onnx_ir.Model) -> None:
    """Replace dynamic sizes of a shard with those of the whole graph. Dimensions that are cut are always static.

    Args:
        shard: A shard, with the value names of the whole graph.
        whole: The whole graph, after `bind_sizes`.
    """
    sizes = {value.name: value.shape for value in _values(whole)}
    for value in _values(shard):
        known = sizes.get(str(value.name).removesuffix(PARTIAL))
        if value.shape is not None and known is not None and len(known) == len(value.shape):
            pairs = zip(value.shape, known, strict=True)
            value.shape = onnx_ir.Shape(own if isinstance(own, int) else size for own, size in pairs)


def _values(model: onnx_ir.Model) -> Iterator[onnx_ir.Value]:
    yield from model.graph.inputs
    yield from (value for node in model.graph for value in node.outputs)


def count_costs(model: onnx_ir.Model, local: frozenset[str] = frozenset()) -> GraphCosts:
    """Count the costs of a graph from `load_for_splitting`.

    Args:
        model: The graph.
        local: See `GraphCosts.local`.
    """
    constant = frozenset(find_constant_nodes(model))
    kept = (
        str(value.name)
        for node in model.graph
        for value in node.outputs
        if node in constant or not _can_be_handed(value)
    )
    return GraphCosts(
        nodes=tuple(_cost(node, constant) for node in model.graph),
        inputs={str(value.name): _sample_bytes(value) for value in model.graph.inputs},
        outputs=frozenset(str(value.name) for value in model.graph.outputs),
        local=local.union(kept),
    )


def _can_be_handed(value: onnx_ir.Value) -> bool:
    """Return True for tensors that can be sent between stages; sequences and optionals cannot.

    Shape inference reports some sequences as tensors, so the producing operator is checked as well.
    """
    node = value.producer()
    if (
        not isinstance(value.type, onnx_ir.TensorType)
        or not _is_carried(value.type.dtype)
        or (node and node.op_type in _NO_TENSORS)
    ):
        return False
    return all(map(_can_be_handed, _same_kind(node, value.index() or 0))) if node else True


def _is_carried(dtype: onnx_ir.DataType) -> bool:
    """Return True for element types that NumPy supports, which excludes 4- and 8-bit floats."""
    try:
        DType.from_onnx(int(dtype))
    except ManifestError:
        return False
    return True


def _same_kind(node: onnx_ir.Node, index: int) -> Iterator[onnx_ir.Value]:
    """Yield the values that an output of a node is taken from, for operators that pass values on."""
    if node.op_type == "Identity":
        yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        if attribute.type == onnx_ir.AttributeType.GRAPH and node.op_type in ("If", "Loop"):
            place = index + (node.op_type == "Loop")  # the first output of a loop body is the condition
            yield from attribute.as_graph().outputs[place : place + 1]


def _cost(node: onnx_ir.Node, constant: Collection[onnx_ir.Node]) -> NodeCost:
    """Count the costs of a node; constant nodes cost nothing, since they are computed at load."""
    read = list(dict.fromkeys(values_read(node)))
    tensors = {str(value.name): value.const_value for value in read if value.is_initializer()}
    weights = {name: tensor.nbytes for name, tensor in tensors.items() if tensor is not None}
    sizes = {str(value.name): 0 if node in constant else _sample_bytes(value) for value in node.outputs if value.name}
    return NodeCost(
        name=str(node.name),
        op_type=node.op_type,
        flops=(flops_of(node) or 0) if node.op_type in PRODUCTS else 0,
        weights=weights,
        reads=tuple(str(value.name) for value in read if value.name not in weights),
        writes=sizes,
        fuses=node.op_type in _FUSING,
        opens=node.op_type in _OPENING,
    )


def values_read(node: onnx_ir.Node) -> Iterator[onnx_ir.Value]:
    """Yield the values of the main graph that a node or its subgraphs read."""
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        if attribute.type == onnx_ir.AttributeType.GRAPH:
            yield from _captured(attribute.as_graph())


def _captured(graph: onnx_ir.Graph) -> Iterator[onnx_ir.Value]:
    """Yield the outer values that a subgraph captures."""
    own = {*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)}
    inner = [value for node in graph for value in values_read(node)]
    yield from (value for value in (*inner, *graph.outputs) if value not in own)


def _sample_bytes(value: onnx_ir.Value) -> int:
    """Return the bytes of an activation for one sample; 0 if its shape or type is unknown."""
    if value.shape is None or value.dtype is None:
        return 0
    elements = math.prod(dim if isinstance(dim, int) else 1 for dim in value.shape)
    return math.ceil(elements * value.dtype.itemsize) if value.dtype != onnx_ir.DataType.STRING else 0
