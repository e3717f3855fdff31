"""The story as one self-contained HTML file: charts, tables, the machine, and the commands that repeat a step."""

from __future__ import annotations

from typing import Any

from graphkiln.reporting.charts import Bar, Span, bar_chart, log_across, span_chart
from graphkiln.reporting.templates import environment
from graphkiln.story.variants import REPORTED_TOTAL


def render_page(document: dict[str, Any]) -> str:
    """Renders the document of `StoryRunner.document`."""
    measured = [step for step in document["steps"] if step["per_second"] is not None]
    chain = [step for step in measured if not step["switch"] and step["counts"]]
    template = environment(__package__ or "").get_template("page.html.j2")
    return template.render(
        facts=document["facts"],
        steps=document["steps"],
        measured=measured,
        last=chain[-1] if chain else None,
        source_total=REPORTED_TOTAL,
        factors=factor_chart(measured),
        latencies=latency_chart(measured),
    )


def factor_chart(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """A waterfall: every bar begins where that of its baseline ended; the axis of factors is logarithmic."""
    counting = {step["key"]: step for step in measured if step["counts"] and (step["own"] or step["key"] == "eager")}
    ends = {key: _end(step, counting) for key, step in counting.items()}
    bars = [_bar(step, ends.get(step["beside"], 1.0), ends[key]) for key, step in counting.items()]
    values = [1.0, *ends.values(), *(bar.source for bar in bars if bar.source is not None)]
    return bar_chart(bars, log_across(values), "x")


def _bar(step: dict[str, Any], begin: float, end: float) -> Bar:
    return Bar(
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
