"""Facts that an earlier start found out on this machine, kept as JSON files in the artifact cache.

An entry is named by everything that its fact depends on, and by the version of its kind: a changed rule finds no old
entry, an edited comment finds all of them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Generic, TypeVar

from graphkiln_backend.cache.entry import Reservation
from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.base import Placement
from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.graph.errors import CacheError, ManifestError
from graphkiln_backend.repository.onnx_file import GraphFacts

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

_log = logging.getLogger("graphkiln.lowering")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileHash:
    """SHA-256 of a file's content, hexadecimal."""

    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """A comparison of candidates.

    Attributes:
        chosen: Name of the fastest one.
        rates: Samples per second of each; empty where the graph could not be run.
    """

    chosen: str
    rates: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Observations:
    """Facts that hold for every session that is built alike.

    Attributes:
        complete: Whether anything was found out yet.
        placed: Kernels that ran; None where they could not be read.
        mixed: Why the rows of several requests must not be computed together; empty where they may.
        repeats: Whether the same request gave the same bits again and again.
        warmed: The batch sizes that paid for being run before the first request, in the order of the runs; None where
            that failed.
    """

    complete: bool = False
    placed: Placement | None = None
    mixed: str = ""
    repeats: bool = False
    warmed: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind(Generic[T]):
    """A kind of fact.

    Attributes:
        name: Kind of its entries in the cache.
        file: Name of the file in an entry.
        record: Class of the fact.
        version: Part of the key; empty for entries that never had one.
    """

    name: str
    file: str
    record: type[T]
    version: str


# Raise a version when the same graph and session would be found to be something else, or the fields of the class
# change. What a version covers:
# - the hash of a file, by its `stamp_of`: `importing.py`
FILE_HASH = Kind(name="sha256", file="sha256.json", record=FileHash, version="1")
# - signature and precision as read from a graph: `repository/onnx_file.py`
GRAPH_FACTS = Kind(name="facts", file="facts.json", record=GraphFacts, version="1")
# - placement as the engines read it back, mixed rows (`trial.py`, `repository/row_mixing.py`,
#   `training_mode.py`), warm-up sizes (`warmup.py`)
OBSERVATIONS = Kind(name="observations", file="observations.json", record=Observations, version="1")
# - the fastest of several sessions, or of several batch sizes; without a version since the first release
CHOICE = Kind(name="choice", file="measured.json", record=Measurement, version="")


class RememberedFact(Generic[T]):
    """An entry of the cache for one fact, whose lock is held; made by `recall`."""

    def __init__(self, kind: Kind[T], reservation: Reservation | None, what: str) -> None:
        self._kind = kind
        self._reservation = reservation
        self._what = what
        self.value: T | None = self._read()

    @property
    def found_at(self) -> datetime:
        """Time at which an earlier start found the fact, in UTC; now where none did."""
        if self.value is None or self._reservation is None or self._reservation.path is None:
            return datetime.now(UTC)
        return datetime.fromtimestamp((self._reservation.path / self._kind.file).stat().st_mtime, UTC)

    def keep(self, value: T) -> None:
        """Keep a fact unless one is there; a cache that cannot be written is logged and no error."""
        if self._reservation is None or self._reservation.path:
            return
        try:
            with self._reservation.write() as folder:
                (folder / self._kind.file).write_text(json.dumps(encode(value)))
        except CacheError as error:
            _log_forgotten(self._what, error)

    def _read(self) -> T | None:
        path = self._reservation.path if self._reservation else None
        if path is None:
            return None
        try:
            return decode(self._kind.record, json.loads((path / self._kind.file).read_bytes()))
        except (OSError, ValueError, ManifestError) as error:
            _log.warning("%s in %s cannot be read, and is found out again: %s", self._kind.file, path, error)
            return None


@contextmanager
def recall(
    kind: Kind[T], cache: ArtifactCache, model: str, key: Mapping[str, str], what: str = ""
) -> Iterator[RememberedFact[T]]:
    """Look for a fact, and hold its lock until the end of the block: only one process finds it out.

    Args:
        kind: Kind of the fact.
        cache: Holds it.
        model: For people: the model that it is about.
        key: Everything that it depends on, but the version of the kind.
        what: For the log where it cannot be kept; empty to log nothing.
    """
    versioned = {**key, "rules": kind.version} if kind.version else key
    with ExitStack() as held:
        reservation = None
        try:
            reservation = held.enter_context(cache.reserve(kind.name, model, versioned))
        except CacheError as error:
            _log_forgotten(what, error)
        yield RememberedFact(kind, reservation, what)


def _log_forgotten(what: str, error: CacheError) -> None:
    if what:
        _log.warning("%s is not remembered: %s", what, error)
