"""Read signature, precision, weights and hash of ONNX files without a runtime; cached until the file changes."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ManifestError, RepositoryError
from graphkiln_backend.graph.files import GRAPH_LIMIT, UnusableFile, read_bytes, stamp_of
from graphkiln_backend.graph.modules import LazyModule
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import ANY_RANK, Dim, Signature, TensorSpec, counted_dim, free_dim

if TYPE_CHECKING:
    import onnx

    from graphkiln_backend.repository import row_mixing, tensor_outputs
    from graphkiln_backend.repository.tensor_outputs import ReplacedOutput
else:
    onnx = LazyModule("onnx")
    # Imported lazily: graphs with cached facts are not read.
    row_mixing = LazyModule("graphkiln_backend.repository.row_mixing")
    tensor_outputs = LazyModule("graphkiln_backend.repository.tensor_outputs")

_MOST_FILES = 64
_MOST_GRAPHS = 4
# Tensors up to this size are kept in memory: shapes and other small constants are read, weights are not.
_KEPT_BYTES = 1 << 16
_CONTENTS = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data")


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphFacts:
    """Cached facts of a graph with tensor outputs only and all its weights in the file.

    Attributes:
        signature: Result of `read_signature`.
        precision: Result of `read_precision`.
    """

    signature: Signature
    precision: Precision


# Stamp, SHA-256 and facts by path, from the artifact cache. Parsing a graph of 100 MB takes 0.2 s, and importing onnx
# 40 ms and 15 MB, in each instance process.
_known: dict[Path, tuple[tuple[int, ...], str, GraphFacts | None]] = {}


def remember_facts(path: Path, stamp: tuple[int, ...], sha256: str, facts: GraphFacts | None) -> None:
    """Remember facts of a file until it changes.

    Args:
        path: The file.
        stamp: Result of `stamp_of` before the file was read.
        sha256: SHA-256 of its content, hexadecimal.
        facts: The facts; None if only the hash is known.
    """
    while len(_known) >= _MOST_FILES:
        _known.pop(next(iter(_known)))
    _known[path] = stamp, sha256, facts


def known_facts(path: Path) -> GraphFacts | None:
    """Return remembered facts of a file, or None."""
    stamp, _, facts = _known.get(path, ((), "", None))
    return facts if facts and stamp == stamp_of(path) else None


def known_sha256(path: Path) -> str:
    """Return the remembered hash of a file, or an empty string."""
    stamp, sha256, _ = _known.get(path, ((), "", None))
    return sha256 if sha256 and stamp == stamp_of(path) else ""


def read_graph(path: Path) -> onnx.ModelProto:
    """Return a copy of a graph without the contents of large tensors; a file is parsed again only if it has changed.

    Raises:
        RepositoryError: The file is damaged.
    """
    return _copy(_read(path)[0])


def graph_sha256(path: Path) -> str:
    """SHA-256 of a graph's file, hexadecimal.

    Raises:
        RepositoryError: The file is damaged.
    """
    return known_sha256(path) or _read(path)[1]


def read_whole_graph(path: Path) -> onnx.ModelProto:
    """Read a graph with its weights, except those in other files.

    Raises:
        RepositoryError: The file is damaged.
    """
    return _parse(path)[0]


def _read(path: Path) -> tuple[onnx.ModelProto, str]:
    stamp = stamp_of(path)
    return _read_once(path, stamp) if stamp else _parse(path)  # which raises the error of a missing file


@lru_cache(maxsize=_MOST_GRAPHS)
def _read_once(path: Path, _: tuple[int, ...]) -> tuple[onnx.ModelProto, str]:
    model, sha256 = _parse(path)
    for tensor in tensors(model.graph):
        if tensor.ByteSize() > _KEPT_BYTES:
            for content in _CONTENTS:
                tensor.ClearField(content)
    return _copy(model), sha256  # a copy gives the memory of the weights back


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def _parse(path: Path) -> tuple[onnx.ModelProto, str]:
    try:
        content = read_bytes(path, GRAPH_LIMIT)
        return onnx.load_model_from_string(content), known_sha256(path) or hashlib.sha256(content).hexdigest()
    except UnusableFile as error:
        raise RepositoryError(f"{path} is not an ONNX graph: {error}") from error
    except (DecodeError, OSError, MemoryError) as error:
        raise RepositoryError(
            f"{path} is not an ONNX graph: {error}", hint="the file is damaged or cut short: copy it again"
        ) from error


def opset_of(model: onnx.ModelProto) -> int:
    """Return the version of the domain ai.onnx that a graph uses; 0 if it declares none."""
    return max((opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), default=0)


def tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Yield every tensor in a graph: weights, attributes, and those of its subgraphs."""
    graphs = [graph]
    while graphs:
        current = graphs.pop()
        yield from current.initializer
        for sparse in current.sparse_initializer:
            yield from (sparse.values, sparse.indices)
        for attribute in (attribute for node in current.node for attribute in node.attribute):
            yield from (attribute.t, *attribute.tensors)
            graphs += [attribute.g, *attribute.graphs] if attribute.HasField("g") else [*attribute.graphs]


