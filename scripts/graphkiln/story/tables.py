"""The story as two tables in 80 columns: speed, and accuracy."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from graphkiln.story.variants import REPORTED_TOTAL

_TITLE_WIDTH = 21


def print_tables(document: dict[str, Any]) -> None:
    """Prints the document of `StoryRunner.document`; a step that does not count has its reason instead of factors."""
    console = Console()
    steps, facts = document["steps"], document["facts"]
    speed = _table(
        f"{facts['model']}, {facts['image size']} pixels, {facts['machine']}",
        ("img/s", "own", "all", "source", "p50 ms", "p99 ms", "MB", "cores"),
    )
    for step in steps:
        if step["per_second"] is not None:
            speed.add_row(*_speed_cells(step), style="dim" if step["switch"] else "")
    proof = _table(
        f"beside eager PyTorch, on {facts.get('images', 'nothing yet')}",
        ("error", "allowed", "same answers, 95%", "right", "policy"),
    )
    for step in steps:
        if step["judgment"]:
            proof.add_row(*_proof_cells(step), style="dim" if step["switch"] else "")
    console.print(speed, proof)
    for line in _notes(steps):
        console.print(escape(line))


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("step", width=_TITLE_WIDTH)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _speed_cells(step: dict[str, Any]) -> list[str]:
    own, cumulative = _format_factor(step["own"]), _format_factor(step["cumulative"])
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


def _format_factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
