"""Report of a soak as text, JSON, and tables of `docs/operations.md`."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from soaking.models import REPOSITORY
from soaking.soak import RECOVERY_LIMIT_S, Injection, Result
from soaking.traffic import DEADLINE_S
from soaking.watching import GROWTH_LIMIT, GROWTH_LIMIT_MB, grows, leaking

_GOAL_S = 5.0
_VERDICTS = ("right", "refused", "wrong", "lost")
_SHOWN = 10


def summarize(injections: list[Injection]) -> list[dict[str, Any]]:
    """Summarize injections by fault, in alphabetical order.

    Returns:
        For each `fault`: `times`; `median_s` and `worst_s` of the recovery time, None beyond the limit; `within_goal`,
        the number within 5 s; `restarts`, `unready` and `errors` as in `Injection`; distinct texts of `trouble`.
    """
    names = sorted({injection.fault for injection in injections})
    return [_summary(name, [each for each in injections if each.fault == name]) for name in names]


def _summary(name: str, injections: list[Injection]) -> dict[str, Any]:
    seconds = [each.ready_again_s for each in injections if each.ready_again_s is not None]
    return {
        "fault": name,
        "times": len(injections),
        "median_s": round(statistics.median(seconds), 2) if seconds else None,
        "worst_s": round(max(seconds), 2) if len(seconds) == len(injections) else None,
        "within_goal": sum(value <= _GOAL_S for value in seconds),
        "restarts": total(each.restarts for each in injections),
        "unready": total(each.unready for each in injections),
        "errors": total(each.errors for each in injections),
        "trouble": sorted({each.trouble for each in injections if each.trouble}),
    }


def failures(results: list[Result]) -> list[str]:
    """Describe why the soak has failed; empty if it has not."""
    return [f"{result.mode}: {failure}" for result in results for failure in failures_of(result)]


def failures_of(result: Result) -> list[str]:
    """Describe why the soak of one mode has failed."""
    totals = Counter(total(result.counts.values()))
    unrecovered = [each.fault for each in result.injections if each.ready_again_s is None]
    counted = [each for each in result.injections if each.cause and not each.trouble]
    leaks = leaking(result.processes)
    uncounted = sorted({each.fault for each in counted if not each.restarts.get(each.cause)})
    checks = {
        f"{totals['wrong']} wrong answers": totals["wrong"],
        f"{totals['lost']} requests without an answer or an error within {DEADLINE_S:.0f} s": totals["lost"],
        f"{result.stuck} senders still wait": result.stuck,
        f"not ready again within {RECOVERY_LIMIT_S:.0f} s: {', '.join(unrecovered)}": unrecovered,
        f"{len(result.unexplained)} requests refused while no fault was at work": result.unexplained,
        f"readiness failed {len(result.unready)} times while no fault was at work": result.unready,
        f"memory grew by more than {GROWTH_LIMIT:.0%} and {GROWTH_LIMIT_MB:.0f} MB": bool(result.figures)
        and grows(result.figures),
        f"memory of processes that are no longer young grew: {', '.join(leaks)}": leaks,
        f"left behind: {', '.join(result.left)}": result.left,
        f"SIGTERM ended with {result.stops}": any(code for code, _ in result.stops),
        f"not counted in graphkiln_restarts_total: {', '.join(uncounted)}": uncounted,
        "no request was answered": not totals["right"],
        **{f"{each.fault}: {each.trouble}": True for each in result.injections if each.trouble},
        **{note: True for note in result.notes if note.startswith("ended early")},
    }
    return [text for text, failed in checks.items() if failed]


def total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Add up counts, the largest first."""
    added: Counter[str] = Counter()
    for each in counts:
        added.update(each)
    return dict(added.most_common())


def to_json(results: list[Result]) -> dict[str, Any]:
    """Convert to plain data: results of each mode, and totals of faults and requests."""
    return {
        "seed": results[0].seed,
        "seconds": sum(result.seconds for result in results),
        "modes": [asdict(result) for result in results],
        "faults": summarize([each for result in results for each in result.injections]),
        "totals": total(verdicts for result in results for verdicts in result.counts.values()),
        "failures": failures(results),
    }


