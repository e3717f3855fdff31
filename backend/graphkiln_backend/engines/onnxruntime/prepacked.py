"""Weights that were repacked for kernels, where kernels can read them: at multiples of 64 bytes.

ONNX Runtime (1.31) writes what it repacked behind the tensor that it comes from, and aligns nothing below 1 MB. Its
kernels for AVX and AVX-512 read whole registers from aligned addresses: behind a matrix of 100x3, 1200 bytes, the
mapped copy ended the process with SIGSEGV. Such blobs are written once more, at the end of the file.
Source of the format, `KEY|OFFSET;LENGTH;CHECKSUM[|...]`: onnxruntime/core/framework/tensor_external_data_info.cc.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from graphkiln_backend.graph.lazy_module import LazyModule

if TYPE_CHECKING:
    import onnx
else:
    onnx = LazyModule("onnx")


_ALIGNMENT = 64
"""Bytes of the widest register, that of AVX-512."""
_PREFIX = "prepacked_"


def align_prepacked(graph: Path, weights: Path) -> None:
    """Moves repacked weights that are not aligned; both files are changed, or none.

    Args:
        graph: The graph, whose weights are in another file.
        weights: That file.

    Raises:
        OSError: A file cannot be read or written.
    """
    if not weights.exists():
        return
    model = onnx.load(str(graph), load_external_data=False)
    entries = list(_entries(model.graph))
    if all(_is_aligned(entry.value) for entry in entries):
        return
    with weights.open("r+b") as file:
        for entry in entries:
            entry.value = _aligned(entry.value, file)
    graph.write_bytes(model.SerializeToString())


def _entries(graph: onnx.GraphProto) -> Iterator[onnx.StringStringEntryProto]:
    for tensor in graph.initializer:
        yield from (entry for entry in tensor.external_data if entry.key.startswith(_PREFIX))
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                yield from _entries(inner)


def _is_aligned(value: str) -> bool:
    return all(int(blob.partition(";")[0]) % _ALIGNMENT == 0 for blob in value.split("|")[1:])


def _aligned(value: str, file: BinaryIO) -> str:
    key, *blobs = value.split("|")
    return "|".join([key, *(_moved(blob, file) for blob in blobs)])


def _moved(blob: str, file: BinaryIO) -> str:
    """A blob where it is, or as it is written at the end of the file."""
    offset, length, *rest = blob.split(";")
    if int(offset) % _ALIGNMENT == 0:
        return blob
    file.seek(int(offset))
    content = file.read(int(length))
    target = -(-file.seek(0, 2) // _ALIGNMENT) * _ALIGNMENT
    file.seek(target)
    file.write(content)
    return ";".join([str(target), length, *rest])