def external_locations(graph: onnx.GraphProto) -> set[str]:
    """Return the files with weights, relative to the graph."""
    return {
        entry.value
        for tensor in tensors(graph)
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }


def check_external_data(graph: onnx.GraphProto, path: Path) -> None:
    """Check that the files of a graph's weights exist and are in its folder.

    Args:
        graph: The graph.
        path: Its file.

    Raises:
        RepositoryError: One is missing, or its path leads out of the folder.
    """
    for location in external_locations(graph):
        if Path(location).is_absolute() or ".." in Path(location).parts:
            raise RepositoryError(
                f"{path} refers to weights in '{location}', which leads out of the version folder",
                hint="put the weights beside the graph",
            )
        if not (path.parent / location).is_file():
            raise RepositoryError(
                f"{path} refers to weights in '{location}', which is missing", hint=f"copy it into {path.parent}"
            )


_PROTOBUF_LIMIT = 1 << 30  # the limit of protobuf messages is 2 GiB
_DEFAULTS_SINCE = 4  # IR version; before, all weights were also inputs, which are not optional inputs of requests
_MOST_DIMENSIONS = 32  # of a numpy array
_QUANTIZED_OPERATORS = {"QuantizeLinear", "QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger"}
_KINDS = {
    "sequence_type": "a sequence of tensors",
    "map_type": "a map",
    "optional_type": "an optional value",
    "sparse_tensor_type": "a sparse tensor",
    "opaque_type": "an opaque value",
}
# Operators whose output size depends on values, such as the number of detected boxes.
_COUNTING = {"NonMaxSuppression", "NonZero", "Unique", "Compress", "StringSplit"}
# Operators with nearly all of the arithmetic.
PRODUCTS = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm"})
# Source: `onnx.TensorProto.DataType`.
_PRECISIONS = {"FLOAT": Precision.FP32, "FLOAT16": Precision.FP16, "BFLOAT16": Precision.BF16}


def read_signature(path: Path) -> Signature:
    """Read inputs and outputs of a graph, in its order; inputs with a default in the graph are optional.

    Outputs that are not tensors are replaced by the served tensors, see `tensor_outputs`. The first dimension of an
    output is not a batch if the graph is known to mix rows, see `read_mixing`.

    Raises:
        RepositoryError: The file is damaged, an input or every output is not a tensor, or weights in another file are
            missing or outside the graph's folder.
        ManifestError: Triton does not support an element type.
    """
    if facts := known_facts(path):
        return facts.signature
    model = read_graph(path)
    tensor_outputs.with_tensor_outputs(model)
    graph = model.graph
    if not graph.output and not graph.node:
        raise RepositoryError(f"{path} holds no graph", hint="the file is damaged or cut short: copy it again")
    if not graph.output:
        raise RepositoryError(f"{path} returns nothing: its graph has no outputs", hint="export it with its outputs")
    check_external_data(graph, path)
    initialized = {tensor.name for tensor in graph.initializer}
    defaults = [value for value in graph.input if value.name in initialized]
    inputs = tuple(_spec(value, graph, path) for value in graph.input if value.name not in initialized)
    stated = {value.name for value in graph.output if value.type.tensor_type.HasField("shape")}
    listed = {value.name: value for value in _with_shapes(model)}  # an output that is listed twice is served once
    outputs = tuple(_spec(value, graph, path) for value in listed.values())
    outputs = tuple(spec if spec.name in stated else _counted(spec, ()) for spec in outputs)
    outputs = _with_rows(model, inputs, outputs)
    outputs = tuple(_counted(spec, inputs) for spec in outputs) if _counts(model) else outputs
    if _find_mixing(model, inputs, outputs):
        outputs = tuple(_counted(spec, ()) for spec in outputs)
    return Signature(
        inputs=inputs,
        outputs=outputs,
        optional_inputs=tuple(_spec(value, graph, path) for value in defaults if model.ir_version >= _DEFAULTS_SINCE),
    )