def to_text(results: list[Result]) -> str:
    """Format for a terminal: each mode, the table of faults, and the reasons of a failure."""
    lines = [line for result in results for line in (*_lines(result), "")]
    failed = [f"FAILED: {failure}" for failure in failures(results)]
    return "\n".join([*lines, fault_table(to_json(results)), *(failed or ["passed"])])


def _lines(result: Result) -> list[str]:
    return [
        f"{result.mode}: {result.seconds / 60:.1f} minutes, seed {result.seed}",
        f"first start: every model answered after {result.first_start_s:.1f} s",
        *(f"{sender}: {_most(verdicts, 9)}" for sender, verdicts in result.counts.items()),
        *(f"{name}: {value}" for name, value in result.figures.items()),
        f"SIGTERM: {', '.join(f'code {code} after {seconds:.1f} s' for code, seconds in result.stops)}",
        f"left behind: {', '.join(result.left) or 'nothing'}",
        *result.notes,
        *(f"wrong or lost: {each.sender}: {each.detail}" for each in result.bad[:_SHOWN]),
        *(f"refused without a fault: {each.sender}: {each.detail}" for each in result.unexplained[:_SHOWN]),
        *(f"not ready without a fault: {text}" for text in result.unready[:_SHOWN]),
    ]


# Tables of `docs/operations.md`, from the runs in `docs/soak/*.json`.

PAGE = REPOSITORY / "docs" / "operations.md"
RESULTS = REPOSITORY / "docs" / "soak"
_MARKED = re.compile(r"(<!-- docs/soak/(?P<name>\w+)\.json -->\n).*?(<!-- end -->)", re.S)
_MOST_SHOWN = 3
_ROLES = ("supervisor", "tritonserver", "instance of digits/1", "instance of scaled/1")


def write_tables() -> None:
    """Update the page's tables; those without a saved run stay unchanged."""
    PAGE.write_text(fill(PAGE.read_text()))


def fill(text: str) -> str:
    """Return the page with updated tables."""

    def table(found: re.Match[str]) -> str:
        path = RESULTS / f"{found['name']}.json"
        if not path.exists():
            return found[0]
        return f"{found[1]}{fault_table(json.loads(path.read_text()))}{found[3]}"

    return _MARKED.sub(table, text)


def fault_table(run: dict[str, Any]) -> str:
    """Table of faults, a line about those that nobody noticed and one about the traffic, and the table of memory."""
    unnoticed = [each for each in run["faults"] if _is_unnoticed(each)]
    rows = [
        "| fault | times | ready again, median | worst | restarts | what clients saw |",
        "|---|---:|---:|---:|---|---|",
    ]
    rows += [_fault_row(each) for each in run["faults"] if each not in unnoticed]
    if unnoticed:
        names = "; ".join(f"{each['fault']} ({each['times']})" for each in unnoticed)
        rows += ["", f"No restart, no error, always ready: {names}."]
    totals = run["totals"]
    counts = ", ".join(f"{totals.get(verdict, 0)} {verdict}" for verdict in _VERDICTS)
    summary = f"{run['seconds'] / 60:.0f} minutes, seed {run['seed']}. Requests: {counts}."
    return "\n".join([*rows, "", summary, "", *_memory_table(run.get("modes", [])), ""])


def _is_unnoticed(each: dict[str, Any]) -> bool:
    return each["worst_s"] == 0 and not each["restarts"] and not each["errors"]


def _memory_table(modes: list[dict[str, Any]]) -> list[str]:
    """Table of total memory, and of the longest-lived process of each role."""
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


def _fault_row(each: dict[str, Any]) -> str:
    seconds = [_seconds_cell(each[key]) for key in ("median_s", "worst_s")]
    cells = [each["fault"], each["times"], *seconds, _most(each["restarts"], 9) or "-", _most(each["errors"]) or "-"]
    return f"| {' | '.join(map(str, cells))} |"


def _seconds_cell(value: float | None) -> str:
    """Format a recovery time; 0 means that the service stayed ready."""
    if value is None:
        return "never"
    return f"{value:.1f} s" if value else "stays"


def _most(counts: Mapping[str, int], shown: int = _MOST_SHOWN) -> str:
    most = sorted(counts.items(), key=lambda item: -item[1])
    more = f", {len(most) - shown} other kinds" if len(most) > shown else ""
    return ", ".join(f"{count} {name}" for name, count in most[:shown]) + more
