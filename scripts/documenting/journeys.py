"""docs/journeys.md: what new users do, in how many commands and seconds, as a run of tests/journeys recorded it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from documenting.text import code, table

_INTRODUCTION = """# Six journeys

What people come for, tried as a new user would: each is a script of at most five commands, all of them taken from these
pages, run by `tests/journeys` in an empty folder against the real server. Written by `scripts/docs` from a recorded run
(`scripts/journeys --record`, in a container with what [the tutorial](tutorial.md) installs and nothing else).

"""
_LOAD = "the machine's load average of five minutes at the end, which two busy cores bring to 2 without any other work"
_TUTORIAL = """
## The tutorial

All of its commands, by the test that follows [the page](tutorial.md): {seconds:.0f} s, without installing, reading and
typing. {place} Load: {load}.

"""


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
    told = f"{_place(document)} Seconds include starting and stopping the server; load is {_LOAD}.\n"
    sections = "\n".join(map(_section, document["journeys"]))
    return f"{_INTRODUCTION}{listed}\n{told}\n{sections}{_tutorial(document.get('tutorial'))}"


def _place(document: Mapping[str, Any]) -> str:
    facts = document["facts"]
    return f"{facts['machine']}; {facts['date']}; in {facts.get('place', 'an empty folder')}."


def _section(journey: dict[str, Any]) -> str:
    return f"## {journey['title']}\n\n{journey['given']}\n\n{_steps(journey)}"


def _tutorial(recorded: Mapping[str, Any] | None) -> str:
    if recorded is None:
        return ""
    told = _TUTORIAL.format(seconds=recorded["seconds"], load=recorded["load"], place=_place(recorded))
    return told + _steps(recorded)


def _steps(recorded: Mapping[str, Any]) -> str:
    steps = [(code(step["command"]), f"{step['seconds']:.1f}") for step in recorded["commands"]]
    return table(["command", "seconds"], steps)
