"""What a start asks of a graph's file, told without parsing it where it is known from before.

A graph of 100 MB takes 0.2 s to parse and to look through, and the library that parses it 40 ms and 15 MB, in each of
forty instances. Whoever has kept what an earlier start read, by the hash of the file, hands it in here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.graph.files import stamp_of
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature

_MOST_FILES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphFacts:
    """What a file says of a graph whose outputs are tensors, and whose weights lie in the file.

    Attributes:
        signature: As `onnx_file.read_signature` reads it.
        precision: As `onnx_file.read_precision` reads it.
    """

    signature: Signature
    precision: Precision


@dataclass(frozen=True, slots=True)
class _Known:
    stamp: tuple[int, ...]
    sha256: str
    facts: GraphFacts | None


_known: dict[Path, _Known] = {}


def remember_facts(path: Path, stamp: tuple[int, ...], sha256: str, facts: GraphFacts | None) -> None:
    """Takes note of what a file says, as long as it stays the same.

    Args:
        path: The file.
        stamp: As `stamp_of` told it before the file was read.
        sha256: Of its content.
        facts: What it says; None where only the hash is known.
    """
    while len(_known) >= _MOST_FILES:
        _known.pop(next(iter(_known)))
    _known[path] = _Known(stamp, sha256, facts)


def known_facts(path: Path) -> GraphFacts | None:
    """What a file says, or None where it must be read."""
    known = _find(path)
    return known.facts if known else None


def known_sha256(path: Path) -> str:
    """The hash of a file, or nothing where it must be read."""
    known = _find(path)
    return known.sha256 if known else ""


def _find(path: Path) -> _Known | None:
    known = _known.get(path)
    return known if known and known.stamp == stamp_of(path) else None
