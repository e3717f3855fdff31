"""A tuner that was killed is told from one that its candidate took down."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln.tuning import machine_faults
from graphkiln.tuning import recording as deaths
from graphkiln.tuning.recording import ALL, TRACED, Deaths, Machine, machine_now

AT_REST: Machine = {"boot": "a", "oom_kills": 4}
SHORT: Machine = {"boot": "a", "oom_kills": 5}
STARTED_AGAIN: Machine = {"boot": "b", "oom_kills": 0}


def died(times: int, *, before: Machine = AT_REST, after: Machine = AT_REST) -> Deaths:
    found = Deaths()
    for _ in range(times):
        found.begin("key", before)
        found.close(after)
    return found


def test_ten_kills_in_the_same_measurement_say_nothing_of_it() -> None:
    assert died(10).verdict("key") == ""
    assert died(10, before={}, after=AT_REST).verdict("key") == "", "of a journal that knows nothing of the machine"


@pytest.mark.parametrize("after", [SHORT, STARTED_AGAIN])
def test_what_took_the_memory_or_the_machine_is_begun_three_times(after: Machine) -> None:
    assert died(TRACED - 1, after=after).verdict("key") == ""
    assert died(TRACED, after=after).verdict("key").startswith(f"the tuner died {TRACED} times")
    assert died(TRACED, after=after).verdict("other") == ""


def test_without_a_trace_it_is_begun_so_often_and_no_more() -> None:
    assert died(ALL - 1).verdict("key") == ""
    assert died(ALL).verdict("key") == f"the tuner died {ALL} times while it was measured"


def test_what_ended_is_no_death() -> None:
    found = Deaths()
    for _ in range(2 * ALL):
        found.begin("key", AT_REST)
        found.end()
    found.close(STARTED_AGAIN)
    assert found.verdict("key") == ""


def test_the_next_beginning_shows_that_the_last_one_never_ended() -> None:
    found = Deaths()
    for _ in range(TRACED):
        found.begin("key", AT_REST)
        found.begin("other", STARTED_AGAIN)
        found.end()
    assert found.verdict("key")
    assert found.verdict("other") == ""


def test_the_machine_is_read_from_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boot, vmstat = tmp_path / "boot_id", tmp_path / "vmstat"
    monkeypatch.setattr(deaths, "_BOOT_ID", boot)
    monkeypatch.setattr(machine_faults, "_VMSTAT", vmstat)
    assert machine_now() == {"boot": "", "oom_kills": 0}, "where it does not tell"
    boot.write_text("0f-1\n")
    vmstat.write_text("oom_kill 7\n")
    assert machine_now() == {"boot": "0f-1", "oom_kills": 7}
