"""Requests that kill their instance: refused after the second death, until the supervisor ends.

An instance notes in shared memory a fingerprint of each request that it computes: CRC-32 of at most a kilobyte of each
input. When it dies, the supervisor reads the requests in flight, which become suspects. The instances of the next
server compute a suspect alone and note a digest of all its inputs. If the instance survives, the request is cleared; if
it dies again, the request is refused from then on. So requests that shared a batch with a deadly one, and requests in
flight when an instance was killed from outside, are not refused.

Files in the folder of status files:

- `INSTANCE.PID.requests`, memory-mapped: the requests in flight
- `INSTANCE.PID.survived`: fingerprints of suspects that the instance has computed
- `deadly_requests.json`, written by the supervisor before a server starts
"""

from __future__ import annotations

import json
import logging
import struct
from pathlib import Path

from graphkiln_backend.system.files import write_whole
from graphkiln_backend.system.processes import is_gone

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
        """Suspect the requests that an instance computed when it died, or refuse one that was a suspect."""
        count, digest = HEADER.unpack_from(notes)
        in_flight = struct.unpack_from(f"={count}I", notes, HEADER.size)
        if digest != NO_DIGEST and count and in_flight[0] in self._suspects:
            del self._suspects[in_flight[0]]
            self._refused[digest] = in_flight[0]
            _log.error("%s died of a request, the second time: request %s is refused from now on", name, digest.hex())
        else:
            self._suspects |= dict.fromkeys(in_flight)

    def publish(self, folder: Path) -> None:
        """Write suspects and refused requests for the instances of the next server.

        Raises:
            OSError: The file cannot be written.
        """
        if self._suspects or self._refused:
            refused = [[fingerprint, digest.hex()] for digest, fingerprint in self._refused.items()]
            content = {"suspects": [*self._suspects], "refused": refused}
            write_whole(folder / _FILE, json.dumps(content).encode())


def read_deadly_requests(folder: Path) -> tuple[set[int], dict[int, set[bytes]]]:
    """Read fingerprints of suspects, and digests of refused requests by fingerprint."""
    try:
        content = json.loads((folder / _FILE).read_bytes())
    except FileNotFoundError:
        return set(), {}
    refused: dict[int, set[bytes]] = {}
    for fingerprint, digest in content["refused"]:
        refused.setdefault(fingerprint, set()).add(bytes.fromhex(digest))
    return set(content["suspects"]), refused
