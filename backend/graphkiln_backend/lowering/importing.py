"""Prepare a version folder for a start: read the facts of its graph, or convert a model of another framework.

    NAME/1/model/{model.mlir, STATE.TENSOR/{out,meta}, ...}    a version of oneflow-serving

The conversion is that of `graphkiln convert KIND:DIR`, with its verification. It is made once, and its entry in the
artifact cache is a version folder. Nothing is ever written into the model store.
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
from graphkiln_backend.lowering.artifacts import FILE_HASH, GRAPH_FACTS, FileHash, recall
from graphkiln_backend.repository.importers import ForeignGraph, find_foreign_graph
from graphkiln_backend.repository.onnx_file import known_facts, read_facts, remember_facts
from graphkiln_backend.repository.version import GRAPH_FILE, has_own_graph, needs_graph_facts

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_log = logging.getLogger("graphkiln.lowering")

_SETTLED_NS = 2_000_000_000
_CHUNK_BYTES = 1 << 20


def convert_if_needed(version: Path, cache: ArtifactCache, *, in_subprocess: bool = False) -> Path:
    """Return the folder of a version's graph: the version folder itself, or a cached conversion.

    Also loads the cached facts of a graph without a full manifest.

    Args:
        version: The version folder.
        cache: Cache for conversions.
        in_subprocess: Convert in a subprocess: a conversion leaves 400 MB allocated, and a server must be able to stop
            while it converts.

    Raises:
        ConversionError: The model cannot be converted.
        VerificationError: The outputs of the converted model differ.
        CacheError: The conversion is not in the cache and cannot be written.
    """
    found = None if has_own_graph(version) else find_foreign_graph(version)
    if found is None:
        if needs_graph_facts(version):
            recall_graph(version / GRAPH_FILE, cache)
        return version
    name = f"{version.parent.name} {version.name}"

    def build(folder: Path) -> None:
        _log.info("converting %s, saved by %s, into %s", name, found.importer.framework, cache.folder)
        if in_subprocess:
            convert_in_subprocess(found, folder)
        else:
            found.importer.convert(found.saved, folder)

    libraries = {name: version_of(name) for name in found.importer.distributions}
    return cache.get(found.importer.kind, name, {"content": _content(found.saved), **libraries}, build)


def recall_graph(path: Path, cache: ArtifactCache) -> None:
    """Load the facts of a graph file from the cache, or read the graph and cache them.

    A start with a filled cache neither parses nor reads the graph: like git, it looks up the file's hash by its size
    and times. Errors of a damaged or missing file are left to the first reader.
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
    """Return the hash of a file, cached by its stamp and not by its path, since a server's mirror links to it.

    Raises:
        OSError: The file cannot be read.
    """
    with recall(FILE_HASH, cache, name, {"stamp": f"{stamp}"}) as fact:
        if fact.value:
            return fact.value.sha256
        sha256 = sha256_of(path, GRAPH_LIMIT)
        # A file that was just written may be written again within the resolution of its timestamp.
        if stamp_of(path) == stamp and time.time_ns() - max(stamp[-2:]) > _SETTLED_NS:
            fact.keep(FileHash(sha256=sha256))
        return sha256


def convert_in_subprocess(graph: ForeignGraph, target: Path) -> None:
    """Convert and verify a saved model in a subprocess.

    Args:
        graph: The saved model; its importer must be picklable.
        target: An empty folder, which becomes a version folder.

    Raises:
        ConversionError: The model cannot be converted, or its outputs differ.
    """
    from graphkiln_backend.system.processes import worker  # not needed by instances

    with worker(_convert_and_send_failure, graph, target) as (receiver, _):
        try:
            failure: tuple[str, str] | None = receiver.recv()
        except EOFError as error:
            raise ConversionError(
                f"the conversion of {graph.saved} was killed", hint="check that there is enough memory, and try again"
            ) from error
    if failure:
        message, hint = failure
        raise ConversionError(message, hint=hint)


def _convert_and_send_failure(sender: Connection, graph: ForeignGraph, target: Path) -> None:
    """Send None, or message and hint of the error."""
    from graphkiln_backend.system.processes import keep_temporary_files_in

    failure = None
    try:
        with TemporaryDirectory(dir=target) as scratch:  # removed with the unfinished entry if this process is killed
            keep_temporary_files_in(scratch)
            graph.importer.convert(graph.saved, target)
    except GraphkilnError as error:
        failure = error.message, error.hint
    except OSError as error:  # a full disk
        cause = error.strerror or error
        failure = (
            f"{graph.saved} cannot be converted in {target}: {cause}",
            "free disk space, or choose another folder: serve --cache DIR",
        )
    sender.send(failure)


def _content(folder: Path) -> str:
    """Return a SHA-256 over names and content of all files in a folder."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(os.fsencode(path.relative_to(folder)) + f"\0{path.stat().st_size}\0".encode())
        with open_regular(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
