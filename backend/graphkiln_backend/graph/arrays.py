"""Reads arrays that numpy saved, from files that somebody else may have made: without code, without bombs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.files import GIB, format_size, open_regular
from graphkiln_backend.graph.lazy_module import LazyModule

if TYPE_CHECKING:
    import numpy as np
else:
    np = LazyModule("numpy")

_NPY, _NPZ = b"\x93NUMPY", b"PK"
_SMALL_BYTES = GIB
_MOST_INFLATED = 20
"""Arrays over a GiB may be this many times as large as their file: samples shrink to a half, a bomb a thousandfold."""


def read_npz(path: Path) -> dict[str, AnyArray]:
    """Reads the arrays of an .npz by name.

    Raises:
        ManifestError: The file cannot be read, is none of numpy's, or would fill the memory.
    """
    try:
        with open_regular(path) as file:  # of a damaged file, numpy would leave its own open
            _check_kind(file)
            _check_inflated(file)
            with np.load(file, allow_pickle=False) as archive:
                return {name: _array(archive[name]) for name in archive.files}
    except ManifestError:
        raise
    except Exception as error:  # damaged, they fail in a dozen ways: MemoryError, zlib.error, TokenError, ...
        raise ManifestError(str(error) or type(error).__name__) from error


def parse_npy(content: bytes) -> AnyArray:
    """The array of an .npy file.

    Raises:
        ManifestError: The bytes are none, or those of an .npz.
    """
    if not content.startswith((_NPY, _NPZ)):
        raise ManifestError("it begins otherwise" if content else "it is empty")
    try:
        found = np.load(io.BytesIO(content), allow_pickle=False)
        if isinstance(found, np.ndarray):
            return _typed(found)
    except Exception as error:  # damaged, they fail in a dozen ways: MemoryError, zlib.error, TokenError, ...
        raise ManifestError(str(error) or type(error).__name__) from error
    found.close()
    raise ManifestError("it holds several arrays", hint="write one .npy file for each input")


def _check_kind(file: BinaryIO) -> None:
    begun = file.read(len(_NPY))
    file.seek(0)
    if begun == _NPY:
        raise ManifestError("it holds one array without a name", hint="use numpy.savez(FILE, NAME=...)")


def _check_inflated(file: BinaryIO) -> None:
    """Refuses an archive whose arrays are far larger than the file: zipfile reads no more than its directory says."""
    import zipfile  # models without golden samples need none of it

    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    inflated = sum(member.file_size for member in members)
    compressed = sum(member.compress_size for member in members)
    file.seek(0)
    if inflated > max(_SMALL_BYTES, _MOST_INFLATED * compressed):
        raise ManifestError(
            f"{format_size(compressed)} in it would become {format_size(inflated)}",
            hint="save the arrays with numpy.savez, without compression",
        )


def _array(found: object) -> AnyArray:
    if not isinstance(found, np.ndarray):
        raise TypeError("it holds something that is not an array")
    return _typed(found)


def _typed(array: AnyArray) -> AnyArray:
    """The format keeps bf16 elements as two bytes without a type or fields; nothing else that it holds has neither.

    Files of other machines keep numbers in another order of bytes, which no runtime takes.
    """
    bf16 = DType.BF16.numpy
    if array.dtype.kind == "V" and array.dtype.names is None and array.dtype.itemsize == bf16.itemsize:
        return array.view(bf16)
    native = array.dtype.newbyteorder("=")
    return array if array.dtype == native else array.astype(native)
