"""Workers in processes of this machine: calls, their errors, and the end of either side."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from graphkiln_backend.engines.hardware import VISIBLE_GPUS
from graphkiln_backend.scoring import local_machine as module
from graphkiln_backend.scoring.fleet import CRASHED, OUT_OF_MEMORY, CallFailed, Room, WorkerLost
from graphkiln_backend.scoring.local_machine import LocalMachine
from graphkiln_backend.scoring.messages import ScoreRequest
from graphkiln_backend.scoring.worker_process import WorkerProcess, started_early, take
from graphkiln_backend.system.resources import MemoryGroup

REQUEST = ScoreRequest(source="in", model="/store/m", destination="out")
ROOM = Room(workers=1, cores=1, gpus=0)
DRIVER = """
import os, signal, sys
from graphkiln_backend.scoring.worker_process import WorkerProcess

worker = WorkerProcess()
worker.begin("name", "request", 4, {})
worker.call("progress", 0.0).result()
worker.call("progress", 600.0)
print(worker._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def machine() -> LocalMachine:
    return LocalMachine()


@pytest.fixture
def worker(machine: LocalMachine) -> Iterator[WorkerProcess]:
    """A worker without a model: it is not started."""
    begun = machine.start(machine.nodes()[0], ROOM, "worker-1", REQUEST)
    yield begun
    machine.kill(begun)


def test_this_machine_takes_part(machine: LocalMachine) -> None:
    (node,) = machine.nodes()
    assert node.cores >= 1
    assert machine.result(machine.check(node, "9.9", "/store/m")) == ""


def test_calls_run_at_the_same_time(machine: LocalMachine, worker: WorkerProcess) -> None:
    slow, fast = machine.call(worker, "progress", 60.0), machine.call(worker, "progress", 0.0)
    assert machine.wait([slow, fast], 60.0) == [fast]
    assert machine.result(fast) == 0
    assert machine.wait([slow], 0.0) == []
    closed = machine.call(worker, "close")
    assert machine.wait([closed, fast], 60.0, every=True)
    assert machine.result(closed) is None


def test_an_error_of_a_call_is_told(machine: LocalMachine, worker: WorkerProcess) -> None:
    call = machine.call(worker, "commit", 7)
    machine.wait([call], 60.0)
    with pytest.raises(CallFailed, match=r"AttributeError: .*_worker"):
        machine.result(call)


def test_calls_of_a_process_that_ended_fail(machine: LocalMachine, worker: WorkerProcess) -> None:
    call = machine.call(worker, "progress", 600.0)
    worker._process.kill()
    for each in (call, machine.call(worker, "close")):
        machine.wait([each], 60.0)
        with pytest.raises(WorkerLost, match="exit status -9") as caught:
            machine.result(each)
        assert caught.value.reason == CRASHED
    later = machine.call(worker, "close")
    assert later.done()


def test_a_process_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyarrow.py").write_text("raise ImportError('libarrow.so is missing')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    machine = LocalMachine()
    worker = machine.start(machine.nodes()[0], ROOM, "worker-1", REQUEST)
    call = machine.call(worker, "start")
    machine.wait([call], 60.0)
    with pytest.raises(WorkerLost, match=r"ImportError: libarrow\.so is missing"):
        machine.result(call)
    machine.kill(worker)


def test_a_worker_ends_with_its_driver() -> None:
    driver = subprocess.run([sys.executable, "-c", DRIVER], capture_output=True, text=True, check=False, timeout=60)
    assert driver.returncode == -9
    deadline = time.monotonic() + 60
    while psutil.pid_exists(int(driver.stdout)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(int(driver.stdout))


def test_the_kernel_ends_a_worker_before_its_driver(machine: LocalMachine, worker: WorkerProcess) -> None:
    machine.wait([machine.call(worker, "progress", 0.0)], 60.0)
    assert Path(f"/proc/{worker._process.pid}/oom_score_adj").read_text() == "1000\n"


def test_the_largest_worker_is_ended_before_memory_runs_out(
    machine: LocalMachine, worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = machine.call(worker, "progress", 600.0)
    machine.wait([machine.call(worker, "progress", 0.0)], 60.0)
    held = psutil.Process(worker.pid).memory_info().rss
    for limit, free in ((held * 10, held), (held * 100, held * 2), (held * 100, held // 2)):
        assert not call.done()
        machine._looked_at = 0.0
        monkeypatch.setattr(module, "memory_groups", lambda: [MemoryGroup(limit_bytes=limit, used_bytes=limit - free)])  # noqa: B023
        machine.wait([call], 0.2)
    machine.wait([call], 60.0)
    with pytest.raises(WorkerLost) as caught:
        machine.result(call)
    assert caught.value.reason == OUT_OF_MEMORY


def test_a_process_is_started_early_and_ended_if_it_is_not_needed() -> None:
    before = psutil.Process().children()
    with started_early():
        taken = take()
        taken.kill()
    with started_early():
        pass
    assert set(psutil.Process().children()) <= set(before)
    assert taken._process.returncode == -9


@pytest.mark.parametrize(("visible", "expected"), [(None, ["0", "1", "0"]), ("4,GPU-7", ["4", "GPU-7", "4"])])
def test_each_worker_has_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: list[str]
) -> None:
    class Begun:
        def begin(self, _name: str, _request: object, _threads: int, environment: dict[str, str]) -> None:
            lent.append(environment[VISIBLE_GPUS])

        def kill(self) -> None:
            """Nothing runs."""

    lent: list[str] = []
    monkeypatch.setattr(module, "gpus", lambda: ["first", "second"])
    monkeypatch.setattr(module, "take", Begun)
    monkeypatch.delenv(VISIBLE_GPUS, raising=False)
    if visible:
        monkeypatch.setitem(os.environ, VISIBLE_GPUS, visible)
    machine = LocalMachine()
    room, (node,) = Room(workers=2, cores=1, gpus=1), machine.nodes()
    first, _ = (machine.start(node, room, name, REQUEST) for name in ("a", "b"))
    machine.kill(first)
    machine.start(node, room, "c", REQUEST)
    assert lent == expected
