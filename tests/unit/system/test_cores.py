"""Cores that this process may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.system import resources as cores


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The only control group of this process, of the newer kind."""
    (tmp_path / "groups").mkdir()
    (tmp_path / "own").write_text("0::/\n")
    monkeypatch.setattr(cores, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(cores, "OWN_CGROUPS", tmp_path / "own")
    return tmp_path / "groups"


@pytest.fixture
def older(group: Path) -> Path:
    """The same, of the older kind."""
    group.with_name("own").write_text("5:memory:/a\n4:cpu,cpuacct:/a\n")
    (group / "cpu" / "a").mkdir(parents=True)
    return group / "cpu" / "a"


class TestCores:
    @pytest.mark.parametrize(
        ("content", "expected"), [("max 100000", 64), ("150000 100000", 2), ("50000 100000", 1), ("9900000 100000", 64)]
    )
    def test_the_quota_of_a_container_counts(
        self, monkeypatch: pytest.MonkeyPatch, group: Path, content: str, expected: int
    ) -> None:
        (group / "cpu.max").write_text(content + "\n")
        monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(64)))
        assert cores.usable_cores() == expected

    def test_so_does_that_of_a_service_and_of_what_holds_it(self, monkeypatch: pytest.MonkeyPatch, group: Path) -> None:
        """As systemd and Slurm limit what runs in no container: the root has no file."""
        group.with_name("own").write_text("0::/jobs.slice/one.service\n")
        (group / "jobs.slice" / "one.service").mkdir(parents=True)
        (group / "jobs.slice" / "one.service" / "cpu.max").write_text("max 100000\n")
        (group / "jobs.slice" / "cpu.max").write_text("300000 100000\n")
        monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(64)))
        assert cores.usable_cores() == 3
        (group / "jobs.slice" / "one.service" / "cpu.max").write_text("200000 100000\n")
        assert cores.usable_cores() == 2

    def test_the_older_files_count_too(self, monkeypatch: pytest.MonkeyPatch, older: Path) -> None:
        (older / "cpu.cfs_quota_us").write_text("300000\n")
        (older / "cpu.cfs_period_us").write_text("100000\n")
        monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(64)))
        assert cores.usable_cores() == 3

    def test_the_affinity_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {5})
        assert cores.usable_cores() == 1

    @pytest.mark.parametrize("quota", ["-1\n", None])
    def test_older_files_without_a_quota_limit_nothing(
        self, monkeypatch: pytest.MonkeyPatch, older: Path, quota: str | None
    ) -> None:
        if quota:
            (older / "cpu.cfs_quota_us").write_text(quota)
            (older / "cpu.cfs_period_us").write_text("100000\n")
        monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(7)))
        assert cores.usable_cores() == 7

    @pytest.mark.parametrize(("quota", "expected"), [("100001 100000", 2), ("1000 100000", 1), ("300000 50000", 6)])
    def test_a_part_of_a_core_counts_as_one(
        self, monkeypatch: pytest.MonkeyPatch, group: Path, quota: str, expected: int
    ) -> None:
        (group / "cpu.max").write_text(quota)
        monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(64)))
        assert cores.usable_cores() == expected

    @pytest.mark.parametrize(("told", "expected"), [("2", 2), ("64", 4), ("", 4)])
    def test_what_a_pod_requests_counts_where_it_is_less(
        self, monkeypatch: pytest.MonkeyPatch, group: Path, told: str, expected: int
    ) -> None:
        (group / "cpu.max").write_text("400000 100000")
        monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: set(range(64)))
        monkeypatch.setenv("GRAPHKILN_CORES", told)
        assert cores.usable_cores() == expected

    @pytest.mark.parametrize("told", ["two", "0", "-1", "1.5"])
    def test_what_is_no_number_of_cores_is_refused(self, monkeypatch: pytest.MonkeyPatch, told: str) -> None:
        monkeypatch.setenv("GRAPHKILN_CORES", told)
        with pytest.raises(ServerSetupError, match=f"GRAPHKILN_CORES is '{told}', which is no number of cores"):
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

    def test_those_of_a_node_stand_behind_each_other(self) -> None:
        assert cores.numa_nodes() == {0: 0, 1: 0, 4: 0, 5: 0, 2: 1, 3: 1, 6: 1, 7: 1}
        assert cores.usable_core_numbers() == (1, 4, 2, 3, 6)

    def test_there_are_no_more_than_the_quota_allows(self, group: Path) -> None:
        assert cores.has_own_cores()
        (group / "cpu.max").write_text("300000 100000")
        assert cores.usable_core_numbers() == (1, 4, 2)
        assert not cores.has_own_cores()

    def test_without_nodes_they_are_in_order(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(cores, "_NUMA_NODES", tmp_path / "none")
        assert cores.usable_core_numbers() == (1, 2, 3, 4, 6)


class TestThreadsOfACore:
    """Most systems number the first threads of all physical cores first: 0 and 4 share one here."""

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

    def test_they_stand_behind_each_other(self) -> None:
        assert cores.usable_core_numbers() == (0, 4, 1, 5, 2, 6, 3, 7)

    @pytest.mark.parametrize(("quota", "found"), [(4, (0, 1, 2, 3)), (5, (0, 4, 1, 2, 3)), (1, (0,))])
    def test_a_quota_is_for_whole_cores_first(self, group: Path, quota: int, found: tuple[int, ...]) -> None:
        (group / "cpu.max").write_text(f"{quota}00000 100000")
        assert cores.usable_core_numbers() == found

    def test_of_those_alone_that_may_be_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As with `--cpuset-cpus 1,3`, or the second threads of two cores."""
        for allowed, found in (({1, 3}, (1, 3)), ({5, 7, 1}, (1, 5, 7)), ({7, 6}, (6, 7))):
            monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _, cores=allowed: cores)
            assert cores.usable_core_numbers() == found

    def test_systems_that_tell_nothing(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(cores, "_CORES", tmp_path / "none")
        assert cores.usable_core_numbers() == tuple(range(8))


def test_a_thread_stays_on_the_cores_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[set[int]] = []
    monkeypatch.setattr(cores.os, "sched_setaffinity", lambda _, numbers: kept.append(numbers))
    cores.stay_on((0, 1, 3, 1))
    cores.stay_on(iter(()))
    assert kept == [{0, 1, 3}]
