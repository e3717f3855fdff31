"""Graphs of other frameworks that lie in a model store as they were saved: converted once, into the artifact cache.

    NAME/1/model/{model.mlir, STATE.TENSOR/{out,meta}, ...}    what oneflow-serving served

The conversion is that of `graphkiln convert KIND:DIR`, with its proof; the entry of the cache is a version folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.graph.distributions import version_of
from graphkiln_backend.graph.errors import ConversionError, GraphkilnError
from graphkiln_backend.graph.files import open_regular
from graphkiln_backend.lowering.known_graphs import recall_graph
from graphkiln_backend.repository.importers import ForeignGraph, find_foreign_graph
from graphkiln_backend.repository.version import GRAPH_FILE, has_own_graph, tells_by_graph

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