def read_mixing(path: Path) -> str:
    """Name a node that mixes rows although all first dimensions are dynamic; empty if none is found.

    Raises:
        RepositoryError: The file is damaged, or an input is not a tensor.
        ManifestError: Triton does not support an element type.
    """
    model = read_graph(path)
    tensor_outputs.with_tensor_outputs(model)
    given = {tensor.name for tensor in model.graph.initializer}
    inputs = tuple(_spec(value, model.graph, path) for value in model.graph.input if value.name not in given)
    return _find_mixing(model, inputs, tuple(_spec(value, model.graph, path) for value in model.graph.output))


def keep_inputs(path: Path, names: Collection[str]) -> None:
    """Remove all other inputs from a graph's file, in place.

    Args:
        path: The graph. Weights in other files are not changed.
        names: Names of the inputs to keep.
    """
    model = onnx.load(path, load_external_data=False)
    if all(value.name in names for value in model.graph.input):
        return
    kept = [value for value in model.graph.input if value.name in names]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    path.write_bytes(model.SerializeToString())


def read_precision(path: Path) -> Precision:
    """Return the precision of most weights: fp32, fp16, bf16, or int8 for quantized graphs.

    Raises:
        RepositoryError: The file is damaged.
    """
    if facts := known_facts(path):
        return facts.precision
    graph = read_graph(path).graph
    if any(node.op_type in _QUANTIZED_OPERATORS for node in graph.node):
        return Precision.INT8
    elements: Counter[Precision] = Counter()
    for tensor in graph.initializer:
        if precision := _PRECISIONS.get(onnx.TensorProto.DataType.Name(tensor.data_type)):
            elements[precision] += math.prod(tensor.dims)
    return elements.most_common(1)[0][0] if elements else Precision.FP32


def count_products(path: Path) -> int:
    """Count the convolutions and matrix products in a graph, without its subgraphs.

    Raises:
        RepositoryError: The file is damaged.
    """
    return sum(node.op_type in PRODUCTS for node in read_graph(path).graph.node)


def read_replaced_outputs(path: Path) -> tuple[ReplacedOutput, ...]:
    """Find outputs that are not tensors, and the tensors that replace them.

    Raises:
        RepositoryError: The file is damaged.
    """
    return () if known_facts(path) else tensor_outputs.find_replaced(read_graph(path).graph)


def read_facts(path: Path) -> GraphFacts | None:
    """Read the facts to remember; None if other files hold weights, or an output is not a tensor.

    Raises:
        RepositoryError: As `read_signature`.
        ManifestError: As `read_signature`.
    """
    if external_files(path) or read_replaced_outputs(path):
        return None
    return GraphFacts(signature=read_signature(path), precision=read_precision(path))


def save_with_tensor_outputs(path: Path, target: Path) -> None:
    """Write a graph with tensor outputs only, with weights inside or in a file beside it.

    Raises:
        RepositoryError: The file is damaged.
    """
    model = read_whole_graph(path)
    onnx.external_data_helper.load_external_data_for_model(model, str(path.parent))
    tensor_outputs.with_tensor_outputs(model)
    external = model.ByteSize() > _PROTOBUF_LIMIT
    onnx.save(model, target, save_as_external_data=external, location=f"{target.name}.data" if external else None)


def external_files(path: Path) -> list[str]:
    """Return the files of a graph's weights, relative to its folder; they may be missing.

    Raises:
        RepositoryError: The file is not a graph.
    """
    return sorted(external_locations(read_graph(path).graph))


