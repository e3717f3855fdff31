"""Saved graphs of OneFlow that lie in a model store as they were written: converted once, into the artifact cache.

    NAME/1/model/{model.mlir, STATE.TENSOR/{out,meta}, ...}    what oneflow-serving served

The conversion is that of `graphkiln convert oneflow:DIR`, with its proof; the entry of the cache is a version folder.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from importlib.metadata import version as version_of
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.graph.errors import ConversionError, GraphkilnError
from graphkiln_backend.repository.version import oneflow_graph

_log = logging.getLogger("graphkiln.lowering")

_KIND = "oneflow"
_LIBRARIES = ("graphkiln", "onnx-ir", "onnxscript", "onnxruntime")
_CHUNK_BYTES = 1 << 20


Conversion = Callable[[Path, Path], None]
"""What OneFlow wrote, and the empty folder of the version that is made of it."""


def adopted(version: Path, cache: ArtifactCache, convert: Conversion | None = None) -> Path:
    """The folder that holds a version's graph: its own, or the cache's where OneFlow saved it.

    Args:
        version: The version folder; never written to.
        cache: Where conversions are kept.
        convert: How; `convert_here` when None.

    Raises:
        ConversionError: The saved graph cannot be converted.
        VerificationError: Its answers changed.
        CacheError: It is not in the cache and cannot be written.
    """
    saved = oneflow_graph(version)
    if saved is None:
        return version
    key = {"content": _content(saved), **{name: version_of(name) for name in _LIBRARIES}}

    def build(folder: Path) -> None:
        _log.info(
            "converting %s %s, which OneFlow saved: once, into %s", version.parent.name, version.name, cache.folder
        )
        (convert or convert_here)(saved, folder)

    return cache.get(_KIND, f"{version.parent.name} {version.name}", key, build)


def convert_apart(saved: Path, target: Path) -> None:
    """In a process of its own, which ends with the call, however that ends.

    A server never again needs the 400 MB that a conversion leaves behind, and can be stopped while it converts.

    Raises:
        ConversionError: The saved graph cannot be converted, or its answers changed.
    """
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_convert_and_tell, args=(sender, saved, target), daemon=True)
    process.start()
    sender.close()
    try:
        failure: tuple[str, str] | None = receiver.recv()
    except EOFError as error:
        raise ConversionError(
            f"the conversion of {saved} was ended from outside", hint="is there enough memory? try again"
        ) from error
    finally:
        receiver.close()
        process.kill()
        process.join()
    if failure:
        message, hint = failure
        raise ConversionError(message, hint=hint)


def _convert_and_tell(sender: Connection, saved: Path, target: Path) -> None:
    """Sends what went wrong as text: errors with fields of their own cannot travel between processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the server, which ends this process
    failure = None
    try:
        with TemporaryDirectory(dir=target) as scratch:
            # Goes with the unfinished entry when this process is killed. Libraries look for the variable.
            tempfile.tempdir = os.environ["TMPDIR"] = scratch
            convert_here(saved, target)
    except GraphkilnError as error:
        failure = error.message, error.hint
    except OSError as error:  # a full disk
        failure = f"{saved} cannot be converted in {target}: {error.strerror or error}", "make room: serve --cache DIR"
    sender.send(failure)


def convert_here(saved: Path, target: Path) -> None:
    """Converts and proves a saved graph.

    Raises:
        ConversionError: It cannot be converted.
        VerificationError: Its answers changed.
    """
    from graphkiln_converters.convert import convert
    from graphkiln_converters.recipe import Recipe

    with TemporaryDirectory(prefix="graphkiln-") as temporary:
        recipe = Recipe(source=f"oneflow:{saved}", name="adopted", model_store=Path(temporary), version=1)
        command = f"graphkiln convert oneflow:{saved} --name NAME"
        folder = convert(recipe, command=command)
        for file in folder.iterdir():
            shutil.move(file, target / file.name)


def _content(saved: Path) -> str:
    """SHA-256 of all files below a folder and of their names."""
    digest = hashlib.sha256()
    for path in sorted(path for path in saved.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(saved)}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
