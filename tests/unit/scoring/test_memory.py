"""Memory as the kernel counts it."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from graphkiln_backend.scoring.worker_process import NodeMemory, node_memory, process_memory


def write(folder: Path, limit: str, used: int = 900) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text("anon 500\ninactive_file 300\n")


def read(folder: Path, group: str = "/") -> NodeMemory:
    """Memory of a process of a group."""
    (folder / "own").write_text(f"0::{group}\n")
    return node_memory(folder, folder / "own")


def test_the_limit_of_a_container_counts_and_its_page_cache_does_not(tmp_path: Path) -> None:
    write(tmp_path, "1000")
    for group in ("/", "/jobs.slice/one.service"):
        assert read(tmp_path, group) == NodeMemory(used_bytes=600, total_bytes=1000)


def test_limits_of_the_kernel_s_first_interface_count_too(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1000\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("900\n")
    (tmp_path / "memory" / "memory.stat").write_text("total_inactive_file 300\n")
    (tmp_path / "own").write_text("5:memory:/\n")
    assert node_memory(tmp_path, tmp_path / "own") == NodeMemory(used_bytes=600, total_bytes=1000)


def test_of_groups_within_each_other_the_fullest_counts(tmp_path: Path) -> None:
    write(tmp_path / "job" / "step", "1000")
    write(tmp_path / "job", "2000", used=2250)
    assert read(tmp_path, "/job/step") == NodeMemory(used_bytes=1950, total_bytes=2000)


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    total = psutil.virtual_memory().total
    for limit in ("max", str(2 * total)):
        write(tmp_path, limit, used=2 * total)
        assert read(tmp_path).total_bytes == total
    assert node_memory(tmp_path / "none", tmp_path / "none").total_bytes == total


def test_what_a_process_takes_is_seen() -> None:
    before = process_memory(os.getpid())
    taken = bytearray(os.urandom(1)) * (64 * 2**20)
    assert process_memory(os.getpid()) - before > 60 * 2**20
    assert len(taken) > before * 0
    assert process_memory(2**22 + 1) == 0
