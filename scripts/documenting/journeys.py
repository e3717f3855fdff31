"""docs/journeys.md: what new users do, in how many commands and seconds, as a run of tests/journeys recorded it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from documenting.text import code, table

_INTRODUCTION = """# Six journeys

What people come for, tried as a new user would: each is a script of at most five commands, all of them taken from these
pages, run by `tests/journeys` in an empty folder against the real server. Written by `scripts/docs` from a recorded run
(`scripts/journeys --record`, in a container with what [the tutorial](tutorial.md) installs and nothing else).

"""
_LOAD = "the machine's load average of five minutes at the end, which two busy cores bring to 2 without any other work"


def render(recorded: Path) -> str:
    """The page.

    Args:
        recorded: What the tests wrote: facts of the machine, and for each journey its commands, seconds and load.
    """
    document: dict[str, Any] = json.loads(recorded.read_text())
    rows = [
        (
            each["title"], f"[{each['page']}]({each['page']})", str(len(each["commands"])), f"{each['seconds']:.0f}",
            str(each.get("load", "-")),
        )
        for each in document["journeys"]
    ]  # fmt: skip
    listed = table(["journey", "from", "commands", "seconds", "load"], rows)
    facts = document["facts"]
    place = f"{facts['machine']}; {facts['date']}; in {facts.get('place', 'an empty folder')}."
    told = f"{place} Seconds include starting and stopping the server; load is {_LOAD}.\n"
    return f"{_INTRODUCTION}{listed}\n{told}\n" + "\n".join(map(_section, document["journeys"]))


def _section(journey: dict[str, Any]) -> str:
    steps = [(code(step["command"]), f"{step['seconds']:.1f}") for step in journey["commands"]]
    return f"## {journey['title']}\n\n{journey['given']}\n\n{table(['command', 'seconds'], steps)}"
