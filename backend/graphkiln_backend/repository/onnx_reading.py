"""Reads an ONNX file once, however many ask for what it says.

A start asks for a graph's signature, precision and outputs, and for its hash: each would read and parse 100 MB again
for ResNet-50. What is kept is the graph without its weights, as long as the file is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.files import GRAPH_LIMIT, UnusableFile, read_bytes, stamp_of
from graphkiln_backend.graph.lazy_module import LazyModule
from graphkiln_backend.repository.graph_facts import known_sha256

if TYPE_CHECKING:
    import onnx
else:
    onnx = LazyModule("onnx")

_KEPT_BYTES = 1 << 16
"""Of a tensor: shapes and other small constants are read, weights are not."""
_CONTENTS = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data")
_MOST_GRAPHS = 4


def read_graph(path: Path) -> onnx.ModelProto:
    """A graph without the contents of large tensors; the caller's own.

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
    """A graph with its weights, but for those in other files.

    Raises:
        RepositoryError: The file is damaged.
    """
    return _parse(path)[0]


def _read(path: Path) -> tuple[onnx.ModelProto, str]:
    stamp = stamp_of(path)
    return _read_once(path, stamp) if stamp else _parse(path)  # which says in words why it cannot be read


@lru_cache(maxsize=_MOST_GRAPHS)
def _read_once(path: Path, _: tuple[int, ...]) -> tuple[onnx.ModelProto, str]:
    """As `_parse`, without the weights: their memory is given back."""
    model, sha256 = _parse(path)
    for tensor in _tensors(model.graph):
        if tensor.ByteSize() > _KEPT_BYTES:
            _strip(tensor)
    return _copy(model), sha256


def _strip(tensor: onnx.TensorProto) -> None:
    for content in _CONTENTS:
        tensor.ClearField(content)


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def _parse(path: Path) -> tuple[onnx.ModelProto, str]:
    """A graph and the SHA-256 of its file.

    Raises:
        RepositoryError: The file is damaged.
    """
    try:
        content = read_bytes(path, GRAPH_LIMIT)
        return onnx.load_model_from_string(content), known_sha256(path) or hashlib.sha256(content).hexdigest()
    except UnusableFile as error:
        raise RepositoryError(f"{path} is not an ONNX graph: {error}") from error
    except (DecodeError, OSError, MemoryError) as error:
        raise RepositoryError(
            f"{path} is not an ONNX graph: {error}", hint="the file is damaged or cut short: copy it again"
        ) from error


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """The weights of a graph, and its constants."""
    yield from graph.initializer
    attributes = (attribute for node in graph.node for attribute in node.attribute)
    yield from (attribute.t for attribute in attributes if attribute.HasField("t"))


def opset_of(model: onnx.ModelProto) -> int:
    """The version of ONNX's own operators that a graph is written in; 0 where it says none."""
    return max((opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), default=0)
