"""The trained examples of tasks: how good each is, how long its training takes, how large it is."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from graphkiln.training.train_scenes import EXAMPLES, write_example
from graphkiln_backend.graph.manifest import MANIFEST_FILE, Manifest

_METRICS = {"map_50": "mAP at IoU 0.5", "miou": "mIoU", "recall_1": "recall@1"}


def benchmark_scenes(_: int, __: float) -> list[dict[str, object]]:
    """Trains each from its fixed seed, which repeats itself, and proves it; one round is enough.

    Raises:
        SystemExit: One is not good enough.
    """
    with tempfile.TemporaryDirectory() as store:
        return [_measure(name, Path(store)) for name in EXAMPLES]


def _measure(name: str, store: Path) -> dict[str, object]:
    begun, computed = time.perf_counter(), time.process_time()
    network = EXAMPLES[name].train()
    seconds, core_seconds = time.perf_counter() - begun, time.process_time() - computed
    write_example(name, network, store, 1)
    return _row(name, store / f"scenes-{name}" / "1", seconds, core_seconds)


def _row(name: str, version: Path, seconds: float, core_seconds: float) -> dict[str, object]:
    """What a proven version says of itself, and what its training took."""
    example, metrics = EXAMPLES[name], Manifest.read(version / MANIFEST_FILE).provenance.metrics
    return {
        "example": name,
        "metric": _METRICS[example.metric],
        "value": metrics[example.metric],
        "at least": example.least,
        "images": int(metrics["test_images"]),
        "training s": round(seconds),
        "of a core s": round(core_seconds),
        "kB": round(sum(file.stat().st_size for file in version.iterdir()) / 1000),
    }
