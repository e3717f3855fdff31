"""Shared memory: enough for the largest batches, or an error with the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server.shared_memory import plan_shared_memory

MB = 1 << 20


def make_store(folder: Path, *, rows: int, instances: int) -> Path:
    (folder / "m").mkdir(parents=True)
    (folder / "m" / "config.pbtxt").write_text(
        f'backend: "graphkiln" max_batch_size: {rows} instance_group {{ count: {instances} }}'
        'input { name: "x" data_type: TYPE_FP32 dims: [1000, 250] }'
        'output { name: "y" data_type: TYPE_FP32 dims: [-1] }'
    )
    return folder


def test_a_region_holds_the_largest_batch(tmp_path: Path) -> None:
    planned = plan_shared_memory([make_store(tmp_path, rows=8, instances=2)], free_bytes=1000 * MB)
    assert 8_000_000 < planned.region_bytes < 16_000_000
    assert planned.needed_bytes == 2 * planned.region_bytes


def test_too_little_is_an_error_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ServerSetupError, match=r"has 16 MB left, but 2 model instances need .*--shm-size=\d+m"):
        plan_shared_memory([make_store(tmp_path, rows=8, instances=2)], free_bytes=16 * MB)


def test_regions_grow_on_demand_where_memory_is_scarce(tmp_path: Path) -> None:
    planned = plan_shared_memory([make_store(tmp_path, rows=8, instances=2)], free_bytes=30 * MB)
    assert planned.region_bytes == MB
