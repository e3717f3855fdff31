"""Usable cores and memory: affinity, control groups, NUMA nodes and the user's setting."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.system import resources as cores
from graphkiln_backend.system.resources import MemoryGroup, memory_groups, own_groups


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The only control group of this process, cgroup v2."""
    (tmp_path / "groups").mkdir()
    (tmp_path / "own").write_text("0::/\n")
    monkeypatch.setattr(cores, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(cores, "OWN_CGROUPS", tmp_path / "own")
    return tmp_path / "groups"


@pytest.fixture
def older(group: Path) -> Path:
    """The same in cgroup v1."""
    group.with_name("own").write_text("5:memory:/a\n4:cpu,cpuacct:/a\n")
    (group / "cpu" / "a").mkdir(parents=True)
    return group / "cpu" / "a"


class TestCores:
    @pytest.mark.parametrize(
        ("content", "expected"), [("max 100000", 64), ("150000 100000", 2), ("50000 100000", 1), ("9900000 100000", 64)]
    )
    def test_container_quota(self, monkeypatch: pytest.MonkeyPatch, group: Path, content: str, expected: int) -> None:
        (group / "cpu.max").write_text(content + "\n")
        monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(64)))
        assert cores.usable_cores() == expected

    def test_quota_of_a_parent_group(self, monkeypatch: pytest.MonkeyPatch, group: Path) -> None:
        """Services of systemd and jobs of Slurm: a parent group has the limit, the root has none."""
        group.with_name("own").write_text("0::/jobs.slice/one.service\n")
        (group / "jobs.slice" / "one.service").mkdir(parents=True)
        (group / "jobs.slice" / "one.service" / "cpu.max").write_text("max 100000\n")
        (group / "jobs.slice" / "cpu.max").write_text("300000 100000\n")
        monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(64)))
        assert cores.usable_cores() == 3
        (group / "jobs.slice" / "one.service" / "cpu.max").write_text("200000 100000\n")
        assert cores.usable_cores() == 2

    def test_quota_in_cgroup_v1(self, monkeypatch: pytest.MonkeyPatch, older: Path) -> None:
        (older / "cpu.cfs_quota_us").write_text("300000\n")
        (older / "cpu.cfs_period_us").write_text("100000\n")
        monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(64)))
        assert cores.usable_cores() == 3

    def test_affinity_mask(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {5})
        assert cores.usable_cores() == 1

    @pytest.mark.parametrize(("value", "expected"), [("2", 2), ("64", 4), ("", 4)])
    def test_cores_variable_lowers_the_limit(
        self, monkeypatch: pytest.MonkeyPatch, group: Path, value: str, expected: int
    ) -> None:
        (group / "cpu.max").write_text("400000 100000")
        monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(64)))
        monkeypatch.setenv("GRAPHKILN_CORES", value)
        assert cores.usable_cores() == expected

    @pytest.mark.parametrize("value", ["two", "0", "-1", "1.5"])
    def test_invalid_cores_variable_is_refused(self, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        monkeypatch.setenv("GRAPHKILN_CORES", value)
        with pytest.raises(ServerSetupError, match="GRAPHKILN_CORES"):
            cores.usable_cores()


class TestNumbers:
    @pytest.fixture(autouse=True)
    def _two_nodes(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for node, listed in (("node0", "0-1,4-5\n"), ("node1", "2,3,6-7\n"), ("node2", "\n")):
            (tmp_path / node).mkdir()
            (tmp_path / node / "cpulist").write_text(listed)
        monkeypatch.setattr(cores, "_NUMA_NODES", tmp_path)
        monkeypatch.setattr(cores, "_CORES", tmp_path)
        monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {1, 2, 3, 4, 6})

    def test_cores_of_a_numa_node_are_neighbors(self) -> None:
        assert cores.numa_nodes() == {0: 0, 1: 0, 4: 0, 5: 0, 2: 1, 3: 1, 6: 1, 7: 1}
        assert cores.usable_core_numbers() == (1, 4, 2, 3, 6)

    def test_quota_limits_core_numbers(self, group: Path) -> None:
        assert cores.has_own_cores()
        (group / "cpu.max").write_text("300000 100000")
        assert cores.usable_core_numbers() == (1, 4, 2)
        assert not cores.has_own_cores()


class TestThreadsOfACore:
    """Most systems number the first threads of all physical cores first: here 0 and 4 share a core."""

    PAIRS = ("0,4", "1,5", "2,6", "3,7")

    @pytest.fixture(autouse=True)
    def _four_cores(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for pair in self.PAIRS:
            for number in pair.split(","):
                topology = tmp_path / f"cpu{number}" / "topology"
                topology.mkdir(parents=True)
                (topology / ("core_cpus_list" if number < "4" else "thread_siblings_list")).write_text(f"{pair}\n")
        monkeypatch.setattr(cores, "_NUMA_NODES", tmp_path / "none")
        monkeypatch.setattr(cores, "_CORES", tmp_path)
        monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(8)))

    def test_threads_of_a_core_are_neighbors(self) -> None:
        assert cores.usable_core_numbers() == (0, 4, 1, 5, 2, 6, 3, 7)

    @pytest.mark.parametrize(("quota", "found"), [(4, (0, 1, 2, 3)), (5, (0, 4, 1, 2, 3)), (1, (0,))])
    def test_quota_prefers_whole_cores(self, group: Path, quota: int, found: tuple[int, ...]) -> None:
        (group / "cpu.max").write_text(f"{quota}00000 100000")
        assert cores.usable_core_numbers() == found

    def test_only_allowed_cores_are_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As with `--cpuset-cpus 1,3`, or only the second threads of two cores."""
        for allowed, found in (({1, 3}, (1, 3)), ({5, 7, 1}, (1, 5, 7)), ({7, 6}, (6, 7))):
            monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _, cores=allowed: cores)
            assert cores.usable_core_numbers() == found


def test_stay_on_sets_the_affinity_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[set[int]] = []
    monkeypatch.setattr(cores.os, "sched_setaffinity", lambda _, numbers: kept.append(numbers))
    cores.stay_on((0, 1, 3, 1))
    cores.stay_on(iter(()))
    assert kept == [{0, 1, 3}]


# The control groups of a process.


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("0::/\n", [("", 2)]),
        ("0::/a/b\n", [("a/b", 2), ("a", 2), ("", 2)]),
        ("5:memory:/a\n4:cpu,cpuacct:/\n", [("cpu", 1)]),
        ("4:cpuacct,cpu:/a\n0::/\n", [("cpu/a", 1), ("cpu", 1), ("", 2)]),
        ("5:memory:/a\n", []),
    ],
)
def test_innermost_group_comes_first(tmp_path: Path, own: str, expected: list[tuple[str, int]]) -> None:
    (tmp_path / "own").write_text(own)
    groups = tmp_path / "groups"
    assert [*own_groups("cpu", groups, tmp_path / "own")] == [(groups / path, version) for path, version in expected]


def test_system_without_control_groups(tmp_path: Path) -> None:
    assert [*own_groups("cpu", tmp_path, tmp_path / "none")] == []


# Memory limits of control groups, of both versions of the kernel's interface.


def read(folder: Path, text: str) -> list[MemoryGroup]:
    own = folder / "own"
    own.write_text(text)
    return memory_groups(folder / "cgroup", own)


def test_memory_limits_of_parent_groups(tmp_path: Path) -> None:
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


def test_memory_limit_in_cgroup_v1(tmp_path: Path) -> None:
    folder = tmp_path / "cgroup" / "memory" / "a"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("500\n")
    (folder / "memory.usage_in_bytes").write_text("100\n")
    (folder.parent / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    expected = [MemoryGroup(limit_bytes=500, used_bytes=100)]
    assert read(tmp_path, "5:memory:/a\n4:cpu,cpuacct:/a\n") == expected
    assert read(tmp_path, "5:hugetlb,memory:/a\n") == expected


def test_inactive_page_cache_is_not_counted(tmp_path: Path) -> None:
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


def test_container_whose_own_group_is_the_root(tmp_path: Path) -> None:
    root = tmp_path / "cgroup" / "memory"
    root.mkdir(parents=True)
    (root / "memory.limit_in_bytes").write_text("500\n")
    assert read(tmp_path, "5:memory:/docker/0123\n") == [MemoryGroup(limit_bytes=500, used_bytes=0)]
