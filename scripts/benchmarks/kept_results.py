"""Results that `scripts/benchmark` kept, read again: of which benchmark, on which machine, and the table."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphkiln_backend.graph.errors import ManifestError

_COMMAND = re.compile(r"scripts/benchmark (\w+)")

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One result.

    Attributes:
        benchmark: Its name, by the command that measured it; by its file's name where it says no command.
        machine: Which it was measured on, with its GPU; empty where it does not say.
        command: What measured it; empty where it does not say.
        title: What its ratios are to.
        rows: The table.
    """

    benchmark: str
    machine: str
    command: str
    title: str
    rows: list[Row]


def read_results(path: Path) -> dict[str, Result]:
    """All results of a folder, or that of a file, by their benchmarks.

    Raises:
        ManifestError: One is no result, or two of a folder are of the same benchmark.
    """
    found: dict[str, Result] = {}
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        result = _read_result(file)
        if result.benchmark in found:
            raise ManifestError(f"{path} holds two results of {result.benchmark}", hint="name one of the files")
        found[result.benchmark] = result
    return found


def _read_result(file: Path) -> Result:
    try:
        document = json.loads(file.read_text())
        rows, facts = _rows(document["rows"]), document.get("facts", {})
        command, title = str(document.get("command", "")), str(document.get("title", ""))
        machine = ", ".join(f"{facts[name]}" for name in ("machine", "gpu") if facts.get(name) not in (None, "none"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(f"{file} is no result of scripts/benchmark: {type(error).__name__}: {error}") from error
    named = _COMMAND.search(command)
    benchmark = named[1] if named else file.stem
    return Result(benchmark=benchmark, machine=machine, command=command, title=title, rows=rows)


def _rows(rows: object) -> list[Row]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise TypeError("its rows are none")
    return rows
