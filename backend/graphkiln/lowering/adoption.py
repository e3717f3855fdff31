"""Saved graphs of OneFlow that lie in a model store as they were written: converted once, into the artifact cache.

    NAME/1/model/{model.mlir, STATE.TENSOR/{out,meta}, ...}    what oneflow-serving served

The conversion is that of `graphkiln convert oneflow:DIR`, with its proof; the entry of the cache is a version folder.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from importlib.metadata import version as version_of
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from graphkiln.graph.errors import ConversionError
from graphkiln.lowering.cache import ArtifactCache
from graphkiln.repository.version import oneflow_graph

_KIND = "oneflow"
_LIBRARIES = ("graphkiln", "onnx-ir", "onnxscript", "onnxruntime")
_CHUNK_BYTES = 1 << 20


def adopted(version: Path, cache: ArtifactCache, say: Callable[[str], None]) -> Path:
    """The folder that holds a version's graph: its own, or the cache's where OneFlow saved it.

    Args:
        version: The version folder; never written to.
        cache: Where conversions are kept.
        say: Told in one line when a graph is converted.

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
        say(f"converting {version.parent.name} {version.name}, which OneFlow saved: once, into {cache.folder}")
        _convert(saved, folder)

    return cache.get(_KIND, f"{version.parent.name} {version.name}", key, build)


def _convert(saved: Path, target: Path) -> None:
    from graphkiln.converters.convert import convert
    from graphkiln.converters.recipe import Recipe

    with TemporaryDirectory(prefix="graphkiln-") as temporary:
        recipe = Recipe(source=f"oneflow:{saved}", name="adopted", model_store=Path(temporary), version=1)
        command = f"graphkiln convert oneflow:{saved} --name NAME"
        folder = convert(recipe, command=command, load_picture=_no_pictures, say=lambda _: None)
        for file in folder.iterdir():
            shutil.move(file, target / file.name)


def _no_pictures(*_: object) -> NoReturn:
    raise ConversionError("no pictures are read for a graph of OneFlow")  # its recipe names no samples


def _content(saved: Path) -> str:
    """SHA-256 of all files below a folder and of their names."""
    digest = hashlib.sha256()
    for path in sorted(path for path in saved.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(saved)}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
