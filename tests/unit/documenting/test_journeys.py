"""The page of journeys."""

from __future__ import annotations

import json
from pathlib import Path

from documenting import journeys


def test_a_row_for_each_journey_and_its_commands(tmp_path: Path) -> None:
    commands = [{"command": "graphkiln serve x | y", "seconds": 3.21}, {"command": "graphkiln models", "seconds": 0.5}]
    journey = {
        "name": "a",
        "title": "A way",
        "page": "tutorial.md",
        "given": "Nothing.",
        "seconds": 4.6,
        "load": 2.3,
        "commands": commands,
    }
    recorded = tmp_path / "journeys.json"
    facts = {"machine": "two cores", "date": "today", "place": "a new container"}
    recorded.write_text(json.dumps({"facts": facts, "journeys": [journey]}))
    page = journeys.render(recorded)
    assert "| A way | [tutorial.md](tutorial.md) | 2 | 5 | 2.3 |" in page
    assert "## A way\n\nNothing.\n" in page
    assert "| `graphkiln serve x \\| y` | 3.2 |" in page
    assert "two cores; today; in a new container." in page


def test_what_the_tutorial_took_stands_below(tmp_path: Path) -> None:
    recorded = tmp_path / "journeys.json"
    facts = {"machine": "two cores", "date": "today", "place": "an empty folder"}
    steps = [{"command": "python digits.py", "seconds": 7.04}]
    tutorial = {"facts": facts, "seconds": 61.4, "load": 2.5, "commands": steps}
    recorded.write_text(json.dumps({"facts": facts, "journeys": [], "tutorial": tutorial}))
    page = journeys.render(recorded)
    assert "\n## The tutorial\n" in page
    assert (
        "): 61 s, without installing, reading and\ntyping. two cores; today; in an empty folder. Load: 2.5.\n" in page
    )
    assert page.endswith("| `python digits.py` | 7.0 |\n")
