"""Memory limits of control groups, of both versions of the kernel's interface."""

from __future__ import annotations

from pathlib import Path

from graphkiln_backend.system.resources import MemoryGroup, memory_groups


def read(folder: Path, text: str) -> list[MemoryGroup]:
    own = folder / "own"
    own.write_text(text)
    return memory_groups(folder / "cgroup", own)


def test_the_limits_on_the_way_count(tmp_path: Path) -> None:
    deep = tmp_path / "cgroup" / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "memory.max").write_text("max\n")
    (deep / "memory.current").write_text("10\n")
    (deep.parent / "memory.max").write_text("1000\n")
    (deep.parent / "memory.current").write_text("700\n")
    (tmp_path / "cgroup" / "memory.max").write_text("2000\n")
    (tmp_path / "cgroup" / "memory.current").write_text("2100\n")
    groups = read(tmp_path, "0::/a/b\n")
    assert [(group.limit_bytes, group.free_bytes) for group in groups] == [(1000, 300), (2000, 0)]


def test_the_first_version(tmp_path: Path) -> None:
    folder = tmp_path / "cgroup" / "memory" / "a"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("500\n")
    (folder / "memory.usage_in_bytes").write_text("100\n")
    (folder.parent / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    expected = [MemoryGroup(limit_bytes=500, used_bytes=100)]
    assert read(tmp_path, "5:memory:/a\n4:cpu,cpuacct:/a\n") == expected
    assert read(tmp_path, "5:hugetlb,memory:/a\n") == expected


def test_files_that_nobody_read_lately_are_no_memory_that_is_used(tmp_path: Path) -> None:
    second, first = tmp_path / "cgroup", tmp_path / "cgroup" / "memory"
    first.mkdir(parents=True)
    (second / "memory.max").write_text("1000\n")
    (second / "memory.current").write_text("900\n")
    (second / "memory.stat").write_text("anon 500\nactive_file 100\ninactive_file 300\n")
    (first / "memory.limit_in_bytes").write_text("1000\n")
    (first / "memory.usage_in_bytes").write_text("900\n")
    (first / "memory.stat").write_text("inactive_file 1\ntotal_rss 500\ntotal_inactive_file 200\n")
    assert [group.used_bytes for group in read(tmp_path, "0::/\n")] == [600]
    assert [group.used_bytes for group in read(tmp_path, "5:memory:/\n")] == [700]


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    root = tmp_path / "cgroup" / "memory"
    root.mkdir(parents=True)
    (root / "memory.limit_in_bytes").write_text("500\n")
    assert read(tmp_path, "5:memory:/docker/0123\n") == [MemoryGroup(limit_bytes=500, used_bytes=0)]


def test_none(tmp_path: Path) -> None:
    assert read(tmp_path, "0::/\n") == []
    assert memory_groups(tmp_path / "cgroup", tmp_path / "missing") == []
