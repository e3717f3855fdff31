"""Parts of a benchmark that takes long: each is kept as soon as it is done, and what was interrupted goes on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from graphkiln.story.request import machine_facts


class Parts:
    """What was measured under the same conditions: rounds, seconds, machine, versions.

    Args:
        folder: Where they are kept; made with the first one.
        rounds: That count.
        seconds: Of one measurement.
    """

    def __init__(self, folder: Path, rounds: int, seconds: float) -> None:
        facts = machine_facts()
        self._folder = folder
        self._conditions = {
            "rounds": rounds,
            "seconds": seconds,
            "machine": facts["machine"],
            "versions": facts["versions"],
        }

    def read(self, name: str) -> Any:
        """A part as JSON has it; None where it was not measured, or under other conditions."""
        path = self._path(name)
        kept = json.loads(path.read_text()) if path.exists() else {}
        return kept.get("measured") if kept.get("conditions") == self._conditions else None

    def measure(self, name: str, measure: Callable[[], Any], *, again: bool = False) -> Any:
        """A part, measured where it is not there.

        Args:
            name: Of the part.
            measure: Returns what JSON can hold.
            again: Measure it anew, also where it is there.
        """
        kept = None if again else self.read(name)
        if kept is not None:
            self._tell_kept(name)
            return kept
        self._folder.mkdir(parents=True, exist_ok=True)
        document = {"conditions": self._conditions, "measured": measure()}
        partial = self._path(name).with_suffix(".partial")
        partial.write_text(json.dumps(document, indent=1))
        partial.replace(self._path(name))
        return self.read(name)

    def _tell_kept(self, name: str) -> None:
        """Says of when a part is that is not measured now: what is saved has today's date and commit."""
        measured = datetime.fromtimestamp(self._path(name).stat().st_mtime, UTC).strftime("%Y-%m-%d %H:%M UTC")
        print(f"{name}: kept, as measured {measured} (--only '{name}' measures it again)", file=sys.stderr)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"
