"""What a running server served before a search, on the disk until it is put back: a tuner may be killed meanwhile.

Triton keeps the configuration that came with a load in memory alone. So nothing on the server tells a candidate, which
a search that died has left there, from what the server's owner has loaded. The file is locked as long as a search has
the model: another one would measure its candidates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphkiln.tuning.journal import Journal
from graphkiln_backend.graph.closing import Closeable

Config = Mapping[str, Any]
_ORIGINAL, _CANDIDATE, _PUT_BACK = "original", "candidate", "put_back"


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
        name = hashlib.sha256(f"{url} {model}".encode()).hexdigest()[:16]
        self._journal = Journal(folder / f"served-{name}.jsonl", {"server": url, "model": model})

    @property
    def original(self) -> Config | None:
        """What is to be put back; None where that is done."""
        return next((event[_ORIGINAL] for event in self._left()), None)

    @property
    def candidates(self) -> list[Config]:
        """What was loaded in its place."""
        return [event[_CANDIDATE] for event in self._left()]

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
        """The events since something was put back the last time."""
        events = self._journal.events
        last = max((number for number, event in enumerate(events, 1) if _PUT_BACK in event), default=0)
        return events[last:]
