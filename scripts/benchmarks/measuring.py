"""Interleaved segments of measured work, and the graphs that they run."""

from __future__ import annotations

import io
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from graphkiln.story.measuring import run_segment
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.edges import Rename
from graphkiln_backend.passes.graph_file import save
from graphkiln_backend.passes.pipeline import OPTIMIZATIONS
from graphkiln_converters.sources.base import SourceOptions, open_source

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "benchmark"


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One set-up: a function that answers one request, called by `concurrency` threads."""

    name: str
    concurrency: int
    ask: Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Medians over the rounds."""

    per_second: float
    p50_ms: float
    p99_ms: float


def exported(architecture: str) -> Path:
    """The graph of a torchvision architecture with random weights, from the cache when it was exported before."""
    cached = CACHE / f"{architecture}.onnx"
    if not cached.exists():
        print(f"exporting {architecture} (once)", file=sys.stderr)
        CACHE.mkdir(parents=True, exist_ok=True)
        model = open_source(f"torchvision:{architecture}", SourceOptions()).export({})
        run_passes(model, (*OPTIMIZATIONS, Rename({"image": "INPUT_0"}, {"output": "OUTPUT_0"})))
        partial = cached.with_suffix(".partial.onnx")
        save(model, partial)
        partial.rename(cached)
    return cached


def photograph(width: int, height: int, seed: int = 0) -> bytes:
    """A JPEG with a photograph's share of detail: noise, smoothed."""
    noise = np.random.default_rng(seed).integers(0, 256, (height // 6, width // 6, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def measure(segments: list[Segment], rounds: int, seconds: float) -> dict[str, Figure]:
    """Interleaves the segments; the first round is a warm-up and does not count."""
    rates: dict[str, list[float]] = {segment.name: [] for segment in segments}
    latencies: dict[str, list[float]] = {segment.name: [] for segment in segments}
    for number in range(rounds + 1):
        for segment in segments:
            print(f"\r\033[Kround {number}/{rounds}: {segment.name}", end="", file=sys.stderr)
            length = seconds if number else min(seconds, 1.0)
            seen = run_segment(lambda _, ask=segment.ask: ask(), segment.concurrency, (b"",), length)  # type: ignore[misc]
            if number:
                rates[segment.name].append(seen.per_second)
                latencies[segment.name] += seen.latencies_ms
    print("\r\033[K", end="", file=sys.stderr)
    return {
        name: Figure(
            per_second=statistics.median(rates[name]),
            p50_ms=float(np.percentile(latencies[name], 50)),
            p99_ms=float(np.percentile(latencies[name], 99)),
        )
        for name in rates
    }
