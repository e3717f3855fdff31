"""The report of a soak: a table of at most 80 columns, and JSON."""

from __future__ import annotations

import json
import re
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from soaking.models import REPOSITORY
from soaking.soak import GROWTH_LIMIT, GROWTH_LIMIT_MB, RECOVERY_LIMIT_S, Injection, Result, grows, leaking
from soaking.traffic import DEADLINE_S, Outcome

_GOAL_S = 5.0
_WIDTH = 80
_VERDICTS = ("right", "refused", "wrong", "lost")
_SHOWN = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultSummary:
    """All injections of one kind of fault.

    Attributes:
        fault: Its name.
        times: How often it was injected.
        median_s: Median seconds until ready again; None when it never was within the limit.
        worst_s: The most; None when it was beyond the limit once.
        within_goal: How often it was ready again within 5 s.
        restarts: What the service counted, by cause.
        unready: Statuses of readiness other than 200.
        errors: What clients saw.
        trouble: What went wrong, once each.
    """

    fault: str
    times: int
    median_s: float | None
    worst_s: float | None
    within_goal: int
    restarts: dict[str, int]
    unready: dict[str, int]
    errors: dict[str, int]
    trouble: list[str]


def summarize(injections: list[Injection]) -> list[FaultSummary]:
    """By fault, in alphabetical order."""
    names = sorted({injection.fault for injection in injections})
    return [_summary(name, [each for each in injections if each.fault == name]) for name in names]


def _summary(name: str, injections: list[Injection]) -> FaultSummary:
    seconds = [each.ready_again_s for each in injections if each.ready_again_s is not None]
    restarts: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    unready: Counter[str] = Counter()
    for each in injections:
        unready.update(each.unready)
        restarts.update(each.restarts)
        errors.update(each.errors)
    return FaultSummary(
        fault=name,
        times=len(injections),
        median_s=round(statistics.median(seconds), 2) if seconds else None,
        worst_s=round(max(seconds), 2) if len(seconds) == len(injections) else None,
        within_goal=sum(value <= _GOAL_S for value in seconds),
        restarts=dict(restarts),
        unready=dict(unready.most_common()),
        errors=dict(errors.most_common()),
        trouble=sorted({each.trouble for each in injections if each.trouble}),
    )


def failures(results: list[Result]) -> list[str]:
    """Describe why the soak has failed; empty if it has not."""
    return [f"{result.mode}: {failure}" for result in results for failure in failures_of(result)]


def failures_of(result: Result) -> list[str]:
    """Describe why the soak of one mode has failed."""
    totals = total(result.counts)
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
        "no request was answered": not totals["right"] and result.only != "faults",
        **{f"{each.fault}: {each.trouble}": True for each in result.injections if each.trouble},
        **{note: True for note in result.notes if note.startswith("ended early")},
    }
    return [text for text, failed in checks.items() if failed]


def total(counts: dict[str, dict[str, int]]) -> Counter[str]:
    """Number of requests by verdict."""
    totals: Counter[str] = Counter()
    for verdicts in counts.values():
        totals.update(verdicts)
    return totals


def to_json(results: list[Result]) -> dict[str, Any]:
    """Everything, as plain data: of each mode, and the faults and requests of all together."""
    totals: Counter[str] = Counter()
    for result in results:
        totals.update(total(result.counts))
    return {
        "seed": results[0].seed,
        "seconds": sum(result.seconds for result in results),
        "modes": [asdict(result) for result in results],
        "faults": [asdict(each) for each in summarize([each for result in results for each in result.injections])],
        "totals": dict(totals),
        "failures": failures(results),
    }


def to_text(results: list[Result]) -> str:
    """The report for a terminal of 80 columns."""
    failed = [line for failure in failures(results) for line in textwrap.wrap(f"FAILED: {failure}", _WIDTH)[:4]]
    return "\n".join([*("\n".join(_lines(result)) for result in results), "", *(failed or ["passed"])])


