"""Print a story as tables in 80 columns, or render it as a self-contained HTML file."""

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
    """Print the document of `StoryRunner.document`."""
    console = Console()
    steps, facts = document["steps"], document["facts"]
    speed = _table(f"{facts['model']}, {facts['image size']} pixels, {facts['machine']}", _SPEED)
    for step in _measured(steps):
        speed.add_row(*_speed_cells(step), style="dim" if step["switch"] else "")
    proof = _table(f"compared with eager PyTorch, on {facts.get('images', 'no images yet')}", _PROOF)
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
                name="speed", title="Speed-up of each step",
                text="Each bar begins at the end of the previous step; the axis is logarithmic. Pale bars are the "
                "optimizations of step 4, each enabled alone. A diamond marks the factor that the source reports; "
                f"it reports {REPORTED_TOTAL}x and more for all steps together.",
                table=HtmlTable(columns=_SPEED, rows=[_speed_cells(step) for step in measured]),
                chart=factor_chart(measured),
            ),
            Section(
                name="latencies", title="Latency of an image",
                text="From the JPEG to the result, in milliseconds: median (dot) and 99th percentile (ring). Steps 3 "
                "to 5 run under full load, so that images wait for their batch.",
                table=HtmlTable(
                    columns=("step", "p50 ms", "p99 ms"),
                    rows=[(_title(step), f"{step['p50_ms']:.0f}", f"{step['p99_ms']:.0f}") for step in measured],
                ),
                chart=latency_chart(measured),
            ),
            Section(
                name="accuracy", title="Accuracy",
                text=f"Compared with eager PyTorch in fp32, on {facts.get('images', 'no images yet')}. A step counts "
                f"only if the numeric policy allows its errors. {'; '.join(_notes(steps))}",
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
    """List the total factor, steps that were refused or failed, and undecided comparisons."""
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
    """Draw a waterfall chart on a logarithmic axis: each bar begins at the end of its baseline's bar."""
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
    """Draw median and 99th percentile of each step on a logarithmic axis."""
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
    """Compute the speed-up over step 0; for a switch, its own factor times that of its baseline."""
    if step["cumulative"] is not None:
        return float(step["cumulative"])
    baseline = counting.get(step["beside"])
    return float((step["own"] or 1.0) * (_end(baseline, counting) if baseline and baseline is not step else 1.0))


def _reported_factor(text: str) -> float:
    """Parse a reported factor, `4.6` or a range `1.6-1.64`, of which the mean is returned."""
    numbers = [float(part) for part in text.split("-")]
    return sum(numbers) / len(numbers)
