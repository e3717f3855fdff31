"""The story as one self-contained HTML file: charts, tables, the machine, and the commands that repeat a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import jinja2

from graphkiln.story.variants import REPORTED_TOTAL

_WIDTH = 860
_LABELS = 210
_RIGHT = 130
_ROW = 34
_TOP = 10
_TICKS = (1, 2, 5)


def render_page(document: dict[str, Any]) -> str:
    """Renders the document of `StoryRunner.document`."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string((files(__package__) / "page.html.j2").read_text())
    measured = [step for step in document["steps"] if step["per_second"] is not None]
    chain = [step for step in measured if not step["switch"] and step["counts"]]
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
    marks = [
        ends.get(step["beside"], 1.0) * _reported_factor(step["source"]) for step in counting.values() if step["source"]
    ]
    scale, ticks = _log_axis([1.0, *ends.values(), *marks])
    bars = []
    for row, (key, step) in enumerate(counting.items()):
        begin = ends.get(step["beside"], 1.0)
        left, right = sorted((scale(begin), scale(ends[key])))
        bars.append(
            {
                "y": _TOP + row * _ROW,
                "x": left,
                "width": max(right - left, 2.0),
                "title": step["title"],
                "number": "" if step["switch"] else f"{step['step']}",
                "switch": step["switch"],
                "label": "1x" if step["own"] is None else f"{step['own']:.2f}x",
                "total": "" if step["switch"] or step["own"] is None else f"{ends[key]:.1f}x",
                "source": scale(begin * _reported_factor(step["source"])) if step["source"] else None,
                "source_label": step["source"],
            }
        )
    return {"width": _WIDTH, "height": _TOP + len(bars) * _ROW + 34, "bars": bars, "ticks": ticks, "left": _LABELS}


def latency_chart(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """The median and the 99th percentile of each step, on a logarithmic axis of milliseconds."""
    scale, ticks = _log_axis([value for step in measured for value in (step["p50_ms"], step["p99_ms"])])
    rows = [
        {
            "y": _TOP + row * _ROW,
            "p50": scale(step["p50_ms"]),
            "p99": scale(step["p99_ms"]),
            "title": step["title"],
            "number": "" if step["switch"] else f"{step['step']}",
            "switch": step["switch"],
            "label": f"{step['p50_ms']:.0f} / {step['p99_ms']:.0f}",
        }
        for row, step in enumerate(measured)
    ]
    return {"width": _WIDTH, "height": _TOP + len(rows) * _ROW + 34, "rows": rows, "ticks": ticks, "left": _LABELS}


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


def _log_axis(values: list[float]) -> tuple[Callable[[float], float], list[dict[str, Any]]]:
    """A function from a value to its position in pixels, and ticks at 1, 2, 5, 10, ..."""
    low = math.log10(min(values, default=1.0)) - 0.02
    high = max(math.log10(max(values, default=10.0)) + 0.02, low + 0.3)
    room = _WIDTH - _LABELS - _RIGHT

    def position(value: float) -> float:
        return round(_LABELS + (math.log10(value) - low) / (high - low) * room, 1)

    powers = range(math.floor(low), math.ceil(high) + 1)
    numbers = [digit * 10.0**power for power in powers for digit in _TICKS]
    ticks = [{"x": position(n), "label": f"{n:g}"} for n in numbers if low <= math.log10(n) <= high]
    return position, ticks
