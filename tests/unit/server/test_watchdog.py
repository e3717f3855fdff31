"""Faults that the watchdog finds in status files and processes of instances."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import psutil
import pytest
from canned import CannedGrpc
from statuses import instance_status
from waiting import wait_until

from graphkiln_backend.server import watchdog as module
from graphkiln_backend.server.flags import ListenAddress
from graphkiln_backend.server.watchdog import (
    Cause,
    Fault,
    LivenessProbe,
    StarvationDetector,
    Stub,
    TimeLimits,
    Watchdog,
    describe_exit,
    read_stubs,
)
from graphkiln_backend.system.processes import process_age_s
from graphkiln_backend.triton.features import TritonFeatures
from graphkiln_backend.triton.instance_status import Loading, Progress, StatusFile
from graphkiln_backend.triton.request_notes import RequestNotes
from graphkiln_backend.triton.snapshot import Snapshot, read_snapshot

OLD, NEW = TritonFeatures("2.51.0"), TritonFeatures("2.72.0")
LIMITS = TimeLimits(compute=30, load=60)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        yield process
        process.kill()


@pytest.fixture
def watchdog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watchdog:
    monkeypatch.setattr(module, "read_stubs", lambda _: [])  # those of this process are other tests' servers'
    return Watchdog(tmp_path, os.getpid(), LIMITS, set(), OLD)


class Clock:
    """The monotonic clock of this process, under control."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def look(watchdog: Watchdog, folder: Path) -> Fault | None:
    return watchdog.look(read_snapshot(folder))


def snapshot(*, begun_s: float = 1.0, ended: int = 1, beat_s: float = 0.5, ready: bool = True) -> Snapshot:
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


def test_an_image_model_that_is_gone(tmp_path: Path, watchdog: Watchdog, process: subprocess.Popen[bytes]) -> None:
    """Its instances have no status file, but notes of the requests under way until they are unloaded."""
    notes = RequestNotes(tmp_path, "cats.images_0_1", process.pid, "cats.images 3")
    candidate = f"m.candidate.images_0_1.{process.pid}"
    assert look(watchdog, tmp_path) is None
    process.kill()
    process.wait()
    (tmp_path / f"{candidate}.requests").touch()
    status = instance_status(pid=process.pid, model="m.candidate")
    found = watchdog.look(Snapshot(statuses={candidate: status}))
    expected = Fault(
        cause=Cause.INSTANCE_DIED,
        what="an instance of cats.images died",
        instance=f"cats.images_0_1.{process.pid}",
    )
    assert found == expected, "not a candidate"
    notes.close()
    assert watchdog.look(Snapshot(statuses={candidate: status})) is None


def test_a_candidate_that_dies_or_hangs_needs_no_restart(
    tmp_path: Path, watchdog: Watchdog, process: subprocess.Popen[bytes]
) -> None:
    process.kill()
    process.wait()
    with (
        StatusFile(tmp_path, "m_0", instance_status(pid=os.getpid())),
        StatusFile(tmp_path, "m.candidate_0", instance_status(pid=process.pid, model="m.candidate")),
    ):
        seen = read_snapshot(tmp_path)
        assert watchdog.look(seen) is None
        (found,) = watchdog.find_failed_candidates(seen).items()
    assert found[0] == f"m.candidate_0.{process.pid}"
    assert found[1].what == "an instance of m.candidate version 3 died"
    key = "m.candidate_0.1"
    now = time.monotonic()
    hung = Snapshot(
        statuses={key: instance_status(pid=os.getpid(), model="m.candidate")},
        progress={key: Progress(begun=1, ended=0, begun_at=now - 31, heartbeat=now)},
    )
    assert watchdog.look(hung) is None
    assert watchdog.find_failed_candidates(hung)[key].cause is Cause.COMPUTE_LIMIT
    assert watchdog.find_failed_candidates(snapshot(begun_s=31, ended=0)) == {}


