"""The story as two tables in 80 columns, and as one self-contained HTML file with the same figures."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphkiln.reporting.report import Bar, Report, Section, Span, bar_chart, log_across, render, span_chart
from graphkiln.reporting.report import Table as HtmlTable
from graphkiln.story.variants import REPORTED_TOTAL

_TITLE_WIDTH = 21
_SPEED = ("step", "img/s", "own", "all", "source", "p50 ms", "p99 ms", "MB", "cores")
_PROOF = ("step", "error", "allowed", "same answers, 95%", "right", "policy")


def print_tables(document: dict[str, Any]) -> None:
    """Print the document of `StoryRunner.document`; a step that does not count has its reason instead of factors."""
    console = Console()
    steps, facts = document["steps"], document["facts"]
    speed = _table(f"{facts['model']}, {facts['image size']} pixels, {facts['machine']}", _SPEED)
    for step in _measured(steps):
        speed.add_row(*_speed_cells(step), style="dim" if step["switch"] else "")
    proof = _table(f"beside eager PyTorch, on {facts.get('images', 'nothing yet')}", _PROOF)
    for step in steps:
        if step["judgment"]:
            proof.add_row(*_proof_cells(step), style="dim" if step["switch"] else "")
    console.print(speed, proof)
    for line in _notes(steps):
        console.print(escape(line))


def render_page(document: dict[str, Any]) -> str:
    """Render the document of `StoryRunner.document`."""
    steps, facts = document["steps"], document["facts"]
    measured = _measured(steps)
    factors = [step["cumulative"] for step in measured if step["counts"] and step["cumulative"]]
    commands = (f"# {_title(step).strip()}\n" + "\n".join(step["commands"]) for step in steps if not step["refused"])
    report = Report(
        title=f"{factors[-1]:.1f}x: {facts['model']}" if factors else facts["model"],
        about=f"{facts['machine']}, {facts['date']}, {facts['image size']} pixels, weights: {facts['weights']}",
        sections=(
            Section(
                name="speed", title="What each step gave",
                text="Every step begins where the one before it ended; the axis is logarithmic. Pale bars are switches "
                "of step 4, each turned on by itself. A diamond is where the factor that the source reports would end; "
                f"it reports {REPORTED_TOTAL}x and more for all of them together.",
                table=HtmlTable(columns=_SPEED, rows=[_speed_cells(step) for step in measured]),
                chart=factor_chart(measured),
            ),
            Section(
                name="latencies", title="How long an image waits",
                text="From the JPEG to the answer, in milliseconds: the median (full dot) and the 99th percentile "
                "(ring). Steps 3 to 5 are loaded to the full, so that images wait for their batch.",
                table=HtmlTable(
                    columns=("step", "p50 ms", "p99 ms"),
                    rows=[(_title(step), f"{step['p50_ms']:.0f}", f"{step['p99_ms']:.0f}") for step in measured],
                ),
                chart=latency_chart(measured),
            ),
            Section(
                name="accuracy", title="How true",
                text=f"Beside eager PyTorch in fp32, on {facts.get('images', 'no images yet')}. A step counts only "
                f"when the numeric policy allows its error and its answers. {'; '.join(_notes(steps))}",
                table=HtmlTable(columns=_PROOF, rows=[_proof_cells(step) for step in steps if step["judgment"]]),
            ),
        ),
        facts={name.replace("_", " "): str(value) for name, value in facts.items()},
        command="\n".join(commands),
    )  # fmt: skip
    return render(report)


def _measured(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [step for step in steps if step["per_second"] is not None]


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column(columns[0], width=_TITLE_WIDTH)
    for name in columns[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _speed_cells(step: dict[str, Any]) -> list[str]:
    own, cumulative = ("-" if step[key] is None else f"{step[key]:.2f}x" for key in ("own", "cumulative"))
    return [
        _title(step),
        f"{step['per_second']:.1f}",
        own if step["counts"] else "fails",
        "1x" if step["key"] == "eager" else cumulative,
        step["source"] or "-",
        f"{step['p50_ms']:.0f}",
        f"{step['p99_ms']:.0f}",
        f"{step['memory_mb']:.0f}",
        f"{step['cores']:.1f}",
    ]


def _proof_cells(step: dict[str, Any]) -> list[str]:
    judgment = step["judgment"]
    low, high = (f"{100 * share:.1f}".removesuffix(".0") for share in judgment["interval"])
    return [
        _title(step),
        f"{judgment['error']:.1e}",
        f"{judgment['limit']:.0e}",
        "undecided" if judgment["undecided"] else f"{judgment['same']}/{judgment['samples']} [{low}-{high}%]",
        "-" if judgment["right"] is None else f"{judgment['right']:.1%}",
        "PASS" if judgment["passed"] else "FAIL",
    ]


def _notes(steps: list[dict[str, Any]]) -> list[str]:
    """The factor of all steps together, why one was not executed or does not count, and what is undecided."""
    factors = [step["cumulative"] for step in steps if step["counts"] and step["cumulative"]]
    notes = [f"all together: {factors[-1]:.1f}x (the source reports {REPORTED_TOTAL}x and more)"] if factors else []
    notes += [f"{step['title']}: not done: {step['refused']}" for step in steps if step["refused"]]
    judgments = [(step["title"], step["judgment"]) for step in steps if step["judgment"]]
    notes += [f"{title}: does not count: {found['verdict']}" for title, found in judgments if not found["passed"]]
    undecided = {found["undecided"] for _, found in judgments} - {""}
    notes += [f"same answers are not judged: {reason}" for reason in sorted(undecided)[:1]]
    return notes


def _title(step: dict[str, Any]) -> str:
    return f"  {step['title']}" if step["switch"] else f"{step['step']} {step['title']}"


def factor_chart(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """A waterfall: every bar begins where that of its baseline ended; the axis of factors is logarithmic."""
    counting = {step["key"]: step for step in measured if step["counts"] and (step["own"] or step["key"] == "eager")}
    ends = {key: _end(step, counting) for key, step in counting.items()}
    bars = []
    for key, step in counting.items():
        begin, end = ends.get(step["beside"], 1.0), ends[key]
        bar = Bar(
            title=step["title"],
            number="" if step["switch"] else f"{step['step']}",
            switch=step["switch"],
            begin=begin,
            end=end,
            label="1x" if step["own"] is None else f"{step['own']:.2f}x",
            total="" if step["switch"] or step["own"] is None else f"{end:.1f}x",
            source=begin * _reported_factor(step["source"]) if step["source"] else None,
            source_label=f"the source reports {step['source']}x",
        )
        bars.append(bar)
    values = [1.0, *ends.values(), *(bar.source for bar in bars if bar.source is not None)]
    return bar_chart(bars, log_across(values), "x")


def latency_chart(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """The median and the 99th percentile of each step, on a logarithmic axis of milliseconds."""
    spans = [
        Span(
            title=step["title"],
            number="" if step["switch"] else f"{step['step']}",
            switch=step["switch"],
            low=step["p50_ms"],
            high=step["p99_ms"],
            label=f"{step['p50_ms']:.0f} / {step['p99_ms']:.0f} ms",
        )
        for step in measured
    ]
    return span_chart(spans, log_across(value for span in spans for value in (span.low, span.high)))


def _end(step: dict[str, Any], counting: dict[str, dict[str, Any]]) -> float:
    """Speed-up over step 0; of a switch, that of its baseline times its own."""
    if step["cumulative"] is not None:
        return float(step["cumulative"])
    baseline = counting.get(step["beside"])
    return float((step["own"] or 1.0) * (_end(baseline, counting) if baseline and baseline is not step else 1.0))


def _reported_factor(text: str) -> float:
    """The mean of what the source reports: `4.6`, or `1.6-1.64`."""
    numbers = [float(part) for part in text.split("-")]
    return sum(numbers) / len(numbers)
