"""The six journeys of new users: scripts of at most five commands, all from the documentation."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from walkthrough import Step

FOLDER = Path(__file__).parents[1] / "journeys"
MOST_COMMANDS = 5
# Environment variable with the place where scripts/journeys runs them.
PLACE_VARIABLE = "GRAPHKILN_JOURNEYS_PLACE"
EMPTY_FOLDER = "an empty folder, in the environment of the tests"
# A block of Python among the steps of the tutorial.
PROGRAM = "the program of the page"
_FACT = re.compile(r"^# (title|page|given): (.+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Journey:
    """Goal of a new user, and the commands that reach it.

    Attributes:
        name: Of its script.
        title: What they want.
        page: Where the commands stand, below `docs`.
        given: What they have already.
        commands: What they type.
    """

    name: str
    title: str
    page: str
    given: str
    commands: tuple[str, ...]

    @classmethod
    def read(cls, name: str) -> Journey:
        """Read a script."""
        text = (FOLDER / f"{name}.sh").read_text()
        facts: dict[str, str] = dict(_FACT.findall(text))
        commands = tuple(line for line in text.splitlines() if line and not line.startswith("#"))
        return cls(name=name, commands=commands, title=facts["title"], page=facts["page"], given=facts["given"])


def record(file: Path, journey: Journey, steps: list[Step], seconds: float, facts: dict[str, Any]) -> None:
    """Add the measured steps of a journey to a JSON file.

    Args:
        file: JSON; made where it is missing.
        journey: Which.
        steps: What was done, in the order in which it ended.
        seconds: From the first command until everything was stopped.
        facts: Of the machine.
    """
    document = _read(file)
    known = {each["name"]: each for each in document["journeys"]}
    took = {step.command: step.seconds for step in steps}
    commands = [_told(command, took[command]) for command in journey.commands]
    known[journey.name] = {
        "name": journey.name, "title": journey.title, "page": journey.page, "given": journey.given,
        "seconds": round(seconds, 1), "load": round(os.getloadavg()[1], 1), "commands": commands,
    }  # fmt: skip
    _write(file, {**document, "facts": _facts(facts), "journeys": list(known.values())})


def record_tutorial(file: Path, steps: list[Step], seconds: float, facts: dict[str, Any]) -> None:
    """Add the measured steps of the tutorial to the same file.

    Args:
        file: As above.
        steps: What was done; a program of the page has its place in the page for a command.
        seconds: From the first command until everything was stopped.
        facts: Of the machine.
    """
    commands = [
        _told(PROGRAM if step.command.startswith("tutorial.md:") else step.command, step.seconds) for step in steps
    ]
    took = {"seconds": round(seconds, 1), "load": round(os.getloadavg()[1], 1), "commands": commands}
    _write(file, {**_read(file), "tutorial": {"facts": _facts(facts), **took}})


def _told(command: str, seconds: float) -> dict[str, Any]:
    return {"command": command, "seconds": round(seconds, 1)}


def _facts(facts: dict[str, Any]) -> dict[str, Any]:
    return {**{key: facts[key] for key in ("machine", "date")}, "place": os.environ.get(PLACE_VARIABLE, EMPTY_FOLDER)}


def _read(file: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"journeys": []}
    return document


def _write(file: Path, document: dict[str, Any]) -> None:
    file.write_text(json.dumps(document, indent=1) + "\n")
