"""What a machine is, read from what its kernel says."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln.doctor import machine as module
from graphkiln.doctor.finding import Level, Request
from graphkiln.doctor.machine import (
    check_memory,
    check_processor,
    check_system,
    container,
    find_clock,
    find_locale,
    find_memory,
    find_processor,
    find_system,
)

CPUINFO = "processor\t: 0\nmodel name\t: Xeon\nflags\t\t: fpu avx2 avx512f amx_bf16 sse\n"
MEMINFO = "MemTotal:       8388608 kB\nMemFree: 1 kB\nMemAvailable:   4194304 kB\nHugePages_Total: 0\n"
GB = 1 << 30


def test_the_processor_and_what_makes_it_fast() -> None:
    found = find_processor(CPUINFO, 2, 2)
    assert found.message == "Xeon, 2 cores; avx2, avx512f, amx_bf16"
    assert found.facts["instruction_sets"] == ["avx2", "avx512f", "amx_bf16"]


def test_cores_that_may_not_be_used_are_told_apart() -> None:
    assert "2 cores of 64 (affinity or cgroup quota)" in find_processor(CPUINFO, 2, 64).message


def test_a_processor_that_says_little() -> None:
    assert "no vector instructions" in find_processor("Features\t: asimd\n", 1, 1).message


def test_memory() -> None:
    found = find_memory(MEMINFO, None)
    assert (found.level, found.message) == (Level.OK, "8.0 GB, 4.0 GB available")


@pytest.mark.parametrize(("limit", "level"), [(2 * GB, Level.OK), (GB - 1, Level.WARNING), (16 * GB, Level.OK)])
def test_a_limit_counts_where_it_is_less(limit: int, level: Level) -> None:
    found = find_memory(MEMINFO, limit)
    assert found.level is level
    assert ("limited" in found.message) == (limit < 8 * GB)
    assert bool(found.hint) == (level is Level.WARNING)


def test_containers(tmp_path: Path) -> None:
    assert container(tmp_path, {}) == ""
    assert container(tmp_path, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == "Kubernetes"
    (tmp_path / ".dockerenv").touch()
    assert container(tmp_path, {}) == "Docker"


def test_a_system_that_triton_does_not_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_system("Docker").level is Level.OK
    assert "Docker" in find_system("Docker").message
    monkeypatch.setattr(module.platform, "machine", lambda: "riscv64")
    assert find_system("").level is Level.WARNING
    assert "runs on Linux, on x86-64 and aarch64" in find_system("").hint
    monkeypatch.setattr(module.sys, "platform", "darwin")
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    assert "runs on Linux" in find_system("").hint


def test_a_processor_with_wheels_and_without_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.platform, "machine", lambda: "aarch64")
    found = find_system("")
    assert found.level is Level.WARNING
    assert "no test of this project has run on aarch64" in found.hint


@pytest.mark.parametrize(
    ("now_s", "level"), [(1_800_000_000, Level.OK), (1_790_000_000 - 90_000, Level.WARNING), (0, Level.WARNING)]
)
def test_a_clock_that_was_never_set(now_s: float, level: Level) -> None:
    assert find_clock(now_s, 1_790_000_000).level is level


@pytest.mark.parametrize(("encoding", "level"), [("utf-8", Level.OK), ("UTF8", Level.OK), ("ascii", Level.WARNING)])
def test_file_names(encoding: str, level: Level) -> None:
    assert find_locale(encoding).level is level


def test_this_machine() -> None:
    found = [each for check in (check_processor, check_memory, check_system) for each in check(Request())]
    assert [each.subject for each in found] == ["processor", "memory", "system", "clock", "locale"]
