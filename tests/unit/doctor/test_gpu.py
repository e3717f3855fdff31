"""GPUs, driver and CUDA libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln.doctor import machine as module
from graphkiln.doctor.finding import Level, Request
from graphkiln.doctor.machine import check_gpu, find_cuda, find_gpus, installed_cuda, read_driver_cuda


def test_none_is_no_fault() -> None:
    assert find_gpus([], has_driver=False).level is Level.OK


def test_one_is_named() -> None:
    assert find_gpus(["H200"], has_driver=True).message == "H200"


def test_a_driver_without_a_gpu_is_a_warning() -> None:
    found = find_gpus([], has_driver=True)
    assert found.level is Level.WARNING
    assert found.hint
    chosen = find_gpus([], has_driver=True, chosen="")
    assert "CUDA_VISIBLE_DEVICES" in chosen.message
    assert "unset it" in chosen.hint


@pytest.mark.parametrize(
    ("driver", "library", "level"),
    [
        ("12.4", "12.8.90", Level.OK),
        ("13.0", "12.8.90", Level.OK),
        ("12.4", "13.0.1", Level.WARNING),
        ("", "13.0", Level.OK),
    ],
)
def test_a_driver_runs_what_is_no_newer_than_itself(driver: str, library: str, level: Level) -> None:
    found = find_cuda(driver, {"nvidia-cuda-runtime-cu12": library})
    assert found.level is level
    assert bool(found.hint) == (level is Level.WARNING)


def test_what_the_driver_knows_is_read_from_its_own_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '| NVIDIA-SMI 550.54  Driver Version: 550.54   CUDA Version: 12.4  |'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert read_driver_cuda() == "12.4"
    program.write_text("#!/bin/sh\necho 'Failed to initialize NVML' >&2; exit 9\n")
    assert read_driver_cuda() == ""
    program.unlink()
    monkeypatch.setattr(module.shutil, "which", lambda _: None)
    assert read_driver_cuda() == ""


def test_this_machine() -> None:
    assert all(name.startswith("nvidia-cuda-runtime") for name in installed_cuda())
    assert next(iter(check_gpu(Request()))).subject == "GPUs"
