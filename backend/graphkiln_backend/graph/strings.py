"""Arrays of text, of any length and any character, as plain arrays: numpy itself would pickle them.

numpy's own text types will not do: they drop NUL characters at the end, and pad every element to the longest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.lazy_module import LazyModule

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    np = LazyModule("numpy")


def is_text(array: AnyArray) -> bool:
    """Whether the elements are text: `str` or bytes, as objects or in numpy's own types."""
    return array.dtype.kind in "OSU"


def as_text(array: AnyArray) -> AnyArray:
    """The same elements as `str` objects; of text that is bytes, what they say in UTF-8.

    Args:
        array: Of any dtype; one that holds no text is returned as it is.

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
    """Text as two plain arrays.

    Returns:
        The UTF-8 of all elements in C order, `[bytes]`, and how many bytes each has, of the array's own shape.
    """
    words = [str(word).encode("utf-8", "surrogatepass") for word in as_text(array).ravel().tolist()]
    lengths = np.array([len(word) for word in words], np.int64).reshape(array.shape)
    return np.frombuffer(b"".join(words), np.uint8), lengths


def unpack_text(content: AnyArray, lengths: AnyArray) -> AnyArray:
    """What `pack_text` packed: `str` objects.

    Raises:
        ManifestError: The two arrays do not belong together, or are of something else.
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
