"""Reports of a search: the JSON document, and the table and HTML page made from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphkiln.reporting.json_text import finite
from graphkiln.reporting.report import Axis, environment, linear_axis, log_axis
from graphkiln.reporting.report import Table as HtmlTable
from graphkiln.tuning.candidate import Candidate, format_value
from graphkiln.tuning.contest import Point
from graphkiln.tuning.journal import Progress
from graphkiln.tuning.requests import undecided
from graphkiln.tuning.result import Result, Row
from graphkiln.tuning.trials import Failed, LoadShape, OpenLoop, SessionTiming
from graphkiln.tuning.tuner import Tuning
from graphkiln_backend.graph.files import MIB

# Output for a terminal of 80 columns.

_COLUMNS = 80
_ROWS = 6
_NONE = "-"
_NOT_AGAIN = "the budget was spent before it was confirmed"

Document = Mapping[str, Any]


def print_result(document: Document, console: Console | None = None) -> None:
    """Print the choice, the best candidates, why others lost, and notes."""
    console = console or Console()
    console.width = min(console.width, _COLUMNS)
    for line in _answer(document):
        console.print(line, markup=False, highlight=False)
    if document["rows"]:
        console.print(_table(document))
    for line in _runners_up(document):
        console.print(line, markup=False, highlight=False)
    for line in _facts(document):
        console.print(line, markup=False, highlight=False)
    console.print(document["journal"], markup=False, highlight=False, soft_wrap=True)  # can be copied as a whole


def print_space(document: Mapping[str, Any], console: Console | None = None) -> None:
    """Print the space before the search."""
    console = console or Console(stderr=True)
    console.width = min(console.width, _COLUMNS)
    table = Table("key", "values (today's first)")
    for key, values in document["axes"].items():
        table.add_row(key, ", ".join(map(format_value, values)))
    console.print(table)
    console.print(
        f"{document['candidates']} candidates of {document['points']} combinations", markup=False, highlight=False
    )
    reasons = (f"left out, {count}: {reason}" for reason, count in document["reasons"].items())
    for line in (*reasons, *(f"not tried: {line}" for line in document["left_out"])):
        console.print(line, markup=False, highlight=False)


def _answer(document: Document) -> Iterator[str]:
    yield f"{document['model']} {document['version']}: {document['target']['text']}"
    if chosen := document["chosen"]:
        yield f"chosen: {chosen['changes']}"
        yield f"confirmed: {_promise(document['promise'])}"
        yield from _gain(document)
        return
    closest = document["closest"]
    if closest is None:
        yield "no candidate could be measured"
        for reason, count in list(document["refused"].items())[:_ROWS]:
            yield f"{count} left out: {reason}"
        return
    yield "no configuration was confirmed to meet the target"
    found = "found, but not confirmed" if document["unproven"] else "closest"
    yield f"{found}: {closest['changes']}: {_promise(closest['best'])}"
    if document["unproven"]:
        yield f"not confirmed because: {closest['lost'] or _NOT_AGAIN}"
    yield f"bottleneck: {closest['limit']}"


def _promise(point: Mapping[str, Any]) -> str:
    bound = point["p99_range_ms"][1]
    proven = f", at most {bound:.3g} ms at 95%" if bound is not None else ""
    return f"{_rate(point)}, p99 {_number(point['p99_ms'])} ms{proven}, {point['requests']} requests"


def _gain(document: Document) -> Iterator[str]:
    default, promise = document["default"], document["promise"]
    best = default["best"] if default else None
    if best is None or document["chosen"]["id"] == default["id"]:
        return
    ratio = promise["throughput"] / best["throughput"] if best["throughput"] else None
    if ratio and document["target"]["objective"] == "throughput":
        yield f"beside today's configuration: {ratio:.2f} times the throughput ({default['score']})"
    else:
        yield f"today's configuration: {default['score']}"


def _table(document: Document) -> Table:
    table = Table("", "configuration", "per s", "p99 ms", "MiB", "score", collapse_padding=True)
    chosen = document["chosen"]["id"] if document["chosen"] else None
    for row in document["rows"][:_ROWS]:
        best = row["best"] or {}
        mark = "*" if row["id"] == chosen else "+" if row["id"] in document["front"] else ""
        table.add_row(
            mark,
            escape(row["changes"]),
            _number(best.get("throughput")),
            _number(best.get("p99_ms")),
            _number(best.get("memory_mb")),
            escape(row["score"]),
        )
    return table


def _runners_up(document: Document) -> Iterator[str]:
    lost = [row for row in document["rows"][:_ROWS] if row["lost"]]
    for row in lost:
        yield f"{row['changes']}: lost: {row['lost']}"
    more = len(document["rows"]) - _ROWS
    if more > 0:
        yield f"... and {more} more (--json, --html)"


def _facts(document: Document) -> Iterator[str]:
    if untried := len(document["untried"]):
        every = document["space"]["candidates"]
        yield f"not tried for lack of budget: {untried} of {every} candidates (listed by --json and --html)"
    if document["knee"]:
        yield f"knee: above {document['knee']:.4g} requests per second, latency rises faster than throughput"
    if point := document["promise"] or (document["closest"] or {}).get("best"):
        yield from _measured_facts(point)
    for note in document["notes"]:
        yield f"note: {note}"
    minutes = document["spent_s"] / 60
    yield f"{document['measurements']} measurements in {minutes:.1f} minutes, recorded in"


def _measured_facts(point: Mapping[str, Any]) -> Iterator[str]:
    if point["placed"]:
        yield f"ran: {point['placed']}"
    yield f"the load generator used {point['client_cores']:.2f} cores"
    yield f"answers checked under load: {point['answers_checked']}"
    if "watt_hours_per_1000" in point:
        yield f"watt-hours of 1,000 requests: {point['watt_hours_per_1000']:.3g}"


def _rate(point: Mapping[str, Any]) -> str:
    if point["rate"] is None:
        return f"{point['callers']} caller{'s' if point['callers'] != 1 else ''}"
    return f"{point['rate']:.4g} requests per second"


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4g}"


# Progress: one line for each measurement.

_LONGEST = 100


def line_of(progress: Progress, default: Candidate, budget_s: float) -> str:
    """Format a measurement as one line."""
    words = describe_changes(progress.candidate, default)
    return f"{progress.spent_s:.0f} of {budget_s:.0f} s: {words}{_load(progress.load)}: {_outcome(progress)}"


def _load(load: LoadShape | None) -> str:
    if load is None:
        return ", session without a server"
    return f", {load.rate:.4g}/s" if isinstance(load, OpenLoop) else f", {load.callers} callers"


def _outcome(progress: Progress) -> str:
    outcome = progress.outcome
    if isinstance(outcome, Failed):
        return f"failed: {_shortened(outcome.reason)}"
    if isinstance(outcome, SessionTiming):
        return f"wrong: {_shortened(outcome.accuracy)}" if outcome.accuracy else f"{outcome.batch_s[1] * 1e3:.3g} ms"
    words = outcome.latency.p99_words.replace("p99 was", "p99")
    return f"{outcome.throughput.value:.4g}/s, {words}" + (f" ({outcome.warning})" if outcome.warning else "")


def _shortened(reason: str) -> str:
    return reason if len(reason) <= _LONGEST else f"{reason[:_LONGEST]}..."


def document_of(result: Result, tuning: Tuning, command: str) -> dict[str, Any]:
    """Convert a result to JSON data without infinite values."""
    default = tuning.space.today

    def point(found: Point | None) -> dict[str, Any] | None:
        return _point(found) if found else None

    def row(found: Row | None) -> dict[str, Any] | None:
        if found is None:
            return None
        candidate = found.scored.candidate
        return {
            "id": candidate.id,
            "configuration": candidate.as_json(),
            "changes": describe_changes(candidate, default),
            "score": found.score,
            "limit": found.limit,
            "lost": found.scored.lost,
            "accuracy_lost": found.accuracy_lost,
            "best": point(found.best_point),
            "points": [point(each) for each in found.scored.points],
        }

    identity, legal = tuning.identity(), set(tuning.space.candidates)
    refused = Counter(each.reason for each in result.exclusions if each.candidate in legal)
    doubt = undecided(tuning.requests, tuning.target.accuracy_floor)
    notes = dict.fromkeys((*result.notes, *_warnings(result), *([doubt] if doubt else [])))
    document = {
        "model": tuning.subject.name,
        "version": tuning.subject.version,
        "target": {
            "text": str(result.target),
            "p99_ms": result.target.p99_s * 1e3,
            "rate": result.target.rate,
            "objective": str(result.target.objective),
            "accuracy_floor": result.target.accuracy_floor,
        },
        "met": result.chosen is not None,
        "machine": identity["machine"],
        "server": identity["server"],
        "load": str(tuning.arriving),
        "requests": tuning.requests.origin,
        "space": space_document(tuning),
        "chosen": row(result.chosen),
        "promise": point(result.promise),
        "closest": row(result.closest),
        "unproven": result.is_unproven,
        "default": row(result.default),
        "rows": [row(each) for each in result.rows],
        "refused": dict(refused.most_common()),
        "untried": [
            {"changes": describe_changes(each.candidate, default), "reason": each.reason}
            for each in result.exclusions
            if each.by_budget
        ],
        "front": [row.scored.candidate.id for row in result.front],
        "curve": [point(each) for each in result.curve],
        "knee": result.knee,
        "readings": [{"spent_s": each.spent_s, "rate": each.rate, "level": each.level} for each in result.readings],
        "notes": list(notes),
        "spent_s": result.spent_s,
        "measurements": result.measurements,
        "journal": str(tuning.journal),
        "command": command,
    }
    found: dict[str, Any] = finite(document)
    return found


def space_document(tuning: Tuning) -> dict[str, Any]:
    """Convert a space to JSON data: axes, number of candidates, and reasons for exclusions."""
    space = tuning.space
    return {
        "axes": {axis.key: [list(v) if isinstance(v, tuple) else v for v in axis.values] for axis in space.axes},
        "points": space.points,
        "candidates": len(space.candidates),
        "reasons": space.reasons(),
        "left_out": list(space.left_out),
    }


def describe_changes(candidate: Candidate, default: Candidate) -> str:
    """Format a candidate by its differences from the default configuration."""
    changed = {key: value for key, value in candidate.items if default.values.get(key) != value}
    return str(Candidate.of(changed)) if changed else "as served today"


def _point(point: Point) -> dict[str, Any]:
    measured, load = point.measured, point.load
    memory, per_second = measured.memory_bytes, measured.throughput.value
    energy: dict[str, float] = {}
    if measured.energy_j is not None and per_second:
        energy["watt_hours_per_1000"] = measured.energy_j / measured.seconds / per_second * 1000 / 3600
    return {
        "rate": load.rate if isinstance(load, OpenLoop) else None,
        "callers": None if isinstance(load, OpenLoop) else load.callers,
        "throughput": per_second,
        "throughput_range": [measured.throughput.lower, measured.throughput.upper],
        "p50_ms": measured.latency.p50_s * 1e3,
        "p99_ms": measured.latency.p99.value * 1e3,
        "p99_range_ms": [measured.latency.p99.lower * 1e3, measured.latency.p99_at_most_s * 1e3],
        "requests": measured.requests,
        "seconds": measured.seconds,
        "errors": dict(measured.errors),
        "unsent": measured.unsent,
        "answers_checked": measured.answers,
        "client_cores": measured.client_cores,
        "server_cores": measured.server_cores,
        "memory_mb": None if memory is None else memory / MIB,
        "placed": measured.placed,
        "warning": measured.warning,
        **energy,
    }


def _warnings(result: Result) -> list[str]:
    measured = [point.measured for row in result.rows for point in row.scored.points]
    found = [each for each in measured if each.warning]
    worst = max(found, key=lambda each: each.client_cores, default=None)
    return [f"{len(found)} of {len(measured)} measurements: {worst.warning}"] if worst else []


# The self-contained HTML page, with scatter and curve as coordinates for SVG in the units of a fixed picture.


# Small, so that text is legible on a phone (335 pixels).
WIDTH, HEIGHT = 440, 264
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 14, 40


def _scatter(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return p99 against throughput of the best point of each candidate; None without measurements."""
    rows = [row for row in document["rows"] if _is_shown(row["best"])]
    if not rows:
        return None
    target = document["target"]["p99_ms"]
    across = linear_axis([row["best"]["throughput"] for row in rows], _LEFT, WIDTH - _RIGHT)
    up = log_axis([*(row["best"]["p99_ms"] for row in rows), target], HEIGHT - _BOTTOM, _TOP)
    chosen = document["chosen"]["id"] if document["chosen"] else None
    marks = [
        {
            "x": across.place(row["best"]["throughput"]),
            "y": up.place(row["best"]["p99_ms"]),
            "kind": "chosen" if row["id"] == chosen else "front" if row["id"] in document["front"] else "other",
            "title": f"{row['changes']}: {row['score']}",
        }
        for row in rows
    ]
    # the choice is drawn last, on top
    marks.sort(key=lambda mark: ("other", "front", "chosen").index(str(mark["kind"])))
    return _picture(across, up, target, marks=marks)


