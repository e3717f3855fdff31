"""Statuses of model instances for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graphkiln_backend.triton.instance_status import InstanceStatus
from graphkiln_backend.triton.snapshot import read_snapshot


def instance_status(**changes: Any) -> InstanceStatus:
    """A status of version 3 of model `m`."""
    values: dict[str, Any] = {
        "pid": 1,
        "model": "m",
        "version": 3,
        "engine": "e",
        "device": "cpu",
        "precision": "fp32",
        "nodes": {},
        "products": {},
        "threads": 2,
        "load_ms": 1.5,
        "warmup_ms": 0.5,
        "self_test": "",
        "self_test_error": -1.0,
        "fallbacks": 0,
    }
    return InstanceStatus(**{**values, **changes})


def read_statuses(folder: Path) -> list[InstanceStatus]:
    """Read the statuses of all ready instances."""
    return list(read_snapshot(folder).statuses.values())


def read_counters(folder: Path) -> dict[str, tuple[int, int]]:
    """Read the batches `(begun, ended)` by `instance.pid`."""
    return {name: (progress.begun, progress.ended) for name, progress in read_snapshot(folder).progress.items()}
