"""Writes the tables of `docs/operations.md` from what the last kept runs have seen, as `docs/soak/*.json` have it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from soaking.models import REPOSITORY

PAGE = REPOSITORY / "docs" / "operations.md"
RESULTS = REPOSITORY / "docs" / "soak"
_MARKED = re.compile(r"(<!-- docs/soak/(?P<name>\w+)\.json -->\n).*?(<!-- end -->)", re.S)
_SHOWN = 3
_ROLES = ("supervisor", "tritonserver", "instance of digits/1", "instance of scaled/1")


def write_tables() -> None:
    """Fills the page's tables; those whose run was not kept stay as they are."""
    PAGE.write_text(fill(PAGE.read_text()))


def fill(text: str) -> str:
    """A page with its tables as the kept runs have them; all else stays."""

    def table(found: re.Match[str]) -> str:
        path = RESULTS / f"{found['name']}.json"
        if not path.exists():
            return found[0]
        return f"{found[1]}{_TABLES[found['name']](json.loads(path.read_text()))}{found[3]}"

    return _MARKED.sub(table, text)


def fault_table(run: dict[str, Any]) -> str:
    """A row for each kind of fault, a line about the traffic beside them, and the memory of each kind of process."""
    rows = [
        "| fault | times | ready again, median | worst | restarts | what clients saw |",
        "|---|---:|---:|---:|---|---|",
    ]
    rows += [_fault_row(each) for each in run["faults"]]
    totals = run["totals"]
    counts = ", ".join(f"{totals.get(verdict, 0)} {verdict}" for verdict in ("right", "refused", "wrong", "lost"))
    summary = f"{run['seconds'] / 60:.0f} minutes, seed {run['seed']}. Requests: {counts}."
    return "\n".join([*rows, "", summary, "", *_memory_table(run.get("modes", [])), ""])


def _memory_table(modes: list[dict[str, Any]]) -> list[str]:
    """What all processes together took, and the curves of those that lived longest."""
    rows = ["| memory | processes | MB | MB/min, once no longer young |", "|---|---:|---|---:|"]
    for mode in modes:
        figures = mode["figures"]
        span = f"{figures.get('start_mb')} at the start, {figures.get('end_mb')} at the end"
        rows.append(f"| **{mode['mode']}**: all | - | {span} | - |")
        rows += [_memory_row(role, each) for role, each in mode["processes"].items() if role in _ROLES]
    return rows


def _memory_row(role: str, each: dict[str, Any]) -> str:
    minutes = list(each["mb_by_minute"].values())
    slope = each["slope_mb_per_minute"]
    curve = f"{minutes[0]:.0f} in its first minute, {minutes[-1]:.0f} in its {_ordinal(len(minutes))}"
    return f"| {role} | {each['processes']} | {curve} | {'-' if slope is None else slope} |"


def _ordinal(number: int) -> str:
    ending = "th" if 10 < number % 100 < 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def fuzz_table(run: dict[str, Any]) -> str:
    """A row for each strategy of the fuzzer."""
    rows = ["| requests | cases | responses |", "|---|---:|---|"]
    for kind, count in sorted(run["sent"].items()):
        statuses = {key.partition(": ")[2]: n for key, n in run["statuses"].items() if key.startswith(f"{kind}: ")}
        rows.append(f"| {kind} | {count} | {_most(statuses, len(statuses))} |")
    worst = max(run["recoveries"], default=0.0)
    back = f"; the server was brought back {len(run['killers'])} times, within {worst:.1f} s" if worst else ""
    return "\n".join([*rows, "", f"{run['cases']} cases, seed {run['seed']}{back}.", ""])


def _fault_row(each: dict[str, Any]) -> str:
    seconds = [_seconds(each[key]) for key in ("median_s", "worst_s")]
    cells = [each["fault"], each["times"], *seconds, _most(each["restarts"], 9) or "-", _most(each["errors"]) or "-"]
    return f"| {' | '.join(map(str, cells))} |"


def _seconds(value: float | None) -> str:
    """0 means that the service was never seen to be anything but ready."""
    if value is None:
        return "never"
    return f"{value:.1f} s" if value else "stays"


def _most(counts: dict[str, int], shown: int = _SHOWN) -> str:
    most = sorted(counts.items(), key=lambda item: -item[1])
    more = f", {len(most) - shown} other kinds" if len(most) > shown else ""
    return ", ".join(f"{count} {name}" for name, count in most[:shown]) + more


_TABLES: dict[str, Callable[[dict[str, Any]], str]] = {"soak": fault_table, "fuzz": fuzz_table}
