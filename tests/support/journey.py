"""The six journeys of new users: scripts of at most five commands, all of them from the documentation."""

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
PLACE_VARIABLE = "GRAPHKILN_JOURNEYS_PLACE"
"""Environment variable in which scripts/journeys says where they run."""
EMPTY_FOLDER = "an empty folder, in the environment of the tests"
_FACT = re.compile(r"^# (title|page|given): (.+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Journey:
    """What somebody wants, and how they get it.

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
        """Reads a script."""
        text = (FOLDER / f"{name}.sh").read_text()
        facts: dict[str, str] = dict(_FACT.findall(text))
        commands = tuple(line for line in text.splitlines() if line and not line.startswith("#"))
        return cls(name=name, commands=commands, title=facts["title"], page=facts["page"], given=facts["given"])


def record(file: Path, journey: Journey, steps: list[Step], seconds: float, facts: dict[str, Any]) -> None:
    """Puts what a journey took into a file of all of them.

    Args:
        file: JSON; made where it is missing.
        journey: Which.
        steps: What was done, in the order in which it ended.
        seconds: From the first command until everything was stopped.
        facts: Of the machine.
    """
    known = {each["name"]: each for each in json.loads(file.read_text())["journeys"]} if file.exists() else {}
    took = {step.command: step.seconds for step in steps}
    commands = [{"command": command, "seconds": round(took[command], 1)} for command in journey.commands]
    known[journey.name] = {
        "name": journey.name, "title": journey.title, "page": journey.page, "given": journey.given,
        "seconds": round(seconds, 1), "load": round(os.getloadavg()[1], 1), "commands": commands,
    }  # fmt: skip
    kept = {**{key: facts[key] for key in ("machine", "date")}, "place": os.environ.get(PLACE_VARIABLE, EMPTY_FOLDER)}
    file.write_text(json.dumps({"facts": kept, "journeys": list(known.values())}, indent=1) + "\n")
