"""Memory of processes, and the rows of the table."""

from __future__ import annotations

import os
from pathlib import Path

import memory_use
import psutil
import pytest
from inputs import DIGITS
from memory_use import BARE, CPP, Reading, read_memory, rows_of

GRAPH = DIGITS / "1" / "model.onnx"


def test_memory_of_processes() -> None:
    own = read_memory([os.getpid()])
    assert own.pss_mb == pytest.approx(psutil.Process().memory_full_info().pss / 2**20, rel=0.2)
    assert own.peak_mb >= own.pss_mb * 0.5
    assert read_memory([os.getpid()] * 2).pss_mb == pytest.approx(2 * own.pss_mb, rel=0.1)
    assert read_memory([os.getpid()] * 2).peak_mb == pytest.approx(own.peak_mb, rel=0.1)


def readings(*names: str) -> dict[str, list[Reading]]:
    return {name: [Reading(pss_mb=100.0 * number, peak_mb=50.0)] for number, name in enumerate(names, 1)}


def test_ratios_are_to_the_cpp_backend_with_as_many_instances() -> None:
    names = (BARE, f"{CPP}, 1 instance", "graphkiln, 1 instance, first start", f"{CPP}, 2 instances", "o, 2 instances")
    ratios = {row["set-up"]: row["ratio"] for row in rows_of("m", 1.0, readings(*names))}
    assert list(ratios.values()) == [1.0, 1.0, 1.5, 1.0, 1.25]


@pytest.mark.parametrize("cpp", [True, False])
def test_set_ups_differ_by_instances_and_backend(tmp_path: Path, cpp: bool) -> None:
    set_ups = memory_use._set_ups(tmp_path, "m", GRAPH, tmp_path if cpp else None)
    assert len(set_ups) == 1 + 8 + 2 * cpp
    text = (tmp_path / "graphkiln, OpenVINO, 2 instances" / "store" / "m" / "config.pbtxt").read_text()
    assert "count: 2" in text
    assert 'string_value: "openvino"' in text
    if cpp:
        assert 'backend: "onnxruntime"' in (tmp_path / f"{CPP}, 1 instance/store/m/config.pbtxt").read_text()


def test_a_bare_session_that_does_not_start_ends_the_benchmark(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="does not start"):
        memory_use._read_bare(tmp_path / "nowhere.onnx", 0.0)
