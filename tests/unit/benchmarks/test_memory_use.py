"""Memory of processes, and the rows of its table."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path

import memory_use
import psutil
import pytest
from inputs import DIGITS
from memory_use import BARE, CPP, Reading, read_memory, rows_of

GRAPH = DIGITS / "1" / "model.onnx"


def test_memory_is_the_kernels() -> None:
    own = read_memory([os.getpid()])
    assert own.pss_mb == pytest.approx(psutil.Process().memory_full_info().pss / 2**20, rel=0.2)
    assert own.peak_mb >= own.pss_mb * 0.5
    assert read_memory([os.getpid()] * 2).pss_mb == pytest.approx(2 * own.pss_mb, rel=0.1)
    assert read_memory([os.getpid()] * 2).peak_mb == pytest.approx(own.peak_mb, rel=0.1)


def readings(*names: str) -> dict[str, list[Reading]]:
    return {name: [Reading(pss_mb=100.0 * number, peak_mb=50.0)] for number, name in enumerate(names, 1)}


def test_ratios_are_to_a_bare_session() -> None:
    rows = rows_of("m", 12.4, readings(BARE, "graphkiln, 1 instance", "graphkiln, 2 instances"))
    assert [row["ratio"] for row in rows] == [1, 2, 3]
    assert rows[1] == {
        "model": "m", "set-up": "graphkiln, 1 instance", "PSS MB": 200, "ratio": 2.0, "spread": 0.0,
        "largest peak MB": 50, "twice the weights MB": 25,
    }  # fmt: skip


def test_or_to_the_cpp_backend_with_as_many_instances() -> None:
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


@pytest.mark.parametrize("first", [True, False])
def test_a_first_start_has_no_cache(tmp_path: Path, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[tuple[str, ...]] = []

    def start(*_: Path, flags: tuple[str, ...], log: Path, found: list[tuple[str, ...]] = flags) -> nullcontext[str]:
        found.append(flags)
        assert log.parent == tmp_path
        return nullcontext("server")

    monkeypatch.setattr(memory_use, "start_server", start)
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "entry").touch()
    with memory_use._start_ours(tmp_path / "store", cache, is_first=first):
        assert (cache / "entry").exists() != first
    assert flags == [("--cache", str(cache))]


def test_a_bare_session_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="does not start"):
        memory_use._read_bare(tmp_path / "nowhere.onnx")
