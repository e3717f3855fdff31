"""Checks of processor, memory, system, limits and GPUs."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from graphkiln.doctor import machine as module
from graphkiln.doctor.examination import Level, Request
from graphkiln.doctor.machine import (
    LIMITS,
    check_gpu,
    check_limits,
    check_memory,
    check_processor,
    check_system,
    container,
    find_clock,
    find_cuda,
    find_gpus,
    find_limit,
    find_locale,
    find_memory,
    find_processor,
    find_system,
    read_driver_cuda,
)

CPUINFO = "processor\t: 0\nmodel name\t: Xeon\nflags\t\t: fpu avx2 avx512f amx_bf16 sse\n"
MEMINFO = "MemTotal:       8388608 kB\nMemFree: 1 kB\nMemAvailable:   4194304 kB\nHugePages_Total: 0\n"
GB = 1 << 30


def test_this_machine() -> None:
    checks = (check_processor, check_memory, check_system, check_limits, check_gpu)
    found = [each.subject for check in checks for each in check(Request())]
    assert found[: 6 + len(LIMITS)] == ["processor", "memory", "system", "clock", "locale", *LIMITS, "GPUs"]


def test_processor() -> None:
    found = find_processor(CPUINFO, 2, 2)
    assert found.message == "Xeon, 2 cores; avx2, avx512f, amx_bf16"
    assert found.facts["instruction_sets"] == ["avx2", "avx512f", "amx_bf16"]
    assert "2 cores of 64 (affinity or cgroup quota)" in find_processor(CPUINFO, 2, 64).message
    assert "no notable vector instructions" in find_processor("Features\t: asimd\n", 1, 1).message


@pytest.mark.parametrize(
    ("limit", "level"), [(None, Level.OK), (2 * GB, Level.OK), (GB - 1, Level.WARNING), (16 * GB, Level.OK)]
)
def test_memory_limit(limit: int | None, level: Level) -> None:
    found = find_memory(MEMINFO, limit)
    assert found.level is level
    assert found.message.startswith("8 GiB, 4 GiB available")
    assert ("limited" in found.message) == (limit is not None and limit < 8 * GB)
    assert bool(found.hint) == (level is Level.WARNING)


def test_containers(tmp_path: Path) -> None:
    assert container(tmp_path, {}) == ""
    assert container(tmp_path, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == "Kubernetes"
    (tmp_path / ".dockerenv").touch()
    assert container(tmp_path, {}) == "Docker"


@pytest.mark.parametrize(
    ("platform", "machine", "hint"),
    [
        ("linux", "x86_64", ""),
        ("linux", "riscv64", "requires Linux on x86-64 or aarch64"),
        ("darwin", "x86_64", "requires Linux"),
        ("linux", "aarch64", "not tested on aarch64"),
    ],
)
def test_systems(monkeypatch: pytest.MonkeyPatch, platform: str, machine: str, hint: str) -> None:
    monkeypatch.setattr(module.platform, "machine", lambda: machine)
    monkeypatch.setattr(module.sys, "platform", platform)
    found = find_system("Docker")
    assert found.level is (Level.WARNING if hint else Level.OK)
    assert hint in found.hint
    assert "Docker" in found.message


@pytest.mark.parametrize(
    ("now_s", "level"), [(1_800_000_000, Level.OK), (1_790_000_000 - 90_000, Level.WARNING), (0, Level.WARNING)]
)
def test_wrong_clock(now_s: float, level: Level) -> None:
    assert find_clock(now_s, 1_790_000_000).level is level


@pytest.mark.parametrize(("encoding", "level"), [("utf-8", Level.OK), ("UTF8", Level.OK), ("ascii", Level.WARNING)])
def test_encoding_of_file_names(encoding: str, level: Level) -> None:
    assert find_locale(encoding).level is level


@pytest.mark.parametrize("subject", LIMITS)
def test_low_limit_has_a_hint(subject: str) -> None:
    _, least, flag = LIMITS[subject]
    assert find_limit(subject, resource.RLIM_INFINITY).facts == {"limit": None}
    assert find_limit(subject, least).level is Level.OK
    low = find_limit(subject, least - 1)
    assert low.level is Level.WARNING
    assert f"ulimit {flag}" in low.hint
    assert find_limit("file size", 8 << 30).message == "at most 8 GiB"


@pytest.mark.parametrize(
    ("names", "chosen", "level", "words"),
    [
        ([], None, Level.WARNING, "nvidia-smi shows no GPU"),
        ([], "", Level.WARNING, "CUDA_VISIBLE_DEVICES"),
        (["H200"], None, Level.OK, "H200"),
    ],
)
def test_gpus(names: list[str], chosen: str | None, level: Level, words: str) -> None:
    found = find_gpus(names, has_driver=True, chosen=chosen)
    assert found.level is level
    assert words in found.message
    assert bool(found.hint) == (level is Level.WARNING)
    assert find_gpus([], has_driver=False).level is Level.OK


@pytest.mark.parametrize(
    ("driver", "library", "level"),
    [
        ("12.4", "12.8.90", Level.OK),
        ("13.0", "12.8.90", Level.OK),
        ("12.4", "13.0.1", Level.WARNING),
        ("", "13.0", Level.OK),
    ],
)
def test_cuda_libraries_newer_than_the_driver(driver: str, library: str, level: Level) -> None:
    found = find_cuda(driver, {"nvidia-cuda-runtime-cu12": library})
    assert found.level is level
    assert bool(found.hint) == (level is Level.WARNING)


def test_cuda_release_of_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '| NVIDIA-SMI 550.54  Driver Version: 550.54   CUDA Version: 12.4  |'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert read_driver_cuda() == "12.4"
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML' >&2; exit 9\n")
    assert read_driver_cuda() == ""
    monkeypatch.setattr(module.shutil, "which", lambda _: None)
    assert read_driver_cuda() == ""
