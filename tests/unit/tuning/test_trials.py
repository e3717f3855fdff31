"""What a measurement says of itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from graphkiln.tuning import trials as machine_faults
from graphkiln.tuning.statistics import Interval, Latency
from graphkiln.tuning.trials import ClosedLoop, Failed, Measured, OpenLoop, excused, oom_kills


def test_requests_are_those_with_a_latency() -> None:
    measured = Measured(latency=Latency.of(np.ones(7)), throughput=Interval.exact(7.0), seconds=1.0)
    assert measured.requests == 7


def test_loads_differ_by_kind() -> None:
    assert len({OpenLoop(2), ClosedLoop(2), OpenLoop(2.0)}) == 2


# A failure that may pass is told from one that does not.


@pytest.fixture
def vmstat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "vmstat"
    path.write_text("nr_free_pages 5\noom_kill 3\nnr_dirty 0\n")
    monkeypatch.setattr(machine_faults, "_VMSTAT", path)
    return path


@pytest.mark.parametrize(
    "reason",
    [
        "the server ended with code 2: port 40001 (HTTP) is in use (stop the program that holds it)",
        "digits: [Errno 28] No space left on device: '/tmp/x'",
        "cannot make a temporary folder: [Errno 12] Cannot allocate memory",
        "failed to start HTTP service: Socket '127.0.0.1:40001' Address already in use",
    ],
)
@pytest.mark.usefixtures("vmstat")
def test_what_the_machine_lacked_may_pass(reason: str) -> None:
    found = excused(Failed(reason=reason), 3)
    assert found.passing
    assert found.reason == f"{reason}; the same command tries it again"


@pytest.mark.parametrize("reason", ["no bf16 kernels", "its answers under load are wrong", "spaceship 28 in use"])
@pytest.mark.usefixtures("vmstat")
def test_what_the_candidate_does_not_do_stays(reason: str) -> None:
    assert excused(Failed(reason=reason), 3) == Failed(reason=reason)


def test_a_process_that_was_killed_for_memory_may_be_anybodys(vmstat: Path) -> None:
    before = oom_kills()
    assert before == 3
    vmstat.write_text("oom_kill 4\n")
    found = excused(Failed(reason="under load, tritonserver was killed or crashed"), before)
    assert found.passing
    assert "memory was short" in found.reason


def test_a_kernel_that_does_not_tell_counts_none(vmstat: Path) -> None:
    vmstat.write_text("nr_free_pages 5\n")
    assert oom_kills() == 0
    vmstat.unlink()
    assert oom_kills() == 0