def _curve(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return p99 against the rate of the choice, with bounds and knee; None for fewer than two points."""
    points = _curve_points(document)
    if len(points) < 2:
        return None
    target, knee = document["target"]["p99_ms"], document["knee"]
    across = linear_axis([point["rate"] for point in points], _LEFT, WIDTH - _RIGHT)
    values = [value for point in points for value in (point["p99_ms"], point["p50_ms"], *_bounds(point))]
    up = log_axis([*values, target], HEIGHT - _BOTTOM, _TOP)
    marks = [
        {
            "x": across.place(point["rate"]),
            "y": up.place(point["p99_ms"]),
            "median": up.place(point["p50_ms"]),
            "low": up.place(_bounds(point)[0]),
            "high": up.place(_bounds(point)[1]),
            "title": f"{point['rate']:.4g} requests per second: p99 {point['p99_ms']:.3g} ms",
        }
        for point in points
    ]
    picture = _picture(across, up, target, marks=marks)
    picture["line"] = " ".join(f"{mark['x']},{mark['y']}" for mark in marks)
    picture["medians"] = " ".join(f"{mark['x']},{mark['median']}" for mark in marks)
    picture["knee"] = None if knee is None else across.place(knee)
    return picture


def _curve_points(document: Document) -> list[Mapping[str, Any]]:
    """Return the drawable measurements of the curve."""
    return [point for point in document["curve"] if _is_shown(point) and point["rate"]]


def _picture(across: Axis, up: Axis, target: float, **more: Any) -> dict[str, Any]:
    return {
        "width": WIDTH, "height": HEIGHT, "left": _LEFT, "right": WIDTH - _RIGHT, "top": _TOP,
        "bottom": HEIGHT - _BOTTOM, "xticks": across.ticks, "yticks": up.ticks, "target": up.place(target), **more,
    }  # fmt: skip


def _is_shown(point: Mapping[str, Any] | None) -> bool:
    return point is not None and bool(point["p99_ms"]) and bool(point["p50_ms"])


def _bounds(point: Mapping[str, Any]) -> tuple[float, float]:
    """Return the bounds on p99, or p99 itself without bounds."""
    low, high = point["p99_range_ms"]
    return low or point["p99_ms"], high or point["p99_ms"]


def render_page(document: Mapping[str, Any]) -> str:
    """Render a document as an HTML page."""
    templates = environment(__package__ or "")
    templates.filters["number"] = _figure
    templates.filters["word"] = format_value
    template = templates.get_template("page.html.j2")
    columns = ("requests per s", "responses per s", "p50 ms", "p99 ms", "p99 at least", "at most, at 95%")
    rows = [
        [_figure(value) for value in (p["rate"], p["throughput"], p["p50_ms"], p["p99_ms"], *p["p99_range_ms"])]
        for p in _curve_points(document)
    ]
    rates = HtmlTable(columns=columns, rows=rows, texts=0)
    return template.render(**document, scatter=_scatter(document), plot=_curve(document), rates=rates)


def _figure(value: float | None, digits: int = 4) -> str:
    return "\N{EN DASH}" if value is None else f"{value:.{digits}g}"
