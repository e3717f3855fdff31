"""What a search found, for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphkiln.tuning.candidate import format_value

_COLUMNS = 80
_ROWS = 6
_NONE = "-"
_NOT_AGAIN = "the budget was spent before it was measured again"

Document = Mapping[str, Any]


def print_result(document: Document, console: Console | None = None) -> None:
    """Prints the answer, the best few, why the others lost, and what is doubtful.

    Args:
        document: As `document_of` makes it.
        console: Where to; standard output by default.
    """
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
    console.print(document["journal"], markup=False, highlight=False, soft_wrap=True)  # a path that can be copied


def print_space(document: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints a space before it is searched.

    Args:
        document: The part `space` of `document_of`.
        console: Where to; standard error by default.
    """
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
        yield f"measured again: {_promise(document['promise'])}"
        yield from _gain(document)
        return
    closest = document["closest"]
    if closest is None:
        yield "no candidate could be measured"
        for reason, count in list(document["refused"].items())[:_ROWS]:
            yield f"{count} left out: {reason}"
        return
    yield "no configuration was proven to meet the target"
    found = "found, but not proven" if document["unproven"] else "closest"
    yield f"{found}: {closest['changes']}: {_promise(closest['best'])}"
    if document["unproven"]:
        yield f"why it is not proven: {closest['lost'] or _NOT_AGAIN}"
    yield f"what limits it: {closest['limit']}"


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
        yield f"not tried, for the budget: {untried} of {every} candidates (--json and --html name them)"
    if document["knee"]:
        yield f"knee: beyond {document['knee']:.4g} requests per second, latency rises faster than throughput"
    if point := document["promise"] or (document["closest"] or {}).get("best"):
        yield from _measured_facts(point)
    for note in document["notes"]:
        yield f"note: {note}"
    minutes = document["spent_s"] / 60
    yield f"{document['measurements']} measurements in {minutes:.1f} minutes, kept in"


def _measured_facts(point: Mapping[str, Any]) -> Iterator[str]:
    if point["placed"]:
        yield f"ran: {point['placed']}"
    yield f"the load generator took {point['client_cores']:.2f} cores"
    yield f"compared under load: {point['answers_checked']} answers"
    costs = {"price_per_1000": "price of 1,000 requests", "watt_hours_per_1000": "watt-hours of 1,000 requests"}
    for key, words in costs.items():
        if key in point:
            yield f"{words}: {point[key]:.3g}"


def _rate(point: Mapping[str, Any]) -> str:
    if point["rate"] is None:
        return f"{point['callers']} caller{'s' if point['callers'] != 1 else ''}"
    return f"{point['rate']:.4g} requests per second"


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4g}"
