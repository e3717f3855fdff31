"""Graphs from files and into files, weights included."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.passes.base import weight_bytes
from graphkiln_backend.repository.onnx_file import external_locations

# Makes the sparse constants of a file dense, which onnx_ir (0.2) drops or refuses; ONNX Runtime does so itself.

Part = onnx.GraphProto | onnx.FunctionProto


def make_dense(model: onnx.ModelProto) -> None:
    """Replace every sparse initializer and sparse `Constant`, also those in subgraphs and functions, in place."""
    for part in _parts(model):
        if isinstance(part, onnx.GraphProto):
            part.initializer.extend(_dense(sparse) for sparse in part.sparse_initializer)
            del part.sparse_initializer[:]
        for node in part.node:
            for attribute in node.attribute:
                if node.op_type == "Constant" and attribute.name == "sparse_value":
                    tensor = _dense(attribute.sparse_tensor)
                    attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))


def _parts(model: onnx.ModelProto) -> Iterator[Part]:
    parts: list[Part] = [model.graph, *model.functions]
    for part in parts:  # and the graphs inside of it
        yield part
        for attribute in (attribute for node in part.node for attribute in node.attribute):
            parts += [attribute.g, *attribute.graphs] if attribute.HasField("g") else attribute.graphs


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    values = onnx.numpy_helper.to_array(sparse.values)
    indices = onnx.numpy_helper.to_array(sparse.indices)
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    if indices.ndim == 1:
        dense.reshape(-1)[indices] = values
    else:
        dense[tuple(indices.T)] = values
    return onnx.numpy_helper.from_array(dense, sparse.values.name)


# ONNX operator set that converters write. Read by every ONNX Runtime since 1.14, hence by every supported Triton
# release.
OPSET = 18
_FREE_INITIALIZERS = 4  # source: ONNX, "IR version 4"
_EXTERNAL_DATA_FROM_BYTES = 2**30  # A protobuf message ends at 2 GiB: larger weights go into a file of their own

_LINKS = "links that lead out of its folder are not followed: cp -rL FOLDER COPY makes files of them"


def load(path: Path, *, weights: bool = True) -> onnx_ir.Model:
    """Read a graph with its weights, so that it no longer depends on their files.

    Up to IR version 3 every initializer had to be an input as well: such a graph is read as one of version 4, where an
    input is what a request brings.

    Args:
        path: The file.
        weights: Whether weights in other files are read, too; else they are when somebody asks for one.

    Raises:
        RepositoryError: It is not a valid graph, or its weights cannot be read.
    """
    proto = onnx.load(path, load_external_data=False)
    make_dense(proto)
    model = from_proto(proto, path)
    onnx_ir.external_data.set_base_dir(model.graph, path.parent)
    if weights:
        _load_weights(model, proto, path)
    if model.ir_version < _FREE_INITIALIZERS:
        model.ir_version = _FREE_INITIALIZERS
        inputs = model.graph.inputs
        inputs[:] = [value for value in inputs if value.name not in model.graph.initializers]
    return tidied(model)


def _load_weights(model: onnx_ir.Model, proto: onnx.ModelProto, path: Path) -> None:
    try:
        onnx_ir.external_data.load_to_model(model)
    except (OSError, ValueError) as error:
        linked = any((path.parent / location).is_symlink() for location in external_locations(proto.graph))
        raise RepositoryError(
            f"the weights of {path} cannot be read: {error}", hint=_LINKS if linked else ""
        ) from error


def from_proto(proto: onnx.ModelProto, path: Path) -> onnx_ir.Model:
    """Convert a graph to onnx_ir.

    Args:
        proto: The graph.
        path: Its file.

    Raises:
        RepositoryError: It is none: a value is computed twice, or the like.
    """
    try:
        return onnx_ir.from_proto(proto)
    except onnx_ir.serde.SerdeError as error:
        raise RepositoryError(f"{path} is not a valid graph: {_first_cause(error)}", hint="export it again") from error


def _first_cause(error: BaseException) -> BaseException:
    return _first_cause(error.__cause__) if error.__cause__ else error


def tidied(model: onnx_ir.Model) -> onnx_ir.Model:
    """The graph, in place, without what runtimes let pass and ONNX's checker does not.

    That is: no name, sizes of -1, by which older exporters say that a dimension varies, and an output listed twice.
    """
    graph = model.graph
    graph.name = graph.name or "graph"
    for value in (*graph.inputs, *graph.outputs):
        if value.shape is not None and any(isinstance(dim, int) and dim < 0 for dim in value.shape):
            value.shape = onnx_ir.Shape(None if isinstance(dim, int) and dim < 0 else dim for dim in value.shape)
    _list_outputs_once(graph)
    return model


def _list_outputs_once(graph: onnx_ir.Graph) -> None:
    once = list({value.name: value for value in graph.outputs}.values())
    if len(once) < len(graph.outputs):
        graph.outputs[:] = once


def save(model: onnx_ir.Model, target: Path) -> None:
    """Write a graph; weights above 1 GiB go into a file beside it, named after it."""
    onnx_ir.external_data.load_to_model(model)  # else the copy would look for its weights where the graph has them
    external = f"{target.name}.data" if weight_bytes(model) > _EXTERNAL_DATA_FROM_BYTES else None
    onnx_ir.save(model, target, external_data=external)