def _with_shapes(model: onnx.ModelProto) -> Sequence[onnx.ValueInfoProto]:
    """Return the outputs of a graph; missing shapes are inferred if possible."""
    outputs = model.graph.output
    if all(value.type.tensor_type.HasField("shape") for value in outputs if value.type.HasField("tensor_type")):
        return outputs
    try:
        return onnx.shape_inference.infer_shapes(model).graph.output
    except (onnx.shape_inference.InferenceError, ValueError):  # larger than a protobuf message may be, or invalid
        return outputs


def _counts(model: onnx.ModelProto) -> bool:
    """Return true if the size of an output depends on values."""
    operators = {node.op_type for node in model.graph.node}
    operators |= {node.op_type for function in model.functions for node in function.node}
    return not operators.isdisjoint(_COUNTING)


def _counted(spec: TensorSpec, inputs: Sequence[TensorSpec]) -> TensorSpec:
    """Mark the first dimension of an output as data-dependent, unless an input's has the same name."""
    if not spec.varies or any(spec.shape[0] in other.shape[:1] for other in inputs):
        return spec
    return replace(spec, shape=(counted_dim(spec.name, 0), *spec.shape[1:]))


def _with_rows(
    model: onnx.ModelProto, inputs: Sequence[TensorSpec], outputs: tuple[TensorSpec, ...]
) -> tuple[TensorSpec, ...]:
    """Correct outputs declared with one row that have one per sample, such as LightGBM's labels by onnxmltools."""
    one = [spec.name for spec in outputs if spec.shape[:1] == (1,)]
    if not one or not inputs or not all(spec.varies for spec in inputs):
        return outputs
    rows = row_mixing.find_row_outputs(model)
    return tuple(
        replace(spec, shape=(inputs[0].shape[0], *spec.shape[1:])) if spec.name in one and spec.name in rows else spec
        for spec in outputs
    )


def _find_mixing(model: onnx.ModelProto, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str:
    varies = all(spec.varies for spec in (*inputs, *outputs))
    return row_mixing.find_mixing(model) if varies and inputs else ""


def _spec(value: onnx.ValueInfoProto, graph: onnx.GraphProto, path: Path) -> TensorSpec:
    kind = value.type.WhichOneof("value")
    if kind != "tensor_type":
        raise RepositoryError(
            f"{path}: '{value.name}' is {_KINDS.get(kind or '', 'a value without a type')}, and Triton's protocol has "
            "tensors only",
            hint=_hint_for(kind, graph),
        )
    tensor = value.type.tensor_type
    if len(tensor.shape.dim) > _MOST_DIMENSIONS:
        raise RepositoryError(
            f"{path}: '{value.name}' has {len(tensor.shape.dim)} dimensions, and arrays have {_MOST_DIMENSIONS} at most"
        )
    try:
        dtype = DType.from_onnx(tensor.elem_type)
    except ManifestError as error:
        raise ManifestError(f"'{value.name}': {error.message}", hint=error.hint) from None
    shape = tuple(_dim(dim, value.name, axis) for axis, dim in enumerate(tensor.shape.dim))
    return TensorSpec(name=value.name, dtype=dtype, shape=shape if tensor.HasField("shape") else (ANY_RANK,))


def _hint_for(kind: str | None, graph: onnx.GraphProto) -> str:
    """Return a hint for an input or output that is not a tensor."""
    if any(node.op_type == "ZipMap" for node in graph.node):
        return "export without ZipMap (skl2onnx: options={'zipmap': False})"
    ways = {
        "sequence_type": "join its tensors in the graph (ConcatFromSequence), or name each of them (SequenceAt)",
        "optional_type": "take the value out in the graph (OptionalGetElement), or leave the tensor out",
        "sparse_tensor_type": "make it dense in the graph",
    }
    return ways.get(kind or "", "export the graph with tensors at its border")


def _dim(dim: onnx.TensorShapeProto.Dimension, tensor: str, axis: int) -> Dim:
    if dim.WhichOneof("value") == "dim_value" and dim.dim_value >= 0:  # older exporters write -1 for dynamic sizes
        return dim.dim_value
    return dim.dim_param or free_dim(tensor, axis)
