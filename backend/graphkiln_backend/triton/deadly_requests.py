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

import json
import logging
import struct
from collections.abc import Collection
from pathlib import Path

from graphkiln_backend.system.processes import is_gone
from graphkiln_backend.triton.instance_status import write_whole

_FILE = "deadly_requests.json"
_MOST_KNOWN = 1024  # suspects, and refused requests: the oldest is dropped
DIGEST_BYTES = 16
HEADER = struct.Struct(f"=I{DIGEST_BYTES}s")  # number of fingerprints that follow, digest of a suspect
FINGERPRINT = struct.Struct("=I")
NO_DIGEST = bytes(DIGEST_BYTES)

_log = logging.getLogger("graphkiln.server")


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
            for (fingerprint,) in FINGERPRINT.iter_unpack(content[: len(content) // 4 * 4]):
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
        count, digest = HEADER.unpack_from(notes)
        under_way = struct.unpack_from(f"={count}I", notes, HEADER.size)
        if digest != NO_DIGEST and count and under_way[0] in self._suspects:
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


def read_deadly_requests(folder: Path) -> tuple[set[int], dict[int, Collection[bytes]]]:
    """Read fingerprints of suspects, and digests of refused requests by fingerprint."""
    refused: dict[int, set[bytes]] = {}
    try:
        content = json.loads((folder / _FILE).read_bytes())
    except FileNotFoundError:
        return set(), {}
    for fingerprint, digest in content["refused"]:
        refused.setdefault(fingerprint, set()).add(bytes.fromhex(digest))
    return set(content["suspects"]), {**refused}
