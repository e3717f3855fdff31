"""Reads the state tensors of a `flow.save` folder: a folder for each, bytes in `out`, type and shape in `meta`.

Tensors that the graph does not use (`num_batches_tracked`) are among them: OneFlow saves the whole state.

Source: OneFlow 0.9.0, `framework/check_point_v2.py`, `core/framework/variable_meta_info.proto`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.files import MIB, read_text
from graphkiln_converters.oneflow.elements import BY_PROTO_NAME

_DATA, _META = "out", "meta"
_EAGER = "FreeEagerTensor"
_UNSAVED_HINT = (
    "flow.save writes parameters and buffers only, and this tensor is neither: register_buffer() it in its module "
    "(LeViT keeps one in the attribute 'ab'), then trace and save the graph again"
)
_HINT = "the folder is incomplete: save the graph again (flow.save), or copy it again"


@dataclass(frozen=True, kw_only=True, slots=True)
class StateTensor:
    """A tensor of the state.

    Attributes:
        name: OneFlow's name of it, and that of its folder.
        dtype: Element type.
        shape: Sizes.
        path: The file of its elements, little-endian and contiguous.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    path: Path

    def load(self) -> AnyArray:
        """The elements: a read-only memory map of the file, not a copy."""
        if 0 in self.shape:
            return np.zeros(self.shape, self.dtype.numpy)
        array: AnyArray = np.memmap(self.path, self.dtype.numpy, mode="r", shape=self.shape)
        return array


def read_state(folder: Path, name: str) -> StateTensor:
    """Finds a tensor and checks its files.

    Args:
        folder: What `flow.save` wrote.
        name: Name of the tensor.

    Raises:
        ConversionError: A file is missing, unreadable, unknown, too short or too long.
    """
    if Path(name).name != name or name in {".", ".."}:
        raise ConversionError(f"state tensor '{name}': the name leads out of {folder}", hint=_HINT)
    if not name.isprintable():
        raise ConversionError(f"state tensor {name!r}: the name holds control characters", hint=_HINT)
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
            f"state tensor '{name}': {path} names no data_type", hint=f"known: {', '.join(BY_PROTO_NAME)}"
        )
    shape = tuple(int(dim) for dim in meta.shape.dim)
    if any(dim < 0 for dim in shape):
        raise ConversionError(f"state tensor '{name}': {path} has the shape {list(shape)}", hint=_HINT)
    return list(BY_PROTO_NAME.values())[meta.data_type - 1], shape


@cache
def _meta_class() -> Any:
    """The message of a `meta` file; the data types are numbered in the order of `BY_PROTO_NAME`, from 1."""
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
