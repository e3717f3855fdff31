"""An instance's record of the requests that it computes, for `triton.deadly_requests`."""

from __future__ import annotations

import hashlib
import mmap
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from graphkiln_backend.graph.arrays import is_text
from graphkiln_backend.graph.dtypes import AnyArray, join_text
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.files import write_whole
from graphkiln_backend.triton.deadly_requests import (
    DIGEST_BYTES,
    FINGERPRINT,
    HEADER,
    NO_DIGEST,
    read_deadly_requests,
)

Feeds = dict[str, AnyArray]

_MOST_UNDER_WAY = 256  # noted requests of one batch
_PART_BYTES, _PARTS = 256, 4  # of each input in a fingerprint


class DeadlyRequest(GraphkilnError):
    """A request that has ended two instances; it is not computed again."""

    triton_code = "INVALID_ARG"
    exit_code = 2

    def __init__(self, digest: bytes) -> None:
        super().__init__(
            f"this request is refused, because its computation has ended two instances (request {digest.hex()})",
            hint="its inputs make the engine or the image decoder fail: change them, or ask for another engine; a new "
            "version or a restart of graphkiln serve computes it again",
        )


class RequestNotes(Closeable):
    """Note the requests under way, and refuse deadly ones. Not thread-safe.

    Args:
        folder: Folder of status files.
        instance: Triton's name of the instance.
        pid: Its process.
        computed_by: What else decides whether a request is deadly: model, version, files, engine.
    """

    def __init__(self, folder: Path, instance: str, pid: int, computed_by: str) -> None:
        self._path = folder / f"{instance}.{pid}.requests"
        self._survived = folder / f"{instance}.{pid}.survived"
        size = HEADER.size + _MOST_UNDER_WAY * FINGERPRINT.size
        write_whole(self._path, bytes(size))
        with self._path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size)
        self._computed_by = computed_by.encode()
        self._seed = zlib.crc32(self._computed_by)
        self._suspects, self._refused = read_deadly_requests(folder)
        self._known = self._suspects | self._refused.keys()
        self._tried: int | None = None

    def is_known(self, feeds: Feeds) -> bool:
        """True for a suspect and a refused request, which are computed alone or not at all."""
        return bool(self._known) and self._fingerprint(feeds) in self._known

    def begin(self, requests: Sequence[Feeds]) -> None:
        """Note the requests that are computed next.

        Raises:
            DeadlyRequest: The only request is deadly.
        """
        found = [self._fingerprint(feeds) for feeds in requests[:_MOST_UNDER_WAY]]
        digest, self._tried = NO_DIGEST, None
        if len(found) == 1 and found[0] in self._known:
            digest = self._digest(requests[0])
            if digest in self._refused.get(found[0], ()):
                raise DeadlyRequest(digest)
            self._tried = found[0]
        struct.pack_into(f"{HEADER.format}{len(found)}I", self._memory, 0, len(found), digest, *found)

    def end(self) -> None:
        """Note that the process has survived them."""
        FINGERPRINT.pack_into(self._memory, 0, 0)
        tried, self._tried = self._tried, None
        if tried is not None and tried in self._suspects:
            self._suspects.remove(tried)
            self._known = self._suspects | self._refused.keys()
            with suppress(OSError), self._survived.open("ab") as file:  # it stays a suspect elsewhere
                file.write(FINGERPRINT.pack(tried))

    def close(self) -> None:
        """Remove the notes; the fingerprints of survived suspects stay for the supervisor."""
        self._memory.close()
        self._path.unlink(missing_ok=True)

    def _fingerprint(self, feeds: Feeds) -> int:
        value = self._seed
        for array in feeds.values():
            if array.dtype.hasobject:
                words = array.reshape(-1)
                content: Any = join_text([*words[:_PARTS], *words[-_PARTS:]])
            else:
                content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            size = len(content)
            if size <= _PARTS * _PART_BYTES:
                value = zlib.crc32(content, value)
                continue
            for begin in (0, size // 3, 2 * size // 3, size - _PART_BYTES):
                value = zlib.crc32(content[begin : begin + _PART_BYTES], value)
        return value

    def _digest(self, feeds: Feeds) -> bytes:
        digest = hashlib.blake2b(self._computed_by, digest_size=DIGEST_BYTES)
        for name, array in sorted(feeds.items()):
            digest.update(repr((name, array.dtype.str, array.shape)).encode())
            digest.update(join_text(array.reshape(-1).tolist()) if is_text(array) else array.tobytes())
        return digest.digest()
