"""Requests that end their instance: known for the life of the supervisor, and refused after two deaths.

An instance notes in shared memory a fingerprint of each request that it computes: CRC-32 of at most a kilobyte. When it
dies, the supervisor finds the requests under way, which become suspects. The instances of the next server compute a
suspect alone and note its whole digest. If one survives, it is none; if its instance dies again, it is refused from
then on. So requests that shared a batch with a deadly one, and requests under way when an instance was killed from
outside, are not refused.

Files in the folder of status files:

- `INSTANCE.PID.requests`, memory-mapped: the requests under way
- `INSTANCE.PID.survived`: fingerprints of suspects that the instance has computed
- `deadly_requests.json`, written by the supervisor before a server starts
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import struct
import zlib
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from graphkiln_backend.graph.arrays import is_text
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.repository.records import join_text
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.processes import is_gone
from graphkiln_backend.triton.instance_status import write_whole

Feeds = dict[str, AnyArray]

_FILE = "deadly_requests.json"
_MOST_KNOWN = 1024  # suspects, and refused requests: the oldest is dropped
_MOST_UNDER_WAY = 256  # noted requests of one batch
_PART_BYTES, _PARTS = 256, 4  # of each input in a fingerprint
_DIGEST_BYTES = 16
_HEADER = struct.Struct(f"=I{_DIGEST_BYTES}s")  # number of fingerprints that follow, digest of a suspect
_ONE = struct.Struct(f"=I{_DIGEST_BYTES}sI")
_FINGERPRINT = struct.Struct("=I")
_NO_DIGEST = bytes(_DIGEST_BYTES)

_log = logging.getLogger("graphkiln.server")


class DeadlyRequest(GraphkilnError):
    """A request that has ended two instances; it is not computed again."""

    triton_code = "INVALID_ARG"

    def __init__(self, digest: bytes) -> None:
        super().__init__(
            f"this request is refused, because its computation has ended two instances (request {digest.hex()})",
            hint="its inputs make the engine fail: change them, or ask for another engine; a new version or a "
            "restart of graphkiln serve computes it again",
        )


class RequestNotes(Closeable):
    """Note the requests under way, and refuse deadly ones. Not thread-safe; `end` follows each `begin`.

    Args:
        folder: Folder of status files.
        instance: Triton's name of the instance.
        pid: Its process.
        computed_by: What else decides whether a request is deadly: model, version, files, engine.
    """

    def __init__(self, folder: Path, instance: str, pid: int, computed_by: str) -> None:
        self._path = folder / f"{instance}.{pid}.requests"
        self._survived = folder / f"{instance}.{pid}.survived"
        size = _HEADER.size + _MOST_UNDER_WAY * _FINGERPRINT.size
        write_whole(self._path, bytes(size))
        with self._path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), size)
        self._computed_by = computed_by.encode()
        self._seed = zlib.crc32(self._computed_by)
        self._suspects, self._refused = _read(folder / _FILE)
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
        if len(requests) > 1:
            found = [self._fingerprint(feeds) for feeds in requests[:_MOST_UNDER_WAY]]
            struct.pack_into(f"={len(found)}I", self._memory, _HEADER.size, *found)
            _HEADER.pack_into(self._memory, 0, len(found), _NO_DIGEST)
            return
        fingerprint, digest = self._fingerprint(requests[0]), _NO_DIGEST
        if fingerprint in self._known:
            digest = self._digest(requests[0])
            if digest in self._refused.get(fingerprint, ()):
                raise DeadlyRequest(digest)
            self._tried = fingerprint
        _ONE.pack_into(self._memory, 0, 1, digest, fingerprint)

    def end(self) -> None:
        """Note that the process has survived them."""
        _FINGERPRINT.pack_into(self._memory, 0, 0)
        if self._tried is not None:
            tried, self._tried = self._tried, None
            if tried in self._suspects:
                self._suspects.remove(tried)
                self._known = self._suspects | self._refused.keys()
                with suppress(OSError), self._survived.open("ab") as file:  # it stays a suspect elsewhere
                    file.write(_FINGERPRINT.pack(tried))

    def close(self) -> None:
        """Remove the notes; what was survived stays for the supervisor."""
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
        digest = hashlib.blake2b(self._computed_by, digest_size=_DIGEST_BYTES)
        for name, array in sorted(feeds.items()):
            digest.update(repr((name, array.dtype.str, array.shape)).encode())
            digest.update(join_text(array.reshape(-1).tolist()) if is_text(array) else array.tobytes())
        return digest.digest()


class DeadlyRequests:
    """Suspects and refused requests, kept by the supervisor across restarts of the server."""

    def __init__(self) -> None:
        self._suspects: dict[int, None] = {}
        self._refused: dict[bytes, int] = {}  # digest -> fingerprint

    def learn(self, folder: Path, instance: str) -> None:
        """Learn from the notes of instances that have ended.

        Args:
            folder: Folder of status files.
            instance: One that has ended or is about to, as `instance.pid`; others are found by their process.
        """
        for path in folder.glob("*.survived"):
            content = path.read_bytes()
            for (fingerprint,) in _FINGERPRINT.iter_unpack(content[: len(content) // 4 * 4]):
                self._suspects.pop(fingerprint, None)
        for path in folder.glob("*.requests"):
            name, _, pid = path.stem.rpartition(".")
            if path.stem == instance or is_gone(int(pid)):
                self._blame(name, path.read_bytes())
        for known in (self._suspects, self._refused):
            while len(known) > _MOST_KNOWN:
                known.pop(next(iter(known)))  # type: ignore[call-overload]

    def _blame(self, name: str, notes: bytes) -> None:
        """Blame what an instance computed at its end."""
        count, digest = _HEADER.unpack_from(notes)
        under_way = struct.unpack_from(f"={count}I", notes, _HEADER.size)
        if digest != _NO_DIGEST and count and under_way[0] in self._suspects:
            del self._suspects[under_way[0]]
            self._refused[digest] = under_way[0]
            _log.error("%s died of a request, the second time: request %s is refused from now on", name, digest.hex())
        else:
            self._suspects |= dict.fromkeys(under_way)

    def publish(self, folder: Path) -> None:
        """Write what is known for the instances of the next server.

        Raises:
            OSError: The file cannot be written.
        """
        if self._suspects or self._refused:
            refused = [[fingerprint, digest.hex()] for digest, fingerprint in self._refused.items()]
            content = {"suspects": [*self._suspects], "refused": refused}
            write_whole(folder / _FILE, json.dumps(content).encode())


def _read(path: Path) -> tuple[set[int], dict[int, Collection[bytes]]]:
    """Read suspects, and the digests of refused requests by fingerprint."""
    refused: dict[int, set[bytes]] = {}
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return set(), {}
    for fingerprint, digest in content["refused"]:
        refused.setdefault(fingerprint, set()).add(bytes.fromhex(digest))
    return set(content["suspects"]), {**refused}
