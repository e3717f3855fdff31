"""Prepare a version folder for a start: read its graph's facts, or convert what another framework saved.

    NAME/1/model/{model.mlir, STATE.TENSOR/{out,meta}, ...}    what oneflow-serving served

The conversion is that of `graphkiln convert KIND:DIR`, with its proof; it is made once, and its entry in the artifact
cache is a version folder. Nothing is ever written into the model store.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.graph.errors import ConversionError, GraphkilnError
from graphkiln_backend.graph.files import GRAPH_LIMIT, open_regular, stamp_of
from graphkiln_backend.graph.manifest import sha256_of
from graphkiln_backend.graph.modules import version_of
from graphkiln_backend.lowering.remembered import FILE_HASH, GRAPH_FACTS, FileHash, recall
from graphkiln_backend.repository.importers import ForeignGraph, find_foreign_graph
from graphkiln_backend.repository.onnx_file import known_facts, read_facts, remember_facts
from graphkiln_backend.repository.version import GRAPH_FILE, has_own_graph, tells_by_graph

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_log = logging.getLogger("graphkiln.lowering")

_SETTLED_NS = 2_000_000_000
_CHUNK_BYTES = 1 << 20


def convert_if_needed(version: Path, cache: ArtifactCache, *, in_subprocess: bool = False) -> Path:
    """Return the folder that holds a version's graph: its own, or the cache's where another framework saved it.

    Facts of a graph without a full manifest are at hand afterwards.

    Args:
        version: The version folder.
        cache: Keeps conversions.
        in_subprocess: Whether to convert in a process that ends with the call: a server never again needs the 400 MB
            that a conversion leaves behind, and can be stopped while it converts.

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
        if in_subprocess:
            convert_in_subprocess(found, folder)
        else:
            found.importer.convert(found.saved, folder)

    libraries = {name: version_of(name) for name in found.importer.distributions}
    return cache.get(found.importer.kind, name, {"content": _content(found.saved), **libraries}, build)


def recall_graph(path: Path, cache: ArtifactCache) -> None:
    """Have the facts of a graph's file at hand: as an earlier start kept them, or else read and kept now.

    A start with a filled cache parses no graph. Nor does it read the file: its hash is kept by what the file system
    says of it, as git does. A damaged graph is no error here, but of the first reader.

    Args:
        path: The file; may be missing.
        cache: Keeps facts.
    """
    stamp = stamp_of(path)
    if not cache.lasting or not stamp or known_facts(path):
        return
    name = f"{path.parent.parent.name}/{path.parent.name}"
    with cache.without_spare() as kept:
        try:
            sha256 = _recall_hash(path, stamp, name, kept)
        except (OSError, MemoryError):
            return
        remember_facts(path, stamp, sha256, None)
        with recall(GRAPH_FACTS, kept, name, {"graph": sha256}) as fact:
            try:
                facts = fact.value or read_facts(path)
            except GraphkilnError:
                return
            if facts and stamp_of(path) == stamp:
                remember_facts(path, stamp, sha256, facts)
                fact.keep(facts)


def _recall_hash(path: Path, stamp: tuple[int, ...], name: str, cache: ArtifactCache) -> str:
    """Return the hash of a file, kept by its stamp: however the file is reached, as a server's mirror links to it.

    Raises:
        OSError: It cannot be read.
    """
    with recall(FILE_HASH, cache, name, {"stamp": f"{stamp}"}) as fact:
        if fact.value:
            return fact.value.sha256
        sha256 = sha256_of(path, GRAPH_LIMIT)
        # A file that changed a moment ago may change once more within one tick of the clock.
        if stamp_of(path) == stamp and time.time_ns() - max(stamp[-2:]) > _SETTLED_NS:
            fact.keep(FileHash(sha256=sha256))
        return sha256


def convert_in_subprocess(graph: ForeignGraph, target: Path) -> None:
    """Convert and prove a saved graph in a process that ends with the call.

    Args:
        graph: The saved graph; its importer must be picklable.
        target: An empty folder, which becomes a version folder.

    Raises:
        ConversionError: The saved graph cannot be converted, or its outputs changed.
    """
    from graphkiln_backend.system.processes import worker  # which no instance needs

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
    """Send None, or message and hint of what failed."""
    from graphkiln_backend.system.processes import keep_temporary_files_in

    failure = None
    try:
        with TemporaryDirectory(dir=target) as scratch:  # goes with the unfinished entry when this process is killed
            keep_temporary_files_in(scratch)
            graph.importer.convert(graph.saved, target)
    except GraphkilnError as error:
        failure = error.message, error.hint
    except OSError as error:  # a full disk
        cause = error.strerror or error
        failure = f"{graph.saved} cannot be converted in {target}: {cause}", "make room: serve --cache DIR"
    sender.send(failure)


def _content(folder: Path) -> str:
    """SHA-256 of all files below a folder and of their names."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(os.fsencode(path.relative_to(folder)) + f"\0{path.stat().st_size}\0".encode())
        with open_regular(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
