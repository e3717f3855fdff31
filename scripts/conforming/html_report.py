"""A kept run of the suite as a report for a browser, in the style of all reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from conforming.outcome import Verdict
from conforming.report import heading, name_of, others_of
from graphkiln.reporting.charts import Bar, bar_chart, linear_across
from graphkiln.reporting.report import Report, Section, Table


def to_report(document: Mapping[str, Any]) -> Report:
    """The report.

    Args:
        document: As `report.to_document` makes it.
    """
    ways = document["ways"]
    cases = ", ".join(f"{count} {kind}" for kind, count in document["cases"].items())
    versions = {name: number for way in ways.values() for name, number in way["versions"].items()}
    sections = [_outcomes(ways), *(_reasons(way, found) for way, found in ways.items() if others_of(found))]
    return Report(
        title="ONNX's own test suite", about=f"{sum(document['cases'].values())} cases: {cases}", sections=sections,
        facts=versions, command="scripts/conformance",
    )  # fmt: skip


def _outcomes(ways: Mapping[str, Any]) -> Section:
    bars = [Bar(title=way, begin=0, end=each["passes"], label=f"{each['passes']}") for way, each in ways.items()]
    rows = []
    for way, each in ways.items():
        verdicts = Counter(verdict for verdict, _ in others_of(each).values())
        others = (verdicts[verdict] for verdict in (Verdict.REFUSED, Verdict.DIFFERS, Verdict.FAILS))
        rows.append((way, name_of(way), str(each["asked"]), str(each["passes"]), *map(str, others)))
    columns = ("way", "how", "asked", "pass", "refused", "differ", "fail")
    return Section(
        name="outcomes", title="How many pass", text="Answers are compared at the suite's own tolerance.",
        table=Table(columns=columns, rows=rows, texts=2),
        chart=bar_chart(bars, linear_across([bar.end for bar in bars])),
    )  # fmt: skip


def _reasons(way: str, found: Mapping[str, Any]) -> Section:
    kinds = Counter(heading(verdict, reason) for verdict, reason in others_of(found).values())
    bars = [
        Bar(title=f"{number}", begin=0, end=count, label=f"{count}")
        for number, (_, count) in enumerate(kinds.most_common(), 1)
    ]
    rows = [(f"{number}", kind, f"{count}") for number, (kind, count) in enumerate(kinds.most_common(), 1)]
    return Section(
        name=way, title=f"What does not pass: {way}", text="By reason, the most frequent first.",
        table=Table(columns=("no.", "what, and why", "cases"), rows=rows, texts=2),
        chart=bar_chart(bars, linear_across([bar.end for bar in bars])),
    )  # fmt: skip
