"""Requests that kill their instance: refused after the second death, until the supervisor ends.

An instance notes in shared memory a fingerprint of each request that it computes: CRC-32 of at most a kilobyte of each
input. When it dies, the supervisor reads the requests in flight, which become suspects. The instances of the next
server compute a suspect alone and note a digest of all its inputs. If the instance survives, the request is cleared; if
it dies again, the request is refused from then on. So requests that shared a batch with a deadly one, and requests in
flight when an instance was killed from outside, are not refused.

Instances of image models note encoded images in the same way. When an instance of a tensor model dies, the images that
they have sent to it become suspects, too, so that they are sent alone the next time.

Files in the folder of status files:

- `INSTANCE.PID.requests`, memory-mapped: the requests in flight
- `INSTANCE.PID.survived`: fingerprints of suspects that the instance has computed
- `deadly_requests.json`, written by the supervisor before a server starts
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Collection
from pathlib import Path

from graphkiln_backend.system.files import write_whole
from graphkiln_backend.system.processes import is_gone

_FILE = "deadly_requests.json"
_MOST_KNOWN = 1024  # suspects, and refused requests: the oldest is dropped
_NOTES, _NOTES_OF_IMAGES = "*.requests", "*.images_*.requests"
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
        of_images = {*folder.glob(_NOTES_OF_IMAGES)}
        for path in folder.glob(_NOTES):
            name, _, pid = path.stem.rpartition(".")
            if path.stem == instance or is_gone(int(pid)):
                self._blame(name, path.read_bytes())
            elif path in of_images:
                self._suspects |= dict.fromkeys(_in_flight(path.read_bytes()))
        for known in (self._suspects, self._refused):
            while len(known) > _MOST_KNOWN:
                known.pop(next(iter(known)))  # type: ignore[call-overload]

    def _blame(self, name: str, notes: bytes) -> None:
        """Suspect the requests that an instance computed when it died, or refuse one that was a suspect."""
        _, digest = HEADER.unpack_from(notes)
        in_flight = _in_flight(notes)
        if digest != NO_DIGEST and in_flight and in_flight[0] in self._suspects:
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


def _in_flight(notes: bytes) -> tuple[int, ...]:
    count, _ = HEADER.unpack_from(notes)
    return struct.unpack_from(f"={count}I", notes, HEADER.size)


def find_dead_image_instance(folder: Path, known: Collection[str]) -> str:
    """Return an instance of an image model that has ended without being unloaded, as `instance.pid`; "" if none has.

    Instances of image models have no status file.

    Args:
        folder: Folder of status files.
        known: Instances with a status file.
    """
    for path in folder.glob(_NOTES_OF_IMAGES):
        if path.stem not in known and is_gone(int(path.stem.rpartition(".")[2])) and path.exists():
            return path.stem
    return ""


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
