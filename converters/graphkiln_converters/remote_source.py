"""A source that lies in a remote store: fetched for as long as it is converted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.repository.remote_address import RemoteAddress, is_remote
from graphkiln_backend.repository.remote_model import fetch_file

_SUFFIXES = (".onnx", ".pt2", ".skops", ".keras", ".pt", ".pth")
_KINDS = ("torchscript", "sklearn", "keras")
"""Kinds of sources that are one file."""


def remote_part(source: str) -> tuple[str, str]:
    """A source's kind with its colon, or nothing, and the address of its file; no address where it is none."""
    kind, colon, location = source.partition(":")
    if colon and kind in _KINDS and is_remote(location):
        return f"{kind}:", location
    return "", source if is_remote(source) else ""


@contextmanager
def local_source(source: str) -> Iterator[str]:
    """The source as one of this machine.

    Args:
        source: As the recipe names it.

    Raises:
        ConversionError: The address names no file of a known kind.
        RemoteStoreError: The file cannot be read.
    """
    kind, text = remote_part(source)
    if not text:
        yield source
        return
    if text.startswith(("http://", "https://")):
        raise ConversionError(f"{text} is a web page", hint="download the file, and convert that")
    if PurePosixPath(text).suffix not in _SUFFIXES:
        raise ConversionError(f"{text} names no file of a model", hint=f"expected one of *{', *'.join(_SUFFIXES)}")
    address = RemoteAddress.parse(text)
    if address is None:
        raise ConversionError(f"{text} is no address")
    with TemporaryDirectory(prefix="graphkiln-") as folder:
        yield f"{kind}{fetch_file(address, Path(folder))}"
