"""What came of the cases so far, in a file that grows case by case: a run that was ended goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from conforming.cases import Case
from conforming.outcome import Outcome, Verdict


class Record:
    """Outcomes of one way to ask, by the served name of the case.

    Args:
        path: The file, a JSON document per line; made when missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.outcomes = dict(_read(path)) if path.exists() else {}

    def add(self, case: Case, outcome: Outcome) -> None:
        """Keeps an outcome, on disk as well."""
        self.outcomes[case.served_name] = outcome
        line = {"case": case.served_name, "verdict": outcome.verdict, "reason": outcome.reason}
        with self._path.open("a") as file:
            file.write(f"{json.dumps(line)}\n")

    def pending(self, cases: Iterable[Case]) -> list[Case]:
        """The cases of which nothing is known yet."""
        return [case for case in cases if case.served_name not in self.outcomes]


def _read(path: Path) -> Iterator[tuple[str, Outcome]]:
    for line in path.read_text().splitlines():
        with suppress(ValueError):  # the run was ended while it wrote: the case is asked again
            known = json.loads(line)
            yield known["case"], Outcome(Verdict(known["verdict"]), known["reason"])
