"""What a running server served before a search, on the disk until it is put back: a tuner may be killed meanwhile.

Triton keeps the configuration that came with a load in memory alone. So nothing on the server tells a candidate, which
a search that died has left there, from what the server's owner has loaded. The file is locked as long as a search has
the model: another one would measure its candidates.

A server has many addresses (a name and a number, HTTP and gRPC). Those of this machine count as one name; of other
addresses, what is served tells whether a search has left it there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graphkiln.tuning.journal import Journal
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.owned_folder import locked_if_dead
from graphkiln_client.transports.endpoint import Endpoint

Config = Mapping[str, Any]
_ORIGINAL, _CANDIDATE, _PUT_BACK = "original", "candidate", "put_back"
_SERVER, _MODEL = "server", "model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """What a search has not put back yet: it was killed, or runs now.

    Attributes:
        server: The address that it was given.
        model: Name of the model.
        original: What was served before.
        candidates: What was loaded in its place.
        file: That says so.
    """

    server: str
    model: str
    original: Config
    candidates: list[Config]
    file: Path


class ServedBefore(Closeable):
    """The configuration of one model on one server, and what was loaded in its place.

    Args:
        folder: Where such files lie.
        url: The server's address.
        model: Name of the model.

    Raises:
        MeasurementError: Another search has the model now, or the file cannot be used.
    """

    def __init__(self, folder: Path, url: str, model: str) -> None:
        self._server, self._model = one_name(url), model
        name = hashlib.sha256(f"{self._server} {model}".encode()).hexdigest()[:16]
        self._journal = Journal(folder / f"served-{name}.jsonl", {_SERVER: self._server, _MODEL: model})

    @property
    def original(self) -> Config | None:
        """What is to be put back; None where that is done."""
        return next((event[_ORIGINAL] for event in self._left()), None)

    @property
    def candidates(self) -> list[Config]:
        """What was loaded in its place."""
        return [event[_CANDIDATE] for event in self._left()]

    def elsewhere(self) -> list[Left]:
        """What searches have not put back that were given another address and a model of the same name."""
        paths = sorted(self._journal.path.parent.glob("served-*.jsonl"))
        found = [left for path in paths if path != self._journal.path for left in _read(path)]
        return [left for left in found if left.model == self._model]

    def note(self, original: Config, candidate: Config) -> None:
        """Writes down what is to be put back, before a candidate is loaded.

        Args:
            original: What the server served.
            candidate: What it will be given.

        Raises:
            MeasurementError: It cannot be written.
        """
        self._journal.append({_ORIGINAL: original, _CANDIDATE: candidate})

    def settle(self) -> None:
        """Writes down that nothing is to be put back any more.

        Raises:
            MeasurementError: It cannot be written.
        """
        self._journal.append({_PUT_BACK: True})

    def close(self) -> None:
        """Removes the file, unless something is to be put back still."""
        if self.original is None:
            self._journal.path.unlink(missing_ok=True)
        self._journal.close()

    def _left(self) -> list[dict[str, Any]]:
        return _since_put_back(self._journal.events)


def left_behind(folder: Path) -> list[Left]:
    """What searches of this user have not put back that were killed, on whichever server.

    Args:
        folder: Where their files lie.
    """
    found: list[Left] = []
    for path in sorted(folder.glob("served-*.jsonl")):
        with locked_if_dead(path) as dead:
            found += _read(path) if dead else ()
    return found


def _since_put_back(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events since something was put back the last time."""
    last = max((number for number, event in enumerate(events, 1) if _PUT_BACK in event), default=0)
    return events[last:]


def one_name(url: str) -> str:
    """An address without what is secret in it, that of this machine by one name."""
    endpoint = Endpoint.parse(url)
    return str(replace(endpoint, host="localhost") if endpoint.is_local else endpoint)


def _read(path: Path) -> Iterator[Left]:
    """What a search has noted; it may be writing now, so that a torn line does not count."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        said, *events = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
        events = _since_put_back(events)
        if events:
            candidates = [event[_CANDIDATE] for event in events]
            yield Left(
                server=str(said[_SERVER]),
                model=str(said[_MODEL]),
                original=events[0][_ORIGINAL],
                candidates=candidates,
                file=path,
            )
