"""Shared memory: enough for the largest batches, or an error with the fix."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server import limits
from graphkiln_backend.server.limits import free_shared_memory, plan_shared_memory

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
    assert planned.instances == 2


def test_too_little_is_an_error_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ServerSetupError, match=r"has 16 MB left, but 2 model instances need .*--shm-size=\d+m"):
        plan_shared_memory([make_store(tmp_path, rows=8, instances=2)], free_bytes=16 * MB)


def test_regions_grow_on_demand_where_memory_is_scarce(tmp_path: Path) -> None:
    planned = plan_shared_memory([make_store(tmp_path, rows=8, instances=2)], free_bytes=30 * MB)
    assert planned.region_bytes == MB


def test_a_full_one_is_an_error_also_where_no_model_is_known_yet() -> None:
    with pytest.raises(ServerSetupError, match=r"/dev/shm is full: 100 kB left.*--shm-size"):
        plan_shared_memory([], free_bytes=100 << 10)


def test_one_size_serves_the_largest_of_several_models(tmp_path: Path) -> None:
    small, large = make_store(tmp_path / "a", rows=1, instances=1), make_store(tmp_path / "b", rows=8, instances=1)
    alone = plan_shared_memory([large], free_bytes=1000 * MB)
    both = plan_shared_memory([small, large], free_bytes=1000 * MB)
    assert both.region_bytes == alone.region_bytes


def test_the_largest_size_is_given_where_half_of_the_memory_stays_free(tmp_path: Path) -> None:
    store = make_store(tmp_path, rows=8, instances=2)
    region = plan_shared_memory([store], free_bytes=1000 * MB).region_bytes
    assert plan_shared_memory([store], free_bytes=4 * region).region_bytes == region
    assert plan_shared_memory([store], free_bytes=4 * region - 1).region_bytes == MB


def test_the_suggested_size_is_enough_for_the_plan(tmp_path: Path) -> None:
    store = make_store(tmp_path, rows=8, instances=2)
    with pytest.raises(ServerSetupError) as raised:
        plan_shared_memory([store], free_bytes=0)
    (size_mb,) = re.findall(r"--shm-size=(\d+)m", raised.value.hint)
    assert plan_shared_memory([store], free_bytes=int(size_mb) * MB).region_bytes > MB


def test_without_shared_memory_nothing_can_be_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(limits, "SHARED_MEMORY", tmp_path / "gone")
    with pytest.raises(ServerSetupError, match="Triton needs it for tensors") as raised:
        free_shared_memory()
    assert raised.value.hint == "mount a tmpfs there"