def _lines(result: Result) -> list[str]:
    """Of one mode."""
    return [
        f"{result.mode}: {result.seconds / 60:.1f} minutes, seed {result.seed}",
        f"first start: every model answered after {result.first_start_s:.1f} s",
        "",
        *_request_lines(result.counts),
        "",
        *_fault_lines(summarize(result.injections)),
        "",
        *(f"{name}: {value}" for name, value in result.figures.items()),
        *_process_lines(result.processes),
        f"SIGTERM: {', '.join(f'code {code} after {seconds:.1f} s' for code, seconds in result.stops)}",
        f"left behind: {', '.join(result.left) or 'nothing'}"[:_WIDTH],
        *result.notes,
        *_outcome_lines("wrong or lost", result.bad),
        *_outcome_lines("refused without a fault", result.unexplained),
        *(f"not ready without a fault: {text}" for text in result.unready[:_SHOWN]),
        "",
    ]


def _request_lines(counts: dict[str, dict[str, int]]) -> list[str]:
    rows = [*counts.items(), ("all", dict(total(counts)))]
    header = f"{'requests':<26}" + "".join(f"{verdict:>10}" for verdict in _VERDICTS)
    return [header, *(f"{name:<26}" + "".join(f"{row.get(v, 0):>10}" for v in _VERDICTS) for name, row in rows)]


def _fault_lines(summaries: list[FaultSummary]) -> list[str]:
    lines = [f"{'fault':<38}{'times':>6}{'ready again: median':>20}{'worst':>8}{'<= 5 s':>8}"]
    for each in summaries:
        figures = f"{_seconds(each.median_s):>20}{_seconds(each.worst_s):>8}{each.within_goal:>8}"
        lines.append(f"{each.fault:<38}{each.times:>6}{figures}")
        lines += (
            _details("restarts", each.restarts)
            + _details("readiness", each.unready)
            + _details("clients saw", each.errors)
        )
        lines += [f"    {text}"[:_WIDTH] for text in each.trouble]
    return lines


def _process_lines(processes: dict[str, dict[str, Any]]) -> list[str]:
    """Memory by the minute of a process's life."""
    lines = []
    for role, each in processes.items():
        curve = " ".join(f"{mb:.0f}" for mb in each["mb_by_minute"].values())
        lines.append(f"{role}: {each['processes']}, MB by minute: {curve}"[:_WIDTH])
        if each["slope_mb_per_minute"] is not None:
            lines.append(f"    no longer young: {each['slope_mb_per_minute']} MB/min")
    return lines


def _details(title: str, counts: dict[str, int]) -> list[str]:
    parts = [f"{count} {name}" for name, count in list(counts.items())[:4]]
    return [f"    {title}: {', '.join(parts)}"[:_WIDTH]] if parts else []


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"


def _outcome_lines(title: str, outcomes: list[Outcome]) -> list[str]:
    lines = [f"  {each.sender}: {each.detail}"[:_WIDTH] for each in outcomes[:_SHOWN]]
    return [f"{title}: {len(outcomes)}", *lines] if outcomes else []


# Tables of `docs/operations.md`, from the last kept runs in `docs/soak/*.json`.

PAGE = REPOSITORY / "docs" / "operations.md"
RESULTS = REPOSITORY / "docs" / "soak"
_MARKED = re.compile(r"(<!-- docs/soak/(?P<name>\w+)\.json -->\n).*?(<!-- end -->)", re.S)
_MOST_SHOWN = 3
_ROLES = ("supervisor", "tritonserver", "instance of digits/1", "instance of scaled/1")


def write_tables() -> None:
    """Fill the page's tables; those whose run was not kept stay as they are."""
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
    """Memory of all processes together, and curves of those that lived longest."""
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
    """0 means that the service was never seen to be anything but ready."""
    if value is None:
        return "never"
    return f"{value:.1f} s" if value else "stays"


def _most(counts: dict[str, int], shown: int = _MOST_SHOWN) -> str:
    most = sorted(counts.items(), key=lambda item: -item[1])
    more = f", {len(most) - shown} other kinds" if len(most) > shown else ""
    return ", ".join(f"{count} {name}" for name, count in most[:shown]) + more


_TABLES: dict[str, Callable[[dict[str, Any]], str]] = {"soak": fault_table}
