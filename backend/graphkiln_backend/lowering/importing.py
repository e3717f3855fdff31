"""Graphs of other frameworks that lie in a model store as they were saved: converted once, into the artifact cache.

    NAME/1/model/{model.mlir, STATE.TENSOR/{out,meta}, ...}    what oneflow-serving served

The conversion is that of `graphkiln convert KIND:DIR`, with its proof; the entry of the cache is a version folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from graphkiln_backend.cache.entry import Reservation
from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.graph.errors import CacheError, ConversionError, GraphkilnError, ManifestError
from graphkiln_backend.graph.files import GRAPH_LIMIT, open_regular, stamp_of
from graphkiln_backend.graph.manifest import sha256_of
from graphkiln_backend.graph.modules import source_digest, version_of
from graphkiln_backend.repository.importers import ForeignGraph, find_foreign_graph
from graphkiln_backend.repository.onnx_file import GraphFacts, known_facts, read_facts, remember_facts
from graphkiln_backend.repository.version import GRAPH_FILE, has_own_graph, tells_by_graph

# What a graph's file says is kept in the artifact cache, by the hash of the file and the code that read it.
#
# A start with a filled cache parses nothing. Nor does it read the file: its hash is kept by what the file system says
# of it, as git does. A file that changed less than two seconds before is not trusted: it may change once more within
# one tick of the clock.

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


if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_log = logging.getLogger("graphkiln.lowering")

_CHUNK_BYTES = 1 << 20


def convert_if_needed(version: Path, cache: ArtifactCache, *, in_subprocess: bool = False) -> Path:
    """The folder that holds a version's graph: its own, or the cache's where another framework saved it.

    What an earlier start has read of a graph without a full manifest is at hand then.

    Args:
        version: The version folder; never written to.
        cache: Where conversions are kept.
        in_subprocess: Whether to convert in a process of its own; see `convert_in_subprocess`.

    Raises:
        ConversionError: The saved graph cannot be converted.
        VerificationError: Its outputs changed.
        CacheError: It is not in the cache and cannot be written.
    """
    found = None if has_own_graph(version) else find_foreign_graph(version)
    if found is None:
        if tells_by_graph(version):
            recall_graph(version / GRAPH_FILE, cache)
        return version
    name = f"{version.parent.name} {version.name}"

    def build(folder: Path) -> None:
        _log.info("converting %s, which %s saved: once, into %s", name, found.importer.framework, cache.folder)
        convert = convert_in_subprocess if in_subprocess else convert_here
        convert(found, folder)

    return cache.get(found.importer.kind, name, _key(found), build)


def convert_here(graph: ForeignGraph, target: Path) -> None:
    """Converts and proves a saved graph in this process. See `Importer.convert`."""
    graph.importer.convert(graph.saved, target)


def convert_in_subprocess(graph: ForeignGraph, target: Path) -> None:
    """Converts and proves a saved graph in a process of its own, which ends with the call, however that ends.

    A server never again needs the 400 MB that a conversion leaves behind, and can be stopped while it converts.

    Args:
        graph: The saved graph; its importer must be picklable.
        target: An empty folder, which becomes a version folder.

    Raises:
        ConversionError: The saved graph cannot be converted, or its outputs changed.
    """
    from graphkiln_backend.lowering.parentage import worker  # which no instance needs

    with worker(_convert_and_send_failure, graph, target) as (receiver, _):
        try:
            failure: tuple[str, str] | None = receiver.recv()
        except EOFError as error:
            raise ConversionError(
                f"the conversion of {graph.saved} was ended from outside", hint="is there enough memory? try again"
            ) from error
    if failure:
        message, hint = failure
        raise ConversionError(message, hint=hint)


def _convert_and_send_failure(sender: Connection, graph: ForeignGraph, target: Path) -> None:
    """Sends None, or message and hint of what failed."""
    from graphkiln_backend.lowering.parentage import keep_temporary_files_in

    failure = None
    try:
        with TemporaryDirectory(dir=target) as scratch:  # goes with the unfinished entry when this process is killed
            keep_temporary_files_in(scratch)
            convert_here(graph, target)
    except GraphkilnError as error:
        failure = error.message, error.hint
    except OSError as error:  # a full disk
        cause = error.strerror or error
        failure = f"{graph.saved} cannot be converted in {target}: {cause}", "make room: serve --cache DIR"
    sender.send(failure)


def _key(graph: ForeignGraph) -> dict[str, str]:
    libraries = {name: version_of(name) for name in graph.importer.distributions}
    return {"content": _content(graph.saved), **libraries}


def _content(folder: Path) -> str:
    """SHA-256 of all files below a folder and of their names."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(os.fsencode(path.relative_to(folder)) + f"\0{path.stat().st_size}\0".encode())
        with open_regular(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
