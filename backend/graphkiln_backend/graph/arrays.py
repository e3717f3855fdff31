"""Read untrusted files of numpy arrays: no pickles, no decompression bombs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.files import GIB, format_size, open_regular
from graphkiln_backend.graph.modules import LazyModule

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    np = LazyModule("numpy")

# Text is stored as two plain arrays: numpy would pickle objects, and its text types drop trailing NUL characters and
# pad every element to the longest.


def is_text(array: AnyArray) -> bool:
    """True for arrays of text: `str` or bytes, as objects or in numpy's types."""
    return array.dtype.kind in "OSU"


def as_text(array: AnyArray) -> AnyArray:
    """Convert text to `str` objects; bytes are decoded as UTF-8.

    Args:
        array: Array of any dtype; returned unchanged if it is not text.

    Raises:
        UnicodeDecodeError: An element is not UTF-8.
    """
    if not is_text(array):
        return array
    words = [word.decode() if isinstance(word, bytes) else str(word) for word in array.ravel().tolist()]
    found = np.empty(len(words), np.object_)
    found[:] = words
    return found.reshape(array.shape)


def pack_text(array: AnyArray) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Encode text as two plain arrays.

    Returns:
        UTF-8 of all elements in C order, `[bytes]`, and the number of bytes of each, in the array's shape.
    """
    words = [str(word).encode("utf-8", "surrogatepass") for word in as_text(array).ravel().tolist()]
    lengths = np.array([len(word) for word in words], np.int64).reshape(array.shape)
    return np.frombuffer(b"".join(words), np.uint8), lengths


def unpack_text(content: AnyArray, lengths: AnyArray) -> AnyArray:
    """Unpack the result of `pack_text` as `str` objects.

    Raises:
        ManifestError: The two arrays do not match.
    """
    if content.dtype != np.uint8 or lengths.dtype != np.int64:
        raise ManifestError("its text is not kept as bytes and their lengths")
    sizes = lengths.ravel().astype(np.int64)
    if (sizes < 0).any() or sum(sizes.tolist()) != content.size:
        raise ManifestError("the lengths of its text are not those of its bytes")
    ends = np.cumsum(sizes)
    joined = content.tobytes()
    try:
        words = [
            joined[end - size : end].decode("utf-8", "surrogatepass")
            for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)
        ]
    except UnicodeDecodeError as error:
        raise ManifestError(f"its text is not UTF-8: {error}") from error
    found = np.empty(len(words), np.object_)
    found[:] = words
    return found.reshape(lengths.shape)


_NPY, _NPZ = b"\x93NUMPY", b"PK"
_SMALL_BYTES = GIB
# Maximum ratio of arrays above a GiB to their file: samples are compressed to a half, a bomb to a thousandth.
_MOST_INFLATED = 20


def read_npz(path: Path) -> dict[str, AnyArray]:
    """Read the arrays of an .npz by name.

    Raises:
        ManifestError: The file cannot be read, is not an .npz, or would fill the memory.
    """
    try:
        with open_regular(path) as file:  # numpy would not close its file if it is damaged
            _check_kind(file)
            _check_inflated(file)
            with np.load(file, allow_pickle=False) as archive:
                return {name: _array(archive[name]) for name in archive.files}
    except ManifestError:
        raise
    except Exception as error:  # damaged files raise MemoryError, zlib.error, TokenError, ...
        raise ManifestError(str(error) or type(error).__name__) from error


def parse_npy(content: bytes) -> AnyArray:
    """Parse an .npy file.

    Raises:
        ManifestError: The bytes are not an .npy file.
    """
    if not content.startswith((_NPY, _NPZ)):
        raise ManifestError("it begins otherwise" if content else "it is empty")
    try:
        found = np.load(io.BytesIO(content), allow_pickle=False)
        if isinstance(found, np.ndarray):
            return _typed(found)
    except Exception as error:  # damaged files raise MemoryError, zlib.error, TokenError, ...
        raise ManifestError(str(error) or type(error).__name__) from error
    found.close()
    raise ManifestError("it holds several arrays", hint="write one .npy file for each input")


def _check_kind(file: BinaryIO) -> None:
    begun = file.read(len(_NPY))
    file.seek(0)
    if begun == _NPY:
        raise ManifestError("it holds one array without a name", hint="use numpy.savez(FILE, NAME=...)")


def _check_inflated(file: BinaryIO) -> None:
    """Refuse an archive whose arrays are far larger than the file; zipfile reads at most the declared sizes."""
    import zipfile  # not needed by models without golden samples

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
    """Restore bf16, which the format stores as two untyped bytes, and the native byte order, which runtimes need."""
    bf16 = DType.BF16.numpy
    if array.dtype.kind == "V" and array.dtype.names is None and array.dtype.itemsize == bf16.itemsize:
        return array.view(bf16)
    native = array.dtype.newbyteorder("=")
    return array if array.dtype == native else array.astype(native)
