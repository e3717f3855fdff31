"""What a search found as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphkiln.reporting.axes import Axis, linear_axis, log_axis
from graphkiln.reporting.report import Table
from graphkiln.reporting.templates import environment
from graphkiln.tuning.candidate import format_value

# Scatters and curves as numbers for SVG: where each mark lies, in the units of a picture of fixed size.

WIDTH, HEIGHT = 440, 264  # small, so that letters are legible where a phone shows it in 335 pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 14, 40


def scatter(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """p99 against throughput of the best point of each candidate; None where nothing was measured.

    Args:
        document: As `document_of` makes it.
    """
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
            "kind": _kind(row["id"], chosen, document["front"]),
            "title": f"{row['changes']}: {row['score']}",
        }
        for row in rows
    ]
    # what matters lies on top
    marks.sort(key=lambda mark: ("other", "front", "chosen").index(str(mark["kind"])))
    return _picture(across, up, target, marks=marks)


def curve(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """p99 against the rate of what was chosen, with its bounds and the knee; None for fewer than two points.

    Args:
        document: As `document_of` makes it.
    """
    points = curve_points(document)
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


def curve_points(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The measurements of the curve.

    Args:
        document: As `document_of` makes it.
    """
    return [point for point in document["curve"] if _is_shown(point) and point["rate"]]


def _picture(across: Axis, up: Axis, target: float, **more: Any) -> dict[str, Any]:
    return {
        "width": WIDTH, "height": HEIGHT, "left": _LEFT, "right": WIDTH - _RIGHT, "top": _TOP,
        "bottom": HEIGHT - _BOTTOM, "xticks": across.ticks, "yticks": up.ticks, "target": up.place(target), **more,
    }  # fmt: skip


def _kind(identity: str, chosen: str | None, front: Sequence[str]) -> str:
    return "chosen" if identity == chosen else "front" if identity in front else "other"


def _is_shown(point: Mapping[str, Any] | None) -> bool:
    return point is not None and bool(point["p99_ms"]) and bool(point["p50_ms"])


def _bounds(point: Mapping[str, Any]) -> tuple[float, float]:
    """Those of p99; where there is none, p99 itself."""
    low, high = point["p99_range_ms"]
    return low or point["p99_ms"], high or point["p99_ms"]


def render_page(document: Mapping[str, Any]) -> str:
    """Renders a document.

    Args:
        document: As `document_of` makes it.
    """
    templates = environment(__package__ or "")
    templates.filters["number"] = _number
    templates.filters["word"] = format_value
    template = templates.get_template("page.html.j2")
    return template.render(**document, scatter=scatter(document), plot=curve(document), rates=rate_table(document))


def rate_table(document: Mapping[str, Any]) -> Table:
    """The figures of the curve: a row for each rate.

    Args:
        document: As `document_of` makes it.
    """
    columns = ("requests per s", "responses per s", "p50 ms", "p99 ms", "p99 at least", "at most, at 95%")
    rows = [
        [_number(value) for value in (p["rate"], p["throughput"], p["p50_ms"], p["p99_ms"], *p["p99_range_ms"])]
        for p in curve_points(document)
    ]
    return Table(columns=columns, rows=rows, texts=0)


def _number(value: float | None, digits: int = 4) -> str:
    return "\N{EN DASH}" if value is None else f"{value:.{digits}g}"
