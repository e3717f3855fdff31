"""The acceleration story of ResNet-101, as a benchmark's table."""

from __future__ import annotations

import sys
from typing import Any

from graphkiln.story.request import StoryRequest, this_platform
from graphkiln.story.runner import Progress, StoryRunner
from graphkiln.story.weights import find_trained_weights

SOURCE = "torchvision:resnet101"
_SIZE = 224


def benchmark_story(rounds: int, seconds: float) -> list[dict[str, object]]:
    """`graphkiln story` on the weights of `scripts/train-story`."""
    weights = find_trained_weights(SOURCE, _SIZE)
    if weights is None:
        sys.exit("the story needs decisive weights: scripts/train-story")
    request = StoryRequest(source=SOURCE, image_size=_SIZE, weights=weights, gradient=False, samples=None)
    runner = StoryRunner(request, this_platform(), resume=False, report=_print_progress)
    runner.run(rounds * seconds)
    print("\r\033[K", end="", file=sys.stderr)
    return [_row(step) for step in runner.document()["steps"] if step["per_second"] is not None]


def _print_progress(progress: Progress) -> None:
    print(f"\r\033[K{progress.activity} {progress.figure}", end="", file=sys.stderr)


def _row(step: dict[str, Any]) -> dict[str, object]:
    judgment = step["judgment"]
    same = "undecided" if judgment["undecided"] else f"{judgment['same']}/{judgment['samples']}"
    return {
        "step": f"{step['step']}{', by itself' if step['switch'] else ''}: {step['title']}",
        "images/s": round(step["per_second"], 1),
        "own": _format_factor(step["own"]),
        "all so far": _format_factor(step["cumulative"]),
        "source": step["source"] or "-",
        "p50 ms": round(step["p50_ms"], 1),
        "p99 ms": round(step["p99_ms"], 1),
        "error": f"{judgment['error']:.1e}",
        "same answers": same,
        "right": "-" if judgment["right"] is None else f"{judgment['right']:.1%}",
        "MB": round(step["memory_mb"]),
        "cores": round(step["cores"], 2),
    }


def _format_factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
