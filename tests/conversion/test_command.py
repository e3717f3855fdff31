"""`graphkiln convert` as a command: lists of architectures, and mistakes."""

from __future__ import annotations

from pathlib import Path

from running import run_command, run_here


def test_lists_architectures() -> None:
    assert "resnet34" in run_here("convert", "--list", "resnet3*").stdout.split()


def test_a_mistake_is_one_line_and_a_code(tmp_path: Path) -> None:
    finished = run_command("convert", "onflow:missing", "--name", "m", "--model-store", tmp_path / "s")
    assert finished.returncode == 2
    assert "did you mean 'oneflow:missing'" in finished.stderr.splitlines()[-1]
    assert not (tmp_path / "s").exists()
