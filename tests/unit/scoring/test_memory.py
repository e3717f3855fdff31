"""Memory as the kernel counts it."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from graphkiln_backend.scoring.memory import NodeMemory, node_memory, process_memory


def read(folder: Path, limit: str, group: str = "/") -> NodeMemory:
    """Memory of a process of a group, where the root has a limit."""
    (folder / "own").write_text(f"0::{group}\n")
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text("900\n")
    (folder / "memory.stat").write_text("anon 500\ninactive_file 300\n")
    return node_memory(folder, folder / "own")


def test_the_limit_of_a_container_counts_and_its_page_cache_does_not(tmp_path: Path) -> None:
    for group in ("/", "/jobs.slice/one.service"):
        assert read(tmp_path, "1000", group) == NodeMemory(used_bytes=600, total_bytes=1000)


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    total = psutil.virtual_memory().total
    assert read(tmp_path, "max").total_bytes == total
    assert node_memory(tmp_path / "none", tmp_path / "none").total_bytes == total


def test_what_a_process_takes_is_seen() -> None:
    before = process_memory(os.getpid())
    taken = bytearray(os.urandom(1)) * (64 * 2**20)
    assert process_memory(os.getpid()) - before > 60 * 2**20
    assert len(taken) > before * 0
    assert process_memory(2**22 + 1) == 0
