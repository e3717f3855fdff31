"""The acceleration story of ResNet-101, as a benchmark's table."""

from __future__ import annotations

import sys
from typing import Any

from graphkiln.story.requests import Request, this_machine, trained_weights
from graphkiln.story.telling import Progress, Story

SOURCE = "torchvision:resnet101"
_SIZE = 224


def benchmark_story(rounds: int, seconds: float) -> list[dict[str, object]]:
    """`graphkiln story` on the weights of `scripts/train-story`."""
    weights = trained_weights(SOURCE, _SIZE)
    if weights is None:
        sys.exit("the story needs decisive weights: scripts/train-story")
    request = Request(source=SOURCE, image_size=_SIZE, weights=weights, gradient=False, samples=None)
    story = Story(request, this_machine(), resume=False, report=_show)
    story.tell(rounds * seconds)
    print("\r\033[K", end="", file=sys.stderr)
    return [_row(step) for step in story.document()["steps"] if step["per_second"] is not None]


def _show(progress: Progress) -> None:
    print(f"\r\033[K{progress.doing} {progress.figure}", end="", file=sys.stderr)


def _row(step: dict[str, Any]) -> dict[str, object]:
    judged = step["judgment"]
    same = "undecided" if judged["undecided"] else f"{judged['same']}/{judged['samples']}"
    return {
        "step": f"{step['step']}{', by itself' if step['switch'] else ''}: {step['title']}",
        "images/s": round(step["per_second"], 1),
        "own": _factor(step["own"]),
        "all so far": _factor(step["cumulative"]),
        "source": step["source"] or "-",
        "p50 ms": round(step["p50_ms"], 1),
        "p99 ms": round(step["p99_ms"], 1),
        "error": f"{judged['error']:.1e}",
        "same answers": same,
        "right": "-" if judged["right"] is None else f"{judged['right']:.1%}",
        "MB": round(step["memory_mb"]),
        "cores": round(step["cores"], 2),
    }


def _factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
