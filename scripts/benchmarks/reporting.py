"""Save results of benchmarks as JSON, and write `docs/benchmarks.md` and the tables of other pages from them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from graphkiln.reporting.json_text import json_text
from graphkiln.story.variants import machine_facts

# Parts of a long benchmark: each is saved when it is measured, and an interrupted benchmark continues.


class Parts:
    """Parts of a benchmark, measured under the same conditions: rounds, seconds, machine, versions."""

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
        """Read a saved part; None if it was not measured under the same conditions."""
        path = self._path(name)
        kept = json.loads(path.read_text()) if path.exists() else {}
        return kept.get("measured") if kept.get("conditions") == self._conditions else None

    def measure(self, name: str, measure: Callable[[], Any], *, again: bool = False) -> Any:
        """Read a part, or measure it."""
        kept = None if again else self.read(name)
        if kept is not None:
            # The saved result will have today's date and commit: print the age of the part.
            measured = datetime.fromtimestamp(self._path(name).stat().st_mtime, UTC).strftime("%Y-%m-%d %H:%M UTC")
            print(f"{name}: kept, as measured {measured} (--only '{name}' measures it again)", file=sys.stderr)
            return kept
        self._folder.mkdir(parents=True, exist_ok=True)
        document = {"conditions": self._conditions, "measured": measure()}
        partial = self._path(name).with_suffix(".partial")
        partial.write_text(json.dumps(document, indent=1))
        partial.replace(self._path(name))
        return self.read(name)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "docs" / "benchmarks"
PAGE = REPOSITORY / "docs" / "benchmarks.md"
# Pages with tables between marks, which name the result and its columns.
MARKED = tuple(REPOSITORY / page for page in ("README.md", "docs/images.md"))

_MARKED = re.compile(r"(<!-- docs/benchmarks/(?P<name>\w+)\.json: (?P<columns>[^>]*) -->\n).*?(<!-- end -->)", re.S)
_INTRODUCTION = """# Benchmarks

Written by `scripts/benchmark all` from the JSON files in `docs/benchmarks/`; not by hand. Every table is one run in
which all set-ups took turns: its ratios can be trusted further than figures of different tables.
"""


def save_result(
    name: str, title: str, command: str, rows: Sequence[dict[str, Any]], load_average: float | None = None
) -> None:
    """Write one result as JSON.

    Args:
        name: Name of the benchmark.
        title: Measured quantity, and the reference of ratios.
        command: Command to repeat it.
        rows: The table; all rows have the same columns.
        load_average: Load average of the minute before it began; None if unknown.
    """
    RESULTS.mkdir(exist_ok=True)
    facts = {**machine_facts(), "commit": _commit()}
    if load_average is not None:
        facts["load average"] = f"{load_average:.2f}"
    result = {"title": title, "command": command, "facts": facts, "rows": list(rows)}
    partial = RESULTS / f"{name}.partial"
    partial.write_text(json_text(result, indent=1) + "\n")
    partial.replace(RESULTS / f"{name}.json")  # atomically


def write_tables() -> None:
    """Write the page of benchmarks, and the tables of other pages, from all results."""
    PAGE.write_text(render_page())
    for page in MARKED:
        page.write_text(fill_tables(page.read_text()))


def render_page() -> str:
    """Make the page from all results; what holds for all of them, or for all rows of a table, is written once."""
    results = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    facts = {name: _facts(result["facts"]) for name, result in results.items()}
    shared = [fact for fact in next(iter(facts.values()), []) if all(fact in each for each in facts.values())]
    sections = [_INTRODUCTION]
    if shared:
        sections.append(f"All of them: {'; '.join(shared)}.\n")
    for name, result in results.items():
        rows = result["rows"]
        varying = [column for column in rows[0] if len({str(row[column]) for row in rows}) > 1] or list(rows[0])
        constant = [f"{column}: {rows[0][column]}" for column in rows[0] if column not in varying]
        own = [*constant, *(fact for fact in facts[name] if fact not in shared)]
        sections.append(
            f"## {name}: {result['title']}\n\n    {result['command']}\n\n{_table(rows, varying)}\n{'; '.join(own)}.\n"
        )
    return "\n".join(sections)


def _facts(facts: Mapping[str, str]) -> list[str]:
    """Machine, time and versions as short texts."""
    load = [f"load average before it {facts['load average']}"] if "load average" in facts else []
    named = [facts["machine"], f"GPU: {facts['gpu']}", *facts["system"].split(", "), facts["date"]]
    return [*named, f"commit {facts['commit']}", *load, *facts["versions"].split(", ")]


def fill_tables(text: str) -> str:
    """Update the marked tables of a page."""

    def fill(found: re.Match[str]) -> str:
        path = RESULTS / f"{found['name']}.json"
        if not path.exists():
            return found[0]  # not measured yet
        result = json.loads(path.read_text())
        columns = [column.strip() for column in found["columns"].split(",")]
        return f"{found[1]}{_table(result['rows'], columns)}{found[4]}"

    return _MARKED.sub(fill, text)


def _table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    numbers = {column for column in columns if all(row[column] is None or _is_number(row[column]) for row in rows)}
    lines = [columns, ["---:" if column in numbers else "---" for column in columns]]
    # NaN and infinity are null in JSON.
    lines += [["-" if row[column] is None else str(row[column]) for column in columns] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or bool(re.fullmatch(r"-?|[\d.]+x?", str(value)))


def _commit() -> str:
    shown = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return shown.stdout.strip() or "unknown"
