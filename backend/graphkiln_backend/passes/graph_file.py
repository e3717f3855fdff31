"""Reading and writing of ONNX files, including external weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.passes.base import weight_bytes
from graphkiln_backend.repository.onnx_file import external_locations

# onnx_ir 0.2 drops or rejects sparse constants; ONNX Runtime makes them dense, too.

Part = onnx.GraphProto | onnx.FunctionProto
# Operator set that converters write: supported by ONNX Runtime 1.14 and later, and so by all supported Triton releases.
OPSET = 18
_ONNX = ("", "ai.onnx", "ai.onnx.ml")  # their versions differ, so a missing one is not guessed
_ONLY_VERSION = 1  # of all other domains
_FREE_INITIALIZERS = 4  # source: ONNX, "IR version 4"
_EXTERNAL_DATA_FROM_BYTES = 2**30  # protobuf messages are limited to 2 GiB
# onnx_ir refuses both: they may lead to a file that the author of the model should not see.
_LINKS = "links that leave the model's folder, and hard links, are not followed: copy the folder (cp -rL FOLDER COPY)"


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


def load(path: Path, *, weights: bool = True) -> onnx_ir.Model:
    """Read a graph.

    Up to IR version 3 every initializer is also an input. Such a graph is converted to version 4, where only tensors of
    a request are inputs.

    Args:
        path: The ONNX file.
        weights: Read external weights now; otherwise on first access.

    Raises:
        RepositoryError: The file is not a valid graph, or its weights cannot be read.
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
        files = [path.parent / location for location in external_locations(proto.graph)]
        linked = any(file.is_symlink() or (file.exists() and file.stat().st_nlink > 1) for file in files)
        hint = _LINKS if linked else ""
        raise RepositoryError(f"the weights of {path} cannot be read: {error}", hint=hint) from error


def from_proto(proto: onnx.ModelProto, path: Path) -> onnx_ir.Model:
    """Convert a graph to onnx_ir.

    Args:
        proto: The graph.
        path: File of the graph, for error messages.

    Raises:
        RepositoryError: The graph is invalid, for example a value is defined twice.
    """
    try:
        return onnx_ir.from_proto(proto)
    except onnx_ir.serde.SerdeError as error:
        raise RepositoryError(f"{path} is not a valid graph: {_first_cause(error)}", hint="export it again") from error


def _first_cause(error: BaseException) -> BaseException:
    return _first_cause(error.__cause__) if error.__cause__ else error


def tidied(model: onnx_ir.Model) -> onnx_ir.Model:
    """Repair, in place, faults that runtimes accept but ONNX's checker rejects.

    These are a missing graph name, dimensions of -1 (dynamic in older exporters), duplicate outputs, and operators of a
    domain that is not imported (NNCF forgets com.microsoft).
    """
    graph = model.graph
    parts: list[onnx_ir.Graph | onnx_ir.Function] = [graph, *model.functions.values()]
    for part in parts:
        for node in part.all_nodes():
            if node.domain not in _ONNX:
                part.opset_imports.setdefault(node.domain, _ONLY_VERSION)
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
    """Write a graph; weights above 1 GiB go into `<name>.data` beside it."""
    onnx_ir.external_data.load_to_model(model)  # external paths are relative to the original file
    external = f"{target.name}.data" if weight_bytes(model) > _EXTERNAL_DATA_FROM_BYTES else None
    onnx_ir.save(model, target, external_data=external)
