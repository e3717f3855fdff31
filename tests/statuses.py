"""The status of a model instance, as tests need it."""

from __future__ import annotations

from typing import Any

from graphkiln_backend.triton.instance_status import InstanceStatus


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
