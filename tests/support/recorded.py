"""Records of requests, written as an instance writes them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.repository.records import Record, RecordedRequest
from graphkiln_backend.triton.environment import RecordSettings
from graphkiln_backend.triton.recording import Origin, Recorder

Pair = tuple[Mapping[str, AnyArray], Mapping[str, AnyArray]]


def origin(**changes: Any) -> Origin:
    """What answers in tests."""
    facts = {"model": "m", "version": 1, "graph_sha256": "0" * 64, "engine": "onnxruntime", "precision": "fp32"}
    return Origin(**{**facts, **changes})


def settings(folder: Path, **changes: Any) -> RecordSettings:
    """Settings that record everything."""
    return RecordSettings(**{"folder": folder, "share": 1.0, **changes})


def write_record(folder: Path, pairs: Iterable[Pair], inputs: str = "full", **changes: Any) -> None:
    """Record pairs of inputs and outputs, as requests `0`, `1`, ..."""
    folder.mkdir(exist_ok=True)
    with Recorder(settings(folder, inputs=inputs), origin(**changes)) as recorder:
        for number, (feeds, outputs) in enumerate(pairs):
            recorder.record(str(number), feeds, outputs, 1e-3)
    assert recorder.dropped == 0


def rows(folder: Path, model: str = "") -> list[RecordedRequest]:
    """All recorded requests."""
    return list(Record.find(folder, model).requests())


def numbered(count: int) -> Iterable[Pair]:
    """Pairs of a request with its number and the double of it."""
    for number in itertools.islice(itertools.count(), count):
        yield {"x": np.full((1, 3), number, np.float32)}, {"y": np.full((1, 3), 2 * number, np.float32)}
