"""What a graph's file says is kept in the artifact cache, by the hash of the file and the code that read it.

A start with a filled cache parses nothing. Nor does it read the file: its hash is kept by what the file system says of
it, as git does. A file that changed less than two seconds before is not trusted: it may change once more within one
tick of the clock.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import suppress
from pathlib import Path

from graphkiln_backend.cache.reservation import Reservation
from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.graph.errors import CacheError, GraphkilnError, ManifestError
from graphkiln_backend.graph.files import GRAPH_LIMIT, stamp_of
from graphkiln_backend.graph.manifest import sha256_of
from graphkiln_backend.graph.source_digest import source_digest
from graphkiln_backend.repository.graph_facts import GraphFacts, known_facts, remember_facts
from graphkiln_backend.repository.onnx_file import read_facts

_log = logging.getLogger("graphkiln.lowering")

_KIND = "facts"
_FILE = "facts.json"
_HASH = "sha256"
_SETTLED_NS = 2_000_000_000


def recall_graph(path: Path, cache: ArtifactCache) -> None:
    """Has at hand what a graph's file says, if an earlier start has read it; else reads it, and keeps it.

    Nothing is wrong with a graph here: whoever asks for what it says is told.

    Args:
        path: The file; it need not be there.
        cache: Where it is kept.
    """
    stamp = stamp_of(path)
    if not cache.lasting or not stamp or known_facts(path):
        return
    name = f"{path.parent.parent.name}/{path.parent.name}"
    try:
        sha256 = _recall_hash(path, stamp, name, cache)
    except (OSError, MemoryError):
        return
    key = {"graph": sha256, "rules": source_digest("graph", "repository")}
    remember_facts(path, stamp, sha256, None)
    with suppress(CacheError), cache.without_spare() as kept, kept.reserve(_KIND, name, key) as reservation:
        facts = _read_kept(reservation) or _read(path)
        if facts and stamp_of(path) == stamp:
            remember_facts(path, stamp, sha256, facts)
            _keep(reservation, facts)


def _recall_hash(path: Path, stamp: tuple[int, ...], name: str, cache: ArtifactCache) -> str:
    """The hash of a file: kept, or else read, and kept then.

    Raises:
        OSError: It cannot be read.
    """
    key = {"stamp": f"{stamp}"}  # of a file, however it is reached: a server's mirror links to it
    with suppress(CacheError), cache.without_spare() as kept, kept.reserve(_HASH, name, key) as reservation:
        if reservation.path:
            return (reservation.path / _HASH).read_text()
        sha256 = sha256_of(path, GRAPH_LIMIT)
        if stamp_of(path) == stamp and time.time_ns() - max(stamp[-2:]) > _SETTLED_NS:
            with reservation.write() as folder:
                (folder / _HASH).write_text(sha256)
        return sha256
    return sha256_of(path, GRAPH_LIMIT)


def _read_kept(reservation: Reservation) -> GraphFacts | None:
    if reservation.path is None:
        return None
    try:
        return decode(GraphFacts, json.loads((reservation.path / _FILE).read_bytes()))
    except (OSError, ValueError, ManifestError) as error:
        _log.warning("what is known of a graph cannot be read: %s", error)
        return None


def _read(path: Path) -> GraphFacts | None:
    try:
        return read_facts(path)
    except GraphkilnError:
        return None


def _keep(reservation: Reservation, facts: GraphFacts) -> None:
    """Keeps what is not kept yet.

    Raises:
        CacheError: It cannot be written.
    """
    if reservation.path is None:
        with reservation.write() as folder:
            (folder / _FILE).write_text(json.dumps(encode(facts)))
