"""Choice of a share of the requests: by a number that depends on the request alone, so that a retry is chosen alike."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping

from graphkiln_backend.graph.arrays import is_text
from graphkiln_backend.graph.dtypes import AnyArray, join_text

_HASHED_BYTES = 16 << 10
_HASHED_ELEMENTS = 1024


def position_of(request_id: str, inputs: Mapping[str, AnyArray], purpose: bytes = b"") -> float:
    """Return a number from 0 to 1 that is the same for a retry of the request.

    It is a hash of the id. Without an id it is one of the inputs; of a large input, of elements evenly spread over it,
    because a hash of all takes longer than the copy.

    Args:
        request_id: Id given by the client, or empty.
        inputs: Inputs, for requests without an id.
        purpose: Positions for different purposes are independent; at most 16 bytes.
    """
    digest = hashlib.blake2b(request_id.encode("utf-8", "surrogatepass"), digest_size=8, person=purpose)
    if not request_id:
        for name, array in inputs.items():
            digest.update(f"{name} {array.shape} {_checksum(array)}".encode())
    return int.from_bytes(digest.digest()) / 2**64


def _checksum(array: AnyArray) -> int:
    if is_text(array):
        return zlib.crc32(join_text(array.ravel()[:_HASHED_ELEMENTS].tolist()))
    step = max(1, array.size // _HASHED_ELEMENTS) if array.nbytes > _HASHED_BYTES else 1
    return zlib.crc32(array.reshape(-1)[::step].tobytes())
