"""The tensors of a graph, and the files beside it that hold some of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.lazy_module import LazyModule

if TYPE_CHECKING:
    import onnx
else:
    onnx = LazyModule("onnx")


def tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Every tensor in a graph: weights, attributes, and those of its subgraphs."""
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
    """The files that hold weights, as the graph names them."""
    return {
        entry.value
        for tensor in tensors(graph)
        if tensor.data_location == onnx.TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }


def check_external_data(graph: onnx.GraphProto, path: Path) -> None:
    """Checks that a graph's weights lie in its folder.

    Args:
        graph: The graph.
        path: Its file.

    Raises:
        RepositoryError: They do not.
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
