"""What the watchdog finds in the files and the processes of instances."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from statuses import instance_status

from graphkiln_backend.server import watchdog as module
from graphkiln_backend.server import watchdog as suspension
from graphkiln_backend.server.watchdog import Cause, Fault, Stub, TimeLimits, Watchdog, describe_exit, exit_code
from graphkiln_backend.triton.instance_status import Loading, Progress, StatusFile
from graphkiln_backend.triton.snapshot import Snapshot, read_snapshot

LIMITS = TimeLimits(compute=30, load=60)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.fixture
def watchdog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watchdog:
    monkeypatch.setattr(module, "read_stubs", lambda _: [])  # those of this process are other tests' servers'
    return Watchdog(tmp_path, os.getpid(), LIMITS)


def look(watchdog: Watchdog, folder: Path) -> Fault | None:
    return watchdog.look(read_snapshot(folder))


def said(*, begun_s: float = 1.0, ended: int = 1, beat_s: float = 0.5, ready: bool = True) -> Snapshot:
    """By one instance, which is this process."""
    now, key = time.monotonic(), f"m_0.{os.getpid()}"
    progress = Progress(begun=1, ended=ended, begun_at=now - begun_s, heartbeat=now - beat_s)
    statuses = {key: instance_status(pid=os.getpid())} if ready else {}
    return Snapshot(statuses=statuses, progress={key: progress})


def test_nothing_is_wrong_with_an_instance_that_lives(tmp_path: Path, watchdog: Watchdog) -> None:
    with StatusFile(tmp_path, "m_0", instance_status(pid=os.getpid())):
        assert look(watchdog, tmp_path) is None


def test_a_process_that_is_gone(tmp_path: Path, watchdog: Watchdog, process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    with (
        StatusFile(tmp_path, "a_0", instance_status(pid=os.getpid())),
        StatusFile(tmp_path, "m_0", instance_status(pid=process.pid)),
    ):
        fault = look(watchdog, tmp_path)
    assert fault is not None
    assert (fault.cause, fault.what) == (Cause.INSTANCE_DIED, "an instance of m version 3 died")


def test_an_instance_that_is_just_being_unloaded(tmp_path: Path, watchdog: Watchdog) -> None:
    with StatusFile(tmp_path, "m_0", instance_status(pid=1 << 30)):
        seen = read_snapshot(tmp_path)
    assert len(seen.statuses) == 1
    assert watchdog.look(seen) is None


@pytest.mark.parametrize("which", ["server", "instance"])
def test_a_stopped_process_is_given_a_moment(
    tmp_path: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    monkeypatch.setattr(module, "_STOPPED_S", 0.2)
    server, instance = (process.pid, os.getpid()) if which == "server" else (os.getpid(), process.pid)
    watchdog = Watchdog(tmp_path, server, LIMITS)
    with StatusFile(tmp_path, "m_0", instance_status(pid=instance)):
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert look(watchdog, tmp_path) is None
        process.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        time.sleep(0.3)
        assert look(watchdog, tmp_path) is None, "it goes on"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert look(watchdog, tmp_path) is None
        time.sleep(0.3)
        fault = look(watchdog, tmp_path)
    assert fault is not None
    assert fault.cause is (Cause.SERVER_HUNG if which == "server" else Cause.INSTANCE_HUNG)
    assert fault.what.endswith("was stopped by a signal")


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ({"beat_s": 19.0}, None),
        ({"beat_s": 21.0}, Cause.INSTANCE_HUNG),
        ({"begun_s": 29.0, "ended": 0}, None),
        ({"begun_s": 31.0, "ended": 0}, Cause.COMPUTE_LIMIT),
        ({"begun_s": 31.0, "ended": 1}, None),
    ],
)
def test_limits(watchdog: Watchdog, values: dict[str, float], cause: Cause | None) -> None:
    fault = watchdog.look(said(**values))  # type: ignore[arg-type]
    assert (fault.cause if fault else None) is cause


def test_files_of_an_instance_that_is_not_ready_say_nothing(watchdog: Watchdog) -> None:
    assert watchdog.look(said(beat_s=100.0, ready=False)) is None


def test_after_a_pause_of_its_own_it_lets_everybody_beat_first(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.4)
    monkeypatch.setattr(suspension, "_SUSPENDED_S", 0.2)
    time.sleep(0.3)
    assert watchdog.look(said(beat_s=50.0)) is None
    time.sleep(0.1)
    assert watchdog.look(said(beat_s=50.0)) is None
    time.sleep(0.15)
    assert watchdog.look(said(beat_s=50.0)) is not None


def test_wrong_outputs(tmp_path: Path, watchdog: Watchdog) -> None:
    with StatusFile(tmp_path, "m_0", instance_status(pid=os.getpid())) as status:
        status.report_fault("y differs")
        fault = look(watchdog, tmp_path)
    assert fault is not None
    assert fault.cause is Cause.WRONG_OUTPUTS
    assert fault.what == "an instance of m version 3 serves no more (y differs)"


def test_a_file_that_is_cut_short_is_no_fault(tmp_path: Path, watchdog: Watchdog) -> None:
    with StatusFile(tmp_path, "m_0", instance_status(pid=os.getpid())):
        (tmp_path / "m_1.77.counters").write_bytes(b"cut")
        assert look(watchdog, tmp_path) is None


def test_a_file_that_is_cut_short_hides_no_fault(tmp_path: Path, watchdog: Watchdog) -> None:
    (tmp_path / "a_0.77.json").write_bytes(b'{"pid": 7')
    with StatusFile(tmp_path, "m_0", instance_status(pid=1 << 30)):
        fault = look(watchdog, tmp_path)
    assert fault is not None
    assert fault.cause is Cause.INSTANCE_DIED


def test_a_look_asks_for_the_state_of_each_process_once(watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    state = module._state
    monkeypatch.setattr(module, "_state", lambda process: (asked.append(process), state(process))[1])
    assert watchdog.look(said()) is None
    assert watchdog.end_endless_loading(said()) == 0
    assert asked == [os.getpid(), os.getpid()], "an instance, and the server"


class TestLoading:
    def load(self, folder: Path, process: int, since: float) -> None:
        text = f'{{"pid": {process}, "model": "m", "version": 2, "since": {since}}}'
        (folder / f"m_0.{process}.loading").write_text(text)

    def test_it_may_take_its_time(self, tmp_path: Path, watchdog: Watchdog, process: subprocess.Popen[bytes]) -> None:
        self.load(tmp_path, process.pid, time.monotonic() - 50)
        assert watchdog.end_endless_loading(read_snapshot(tmp_path)) == 0
        assert process.poll() is None

    def test_a_process_that_takes_too_long_is_ended_once(
        self, tmp_path: Path, watchdog: Watchdog, process: subprocess.Popen[bytes], logged: list[str]
    ) -> None:
        self.load(tmp_path, process.pid, time.monotonic() - 70)
        record = tmp_path / f"m_0.{process.pid}.crash"
        record.touch()
        assert watchdog.end_endless_loading(read_snapshot(tmp_path)) == 1
        assert process.wait(10) == -signal.SIGKILL
        assert record.read_text() == "loading m version 2 did not finish within 60 s (--load-deadline)"
        assert watchdog.end_endless_loading(read_snapshot(tmp_path)) == 0
        assert logged == ["loading m version 2 did not finish within 60 s (--load-deadline): its process is ended"]

    def test_a_stub_that_hangs_before_it_has_said_anything_is_ended(
        self, watchdog: Watchdog, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, logged: list[str]
    ) -> None:
        stub = Stub(pid=process.pid, model="m", version="2", age_s=70.0)
        monkeypatch.setattr(module, "read_stubs", lambda _: [stub])
        assert watchdog.end_endless_loading(Snapshot()) == 1
        assert process.wait(10) == -signal.SIGKILL
        assert logged == ["loading m version 2 did not finish within 60 s (--load-deadline): its process is ended"]

    def test_one_that_died_as_soon_as_it_was_started(self, watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
        """Triton waits for it without an end, and nothing says so."""
        monkeypatch.setattr(module, "_STUBS_EVERY_S", -1.0)
        now = time.monotonic()
        clock = [now]
        monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
        dead = [Stub(pid=7, model="", version="", age_s=0.5, ended=True)]
        monkeypatch.setattr(module, "read_stubs", lambda _: dead)
        assert watchdog.end_endless_loading(Snapshot()) == 0
        assert watchdog.look(Snapshot()) is None, "it may be asked about any moment"
        clock[0] += 4
        dead[0] = Stub(pid=7, model="", version="", age_s=14.5, ended=True)
        assert watchdog.end_endless_loading(Snapshot()) == 0
        assert watchdog.look(Snapshot()) is None
        clock[0] += 7
        assert watchdog.end_endless_loading(Snapshot()) == 0
        fault = watchdog.look(Snapshot())
        assert fault == Fault(cause=Cause.INSTANCE_DIED, what="an instance died as soon as it was started")

    @pytest.mark.parametrize("then", [[], [Stub(pid=7, model="", version="", age_s=3000.0, ended=True)]])
    def test_one_that_was_asked_about_or_has_served(
        self, watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch, then: list[Stub]
    ) -> None:
        monkeypatch.setattr(module, "_STUBS_EVERY_S", -1.0)
        clock = [time.monotonic()]
        monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
        first = [] if then else [Stub(pid=7, model="", version="", age_s=0.5, ended=True)]
        for stubs in (first, then, then):
            monkeypatch.setattr(module, "read_stubs", lambda _, stubs=stubs: stubs)
            watchdog.end_endless_loading(Snapshot())
            assert watchdog.look(Snapshot()) is None
            clock[0] += 4.9  # longer would look like a suspension of this process

    def test_what_has_loaded_without_end_before_gets_no_second_chance(
        self, tmp_path: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "read_stubs", lambda _: [])  # those of this process are other tests' servers'
        endless = {"m version 2"}
        watchdog = Watchdog(tmp_path, os.getpid(), TimeLimits(load=60), endless)
        self.load(tmp_path, process.pid, time.monotonic())
        assert watchdog.end_endless_loading(read_snapshot(tmp_path)) == 1
        assert process.wait(10) == -signal.SIGKILL

    @pytest.mark.parametrize("before", ["ready", "ended"])
    def test_a_process_with_the_number_of_one_that_is_gone(
        self, tmp_path: Path, watchdog: Watchdog, process: subprocess.Popen[bytes], before: str
    ) -> None:
        since = time.monotonic() - 70
        if before == "ready":
            watchdog.end_endless_loading(Snapshot(ready=frozenset({process.pid})))
        else:
            loading = Loading(pid=process.pid, model="n", version=1, since=since)
            watchdog.end_endless_loading(Snapshot(loading={"n_0.1": loading}))
        watchdog.end_endless_loading(Snapshot())
        self.load(tmp_path, process.pid, since)
        assert watchdog.end_endless_loading(read_snapshot(tmp_path)) == 1

    def test_one_that_has_ended_meanwhile(
        self, tmp_path: Path, watchdog: Watchdog, process: subprocess.Popen[bytes]
    ) -> None:
        process.kill()
        process.wait()
        self.load(tmp_path, process.pid, time.monotonic() - 70)
        assert watchdog.end_endless_loading(read_snapshot(tmp_path)) == 0


@pytest.mark.parametrize(
    ("code", "what", "exits_with"),
    [
        (0, "tritonserver ended by itself with code 0", 1),
        (3, "tritonserver ended by itself with code 3", 3),
        (-signal.SIGBUS, "tritonserver was killed by SIGBUS", 128 + signal.SIGBUS),
        (-40, "tritonserver was killed by signal 40", 168),
    ],
)
def test_the_end_of_a_server(code: int, what: str, exits_with: int) -> None:
    fault = describe_exit(code)
    assert (fault.cause, fault.what, fault.code) == (Cause.SERVER_DIED, what, exits_with)


def test_exit_codes_are_those_of_a_shell() -> None:
    assert [exit_code(code) for code in (0, 5, -9)] == [0, 5, 137]