def test_a_candidate_that_waits_for_a_core_has_not_hung(watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    key, now = "m.candidate_0.1", time.monotonic()
    late = Snapshot(
        statuses={key: instance_status(pid=os.getpid(), model="m.candidate")},
        progress={key: Progress(begun=1, ended=0, begun_at=now - 1000, heartbeat=now - 1000)},
    )
    assert watchdog.find_failed_candidates(late)[key].cause is Cause.INSTANCE_HUNG
    monkeypatch.setattr(StarvationDetector, "starved_at", lambda *_: now - 10)
    assert watchdog.find_failed_candidates(late) == {}
    monkeypatch.setattr(StarvationDetector, "starved_at", lambda *_: now - 25)
    assert watchdog.find_failed_candidates(late)[key].cause is Cause.INSTANCE_HUNG


def test_starvation_is_seen() -> None:
    """Two loops on one core, one of them on idle time only, and a process that sleeps."""
    core = min(os.sched_getaffinity(0))
    loop = f"import os\nos.sched_setaffinity(0, [{core}])\n%s\nprint(flush=True)\nwhile True: pass"
    idle = "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    scripts = [loop % idle, loop % "", "import time\nprint(flush=True)\ntime.sleep(100)"]
    processes = [subprocess.Popen([sys.executable, "-c", each], stdout=subprocess.PIPE) for each in scripts]
    detector = StarvationDetector()
    try:
        for process in processes:
            assert process.stdout
            process.stdout.readline()
            detector.starved_at(process.pid)
        starving, _, sleeping = processes
        wait_until(lambda: time.sleep(0.2) or detector.starved_at(starving.pid) > 0)
        assert detector.starved_at(sleeping.pid) == 0
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert detector.starved_at(starving.pid) > 0  # it has ended
    assert detector.starved_at(1 << 30) == 0


def test_an_instance_that_is_just_being_unloaded(tmp_path: Path, watchdog: Watchdog) -> None:
    with StatusFile(tmp_path, "m_0", instance_status(pid=1 << 30)):
        seen = read_snapshot(tmp_path)
    assert len(seen.statuses) == 1
    assert watchdog.look(seen) is None


@pytest.mark.parametrize("which", ["server", "instance"])
def test_a_stopped_process_is_given_a_moment(
    tmp_path: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    clock = Clock(monkeypatch)
    server, instance = (process.pid, os.getpid()) if which == "server" else (os.getpid(), process.pid)
    watchdog = Watchdog(tmp_path, server, LIMITS, set(), OLD)
    with StatusFile(tmp_path, "m_0", instance_status(pid=instance)):
        for event, state in ((signal.SIGSTOP, os.WSTOPPED), (signal.SIGCONT, os.WCONTINUED)) * 2:
            process.send_signal(event)
            os.waitid(os.P_PID, process.pid, state | os.WNOWAIT)
            assert look(watchdog, tmp_path) is None
            clock.pass_by(module._STOPPED_S + 0.1)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert look(watchdog, tmp_path) is None
        clock.pass_by(module._STOPPED_S + 0.1)
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
    fault = watchdog.look(snapshot(**values))  # type: ignore[arg-type]
    assert (fault.cause if fault else None) is cause


def test_heartbeats_missed_while_this_process_was_suspended_are_no_hang(
    watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    clock.pass_by(module._SUSPENDED_S + 1)
    assert watchdog.look(snapshot(beat_s=50.0)) is None
    for _ in range(3):
        clock.pass_by(3)
        assert watchdog.look(snapshot(beat_s=50.0)) is None
    clock.pass_by(3)
    assert watchdog.look(snapshot(beat_s=50.0)) is not None


def test_wrong_outputs(tmp_path: Path, watchdog: Watchdog) -> None:
    with StatusFile(tmp_path, "m_0", instance_status(pid=os.getpid())) as status:
        status.report_fault("y differs")
        fault = look(watchdog, tmp_path)
    assert fault is not None
    assert fault.cause is Cause.WRONG_OUTPUTS
    assert fault.what == "an instance of m version 3 no longer serves (y differs)"


def test_a_file_that_is_cut_short_hides_no_fault(tmp_path: Path, watchdog: Watchdog) -> None:
    (tmp_path / "a_0.77.json").write_bytes(b'{"pid": 7')
    with StatusFile(tmp_path, "m_0", instance_status(pid=1 << 30)):
        fault = look(watchdog, tmp_path)
    assert fault is not None
    assert fault.cause is Cause.INSTANCE_DIED


class TestLoading:
    @pytest.fixture(autouse=True)
    def _old(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The processes of these tests count as old."""
        monkeypatch.setattr(module, "process_age_s", lambda _: 1000.0)

    @pytest.fixture
    def young(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "process_age_s", process_age_s)

    def load(self, folder: Path, process: int, since: float) -> None:
        text = f'{{"pid": {process}, "model": "m", "version": 2, "since": {since}}}'
        (folder / f"m_0.{process}.loading").write_text(text)

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
        assert logged == ["loading m version 2 did not finish within 60 s (--load-deadline): its process is killed"]

    def test_a_stub_that_hangs_before_it_has_said_anything_is_ended(
        self, watchdog: Watchdog, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, logged: list[str]
    ) -> None:
        stub = Stub(pid=process.pid, model="m", version="2", age_s=70.0)
        monkeypatch.setattr(module, "read_stubs", lambda _: [stub])
        assert watchdog.look(Snapshot()) is None
        assert watchdog.end_endless_loading(Snapshot()) == 1
        assert process.wait(10) == -signal.SIGKILL
        assert logged == ["loading m version 2 did not finish within 60 s (--load-deadline): its process is killed"]

    @pytest.mark.parametrize("features", [OLD, NEW])
    def test_one_that_died_as_soon_as_it_was_started(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, features: TritonFeatures
    ) -> None:
        """Until 25.08 Triton waits for it without an end, and nothing says so."""
        watchdog = Watchdog(tmp_path, os.getpid(), LIMITS, set(), features)
        monkeypatch.setattr(module, "_STUBS_EVERY_S", -1.0)
        clock = Clock(monkeypatch)
        dead = [Stub(pid=7, model="", version="", age_s=0.5, ended=True)]
        monkeypatch.setattr(module, "read_stubs", lambda _: dead)
        assert watchdog.look(Snapshot()) is None, "it may be waited for at any moment"
        clock.pass_by(4)
        dead[0] = Stub(pid=7, model="", version="", age_s=14.5, ended=True)
        assert watchdog.look(Snapshot()) is None
        clock.pass_by(7)
        fault = watchdog.look(Snapshot())
        died = Fault(cause=Cause.INSTANCE_DIED, what="an instance died at its start")
        assert fault == (died if features is OLD else None)

    def test_one_that_was_ready_may_end_slowly(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Threads on idle cores need processor time to end, and their process stays a zombie until then."""
        watchdog = Watchdog(tmp_path, os.getpid(), LIMITS, set(), OLD)
        monkeypatch.setattr(module, "_STUBS_EVERY_S", -1.0)
        clock = Clock(monkeypatch)
        stubs = [Stub(pid=7, model="m.candidate", version="2", age_s=3.0)]
        monkeypatch.setattr(module, "read_stubs", lambda _: stubs)
        for seen in (Snapshot(ready=frozenset({7})), *[Snapshot()] * 5):
            assert watchdog.look(seen) is None
            watchdog.end_endless_loading(seen)
            clock.pass_by(4)
            stubs = [Stub(pid=7, model="", version="", age_s=stubs[0].age_s + 4, ended=True)]

    @pytest.mark.parametrize("then", [[], [Stub(pid=7, model="", version="", age_s=3000.0, ended=True)]])
    def test_one_that_was_waited_for_or_has_served(
        self, watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch, then: list[Stub]
    ) -> None:
        monkeypatch.setattr(module, "_STUBS_EVERY_S", -1.0)
        clock = Clock(monkeypatch)
        first = [] if then else [Stub(pid=7, model="", version="", age_s=0.5, ended=True)]
        for stubs in (first, then, then):
            monkeypatch.setattr(module, "read_stubs", lambda _, stubs=stubs: stubs)
            assert watchdog.look(Snapshot()) is None
            clock.pass_by(4.9)  # longer would look like a suspension of this process

    def test_what_has_loaded_without_end_before_gets_no_second_chance(
        self, tmp_path: Path, process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "read_stubs", lambda _: [])  # those of this process are other tests' servers'
        endless = {"m version 2"}
        watchdog = Watchdog(tmp_path, os.getpid(), TimeLimits(load=60), endless, OLD)
        self.load(tmp_path, process.pid, time.monotonic())
        assert watchdog.end_endless_loading(read_snapshot(tmp_path)) == 1
        assert process.wait(10) == -signal.SIGKILL

    @pytest.mark.parametrize("fate", ["waited for", "not waited for", "id reused"])
    @pytest.mark.usefixtures("young")
    def test_a_process_that_crashed_while_loading_is_not_ended(
        self, tmp_path: Path, watchdog: Watchdog, process: subprocess.Popen[bytes], logged: list[str], fate: str
    ) -> None:
        """Its status file stays."""
        self.load(tmp_path, process.pid, time.monotonic() - 70)
        if fate != "id reused":
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if fate == "waited for":
            process.wait()
        assert watchdog.end_endless_loading(read_snapshot(tmp_path)) == 0
        assert logged == []
        assert fate != "id reused" or process.poll() is None

    @pytest.mark.parametrize("before", ["ready", "ended"])
    def test_a_process_with_the_number_of_one_that_is_gone(
        self,
        tmp_path: Path,
        watchdog: Watchdog,
        process: subprocess.Popen[bytes],
        monkeypatch: pytest.MonkeyPatch,
        before: str,
    ) -> None:
        since = time.monotonic() - 70
        if before == "ready":
            watchdog.end_endless_loading(Snapshot(ready=frozenset({process.pid})))
        else:
            loading = Loading(pid=process.pid, model="n", version=1, since=since)
            with monkeypatch.context() as patch:
                patch.setattr(module.os, "kill", lambda *_: None)
                watchdog.end_endless_loading(Snapshot(loading={"n_0.1": loading}))
        watchdog.end_endless_loading(Snapshot())
        self.load(tmp_path, process.pid, since)
        assert watchdog.end_endless_loading(read_snapshot(tmp_path)) == 1


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


# Whether a server responds, asked without waiting.


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def address(port: int, protocol: str = "HTTP") -> ListenAddress:
    return ListenAddress(protocol=protocol, host="127.0.0.1", port=port)


def test_a_server_that_responds_is_not_silent(listener: socket.socket) -> None:
    with LivenessProbe(address(listener.getsockname()[1])) as probe:
        time.sleep(0.3)
        silent_s = probe.silent_s()
        assert silent_s >= 0.3
        connection, _ = listener.accept()
        with connection:
            assert connection.recv(4096).startswith(b"GET /v2/health/live HTTP/1.1\r\n")
            assert probe.silent_s() >= silent_s, "it does not wait for a response"
            connection.sendall(b"HTTP/1.1 403 No\r\n\r\n")
            wait_until(lambda: probe.silent_s() < silent_s)


def test_a_server_that_responds_over_grpc_is_not_silent() -> None:
    with CannedGrpc([]) as server, LivenessProbe(address(server.port, "gRPC")) as probe:
        for _ in range(2):
            time.sleep(0.3)
            silent_s = probe.silent_s()
            wait_until(lambda silent_s=silent_s: probe.silent_s() < silent_s)


def test_a_server_that_accepts_and_does_not_respond_is_silent_for_ever(listener: socket.socket) -> None:
    with LivenessProbe(address(listener.getsockname()[1])) as probe:
        first = probe.silent_s()
        time.sleep(0.1)
        assert probe.silent_s() >= first + 0.1
        assert probe.silent_s() >= first + 0.1


def test_a_server_that_breaks_off_is_asked_again(listener: socket.socket) -> None:
    with LivenessProbe(address(listener.getsockname()[1])) as probe:
        probe.silent_s()
        listener.accept()[0].close()
        probe.silent_s()
        probe.silent_s()
        listener.settimeout(10)
        listener.accept()[0].close()


# The processes of instances, as Triton starts them.

TREE = """
for backend in $2; do
    $1/triton_python_backend_stub $3/model.py prefix 2097152 336 name_0 $1/$backend &
done
$1/another $3/model.py prefix $1/graphkiln &
echo; wait
"""


class Start(Protocol):
    def __call__(self, backends: str, model: str = "/store/m/3") -> int: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process with children, and returns it."""
    for name in ("triton_python_backend_stub", "another"):
        (tmp_path / name).write_text("#!/bin/sh\nread -r _ < $FIFO\n")
        (tmp_path / name).chmod(0o755)
    with ExitStack() as stack:

        def start(backends: str, model: str = "/store/m/3") -> int:
            arguments = [str(tmp_path), backends, model]
            process = stack.enter_context(
                subprocess.Popen(
                    ["/bin/sh", "-c", TREE, "tree", *arguments],
                    stdout=subprocess.PIPE,
                    env={"FIFO": str(fifo)},
                )
            )
            stack.callback(end, process.pid)
            assert process.stdout is not None
            process.stdout.readline()
            return process.pid

        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        yield start


def end(process: int) -> None:
    tree = [*psutil.Process(process).children(recursive=True), psutil.Process(process)]
    for member in tree:
        member.kill()


def wait_for(process: int, count: int) -> list[str]:
    wait_until(lambda: len(read_stubs(process)) == count)
    stubs = read_stubs(process)
    assert all(-1 < stub.age_s < 60 for stub in stubs)
    return [f"{stub.model} {stub.version}" for stub in stubs]


def test_stubs_of_every_name_of_the_backend(start: Start) -> None:
    process = start("graphkiln onnxruntime oneflow")
    assert wait_for(process, 3) == ["m 3"] * 3


def test_stubs_of_other_backends_are_not_ours(start: Start) -> None:
    process = start("theirs graphkiln", "/store/other/12")
    assert wait_for(process, 1) == ["other 12"]


def test_a_child_that_has_exited_is_listed_until_it_is_waited_for() -> None:
    program = "import os; os.fork() or os._exit(1); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdout.readline()
            wait_until(lambda: bool(read_stubs(process.pid)))
            (stub,) = read_stubs(process.pid)
            assert (stub.ended, stub.model) == (True, "")
            assert -1 < stub.age_s < 60
            others = {each.pid for each in read_stubs(os.getpid())}  # a server of other tests may run here
            assert stub.pid not in others, "children of others are theirs to ask about"
        finally:
            process.kill()


def test_a_clock_that_is_set_makes_no_stub_older(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        try:
            real = time.time()
            monkeypatch.setattr(time, "time", lambda: real + 3600)
            assert 0 <= module.process_age_s(process.pid) < 30
        finally:
            process.kill()
