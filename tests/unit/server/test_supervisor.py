"""The supervisor and a tritonserver that serves nothing: exits, stops, dead instances, and nothing left behind."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from running import free_ports
from statuses import instance_status
from waiting import wait_until

from graphkiln_backend.graph.decoding import encode
from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server import drain, repository_control
from graphkiln_backend.server import supervisor as module
from graphkiln_backend.server.access import Access
from graphkiln_backend.server.edge import EdgePlan, find_haproxy, open_edge
from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.server.installation import Installation
from graphkiln_backend.server.launch import Launch
from graphkiln_backend.server.managed_stores import ManagedStores
from graphkiln_backend.server.model_states import ModelState
from graphkiln_backend.server.ports import fetch_metrics
from graphkiln_backend.server.run_folder import RunFolder
from graphkiln_backend.server.supervisor import Supervisor
from graphkiln_backend.server.watchdog import TimeLimits

# Since Python 3.12: the listener's thread is there when the server starts again.
pytestmark = [
    pytest.mark.alone,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


needs_haproxy = pytest.mark.skipif(find_haproxy() is None, reason="HAProxy is not installed")


def no_room() -> RunFolder:
    raise OSError(28, "No space left on device")


STATUS = encode(instance_status())
READY = {"name": "m", "version": "3", "state": "READY"}
KNOWN = {
    **dict.fromkeys(
        ("http-port", "grpc-port", "metrics-port", "metrics-address", "allow-http", "allow-grpc", "allow-metrics"), True
    ),
    **dict.fromkeys(("model-control-mode", "load-model"), True),
}
LOADS = ("--model-control-mode=explicit", "--load-model=m")


class Setup:
    """A supervisor over the fake server, and what came of it."""

    def __init__(self, folder: Path, installation: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
        self._installation = installation
        self._monkeypatch = monkeypatch
        self._starts = folder / "starts"
        self._store = folder / "store"
        self._store.mkdir()
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(self.temporary))
        self.port, self.metrics_port = free_ports(2)
        self.live: list[list[ModelState]] = []
        self.seconds = 0.0
        self.last_words = ""

    def run(
        self,
        *flags: str,
        on_live: Callable[[int], None] = lambda _: None,
        launch: type[Launch] = Launch,
        limits: TimeLimits | None = None,
        edge: str = "off",
        metrics: bool = False,
        **options: Any,
    ) -> int:
        """Runs to the end; `on_live` gets how often the server was live. With `metrics`, `metrics_url` serves them."""
        self._monkeypatch.setenv("FAKE_TRITON", json.dumps({"starts": str(self._starts), **options}))
        wanted = f"--metrics-port={self.metrics_port}" if metrics else "--allow-metrics=false"
        arguments = [f"--http-port={self.port}", "--allow-grpc=false", wanted, *flags]

        def live(states: list[ModelState]) -> None:
            self.live.append(states)
            on_live(len(self.live))

        flags = TritonFlags.parse(arguments, KNOWN)
        plan = EdgePlan.choose(edge, flags, Access(), None)
        begun = time.monotonic()
        with open_edge(plan) as in_front:
            supervisor = Supervisor(
                launch(
                    installation=self._installation,
                    stores=[self._store],
                    flags=(plan.inner if plan else flags).on_loopback(["metrics"]),
                ),
                on_live=live,
                limits=limits,
                edge=in_front,
                metrics=flags.listen_address("metrics"),
            )
            try:
                return supervisor.run()
            finally:
                self.seconds = time.monotonic() - begun
                self.last_words = supervisor.last_words

    def hold(self, model: Path, name: str) -> None:
        """Puts a model into the store."""
        shutil.copytree(model, self._store / name)

    def when_started(self, action: Callable[[], None]) -> None:
        """Calls it once the first server was started."""
        when(self._starts.exists, action)

    def restarts(self) -> dict[str, float]:
        """Restarts by cause, from the metrics port."""
        text = fetch_metrics(f"http://127.0.0.1:{self.metrics_port}/metrics")
        found = re.findall(r'^graphkiln_restarts_total{cause="(\w+)"} (\S+)$', text, re.MULTILINE)
        return {cause: float(value) for cause, value in found}

    @property
    def starts(self) -> list[dict[str, Any]]:
        """Process, arguments and environment of every server that was started."""
        return [json.loads(line) for line in self._starts.read_text().splitlines()] if self._starts.exists() else []

    def check_nothing_is_left(self) -> None:
        assert list(self.temporary.iterdir()) == []
        for start in self.starts:
            prefix = Path(start["environment"]["TMPDIR"]).parent.name
            assert prefix.startswith("graphkiln-")
            assert list(Path("/dev/shm").glob(f"{prefix}*")) == []
            assert not psutil.pid_exists(start["pid"])
        instances = self._starts.with_suffix(".instances")
        for pid in map(int, instances.read_text().split()) if instances.exists() else ():
            with suppress(psutil.NoSuchProcess):
                wait_until(lambda pid=pid: psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


@pytest.fixture
def setup(
    tmp_path: Path, installation: Installation, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> Iterator[Setup]:
    """Nothing may be left behind by any run."""
    assert logged == []
    script = (Path(__file__).parent / "fake_tritonserver.py").read_text()
    installation.binary.write_text(f"#!{sys.executable} -SE\n{script}")
    installation.binary.chmod(0o755)
    monkeypatch.setattr(drain, "_SETTLE_S", 0.15)
    monkeypatch.setattr(module, "_FIRST_DELAY_S", 0.0)
    monkeypatch.setattr("graphkiln_backend.server.supervisor.WATCH_S", 0.05)
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever `nohup` the tests run under
    threads = set(threading.enumerate())
    setup = Setup(tmp_path, installation, monkeypatch)
    yield setup
    for thread in set(threading.enumerate()) - threads:
        thread.join(30)
    setup.check_nothing_is_left()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    assert signal.signal(signal.SIGHUP, hangup) is signal.SIG_DFL
    assert set(threading.enumerate()) <= threads


def stop(_: int = 1, number: int = signal.SIGTERM) -> None:
    """Sends this process a signal, while the supervisor is there to take it."""
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        os.kill(os.getpid(), number)


def stop_if(condition: bool) -> None:
    if condition:
        stop()


def when(condition: Callable[[], bool], action: Callable[[], None]) -> None:
    """Calls it once a condition holds, while the supervisor works."""

    def watch() -> None:
        wait_until(condition)
        action()

    threading.Thread(target=watch).start()


def later(seconds: float, action: Callable[[], None]) -> None:
    """Calls it after some seconds, while the supervisor works."""
    threading.Timer(seconds, action).start()


def kill_instance(setup: Setup) -> None:
    """Kills the instance of the server that was live last."""
    (state,) = setup.live[-1]
    assert state.status is not None
    os.kill(state.status.pid, signal.SIGKILL)


class Judging:
    """A version controller that reports once `settled` is called."""

    def __init__(self, *, explicit: bool = False) -> None:
        self.provable = not explicit
        self.fault = ""
        self.begun = self.ended = False
        self.settled: Callable[[], None] = lambda: None

    def begin(self, on_settled: Callable[[], None]) -> None:
        self.provable, self.settled, self.begun = True, on_settled, True

    def report(self) -> None:
        self.settled()

    def halt(self) -> None:
        pass

    def end(self) -> None:
        self.ended = True


class TestExit:
    @pytest.mark.parametrize("code", [0, 1, 3])
    def test_the_servers_code_is_the_supervisors(self, setup: Setup, code: int) -> None:
        assert setup.run(exit=code) == code
        assert len(setup.starts) == 1
        assert setup.live == []

    def test_a_model_that_cannot_be_loaded_takes_no_other_with_it(
        self, setup: Setup, digits: Path, logged: list[str]
    ) -> None:
        setup.hold(digits, "m")
        assert setup.run(*LOADS, on_live=stop, bad_model=True, on_sigterm=0) == 0
        strict = ["--strict-readiness=false" not in start["arguments"] for start in setup.starts]
        assert strict == [False, True]
        assert logged[0].startswith(
            "not every model can be loaded: starting again, to serve the others; /v2/health/ready is 400"
        )

    def test_one_that_no_store_holds_is_known_before_the_start(self, setup: Setup, logged: list[str]) -> None:
        assert setup.run(*LOADS, on_live=stop, bad_model=True, on_sigterm=0) == 0
        assert len(setup.starts) == 1
        assert logged[0] == "m is not loaded: no store contains this model"

    def test_where_all_can_be_loaded_there_is_one_start(self, setup: Setup, digits: Path) -> None:
        setup.hold(digits, "m")
        assert setup.run(*LOADS, on_live=stop, on_sigterm=0) == 0
        assert len(setup.starts) == 1

    def test_a_server_that_a_signal_kills_is_started_again_until_that_does_not_help(
        self, setup: Setup, logged: list[str]
    ) -> None:
        assert setup.run(kill=signal.SIGSEGV) == 128 + signal.SIGSEGV
        assert len(setup.starts) == 6
        assert logged == [
            *["tritonserver was killed by SIGSEGV: restarting the server"] * 5,
            "tritonserver was killed by SIGSEGV, 5 restarts did not help: giving up",
        ]
        assert setup.last_words == logged[-1]

    def test_a_server_that_ends_while_it_serves_is_started_again(self, setup: Setup, logged: list[str]) -> None:
        def end(count: int) -> None:
            if count == 3:
                stop()
            os.kill(setup.starts[-1]["pid"], signal.SIGKILL if count == 1 else signal.SIGTERM)

        assert setup.run(on_live=end, on_sigterm=0, listen_after_s=0.1) == 0
        assert len(setup.starts) == 3
        assert logged[:2] == [
            "tritonserver was killed by SIGKILL: restarting the server",
            "tritonserver ended by itself with code 0: restarting the server",
        ]

    def test_restarts_wait_longer_and_longer_and_a_signal_ends_the_wait(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch, logged: list[str]
    ) -> None:
        monkeypatch.setattr(module, "_FIRST_DELAY_S", 60.0)
        when(lambda: len(logged) == 2, stop)
        assert setup.run(kill=signal.SIGABRT) == 0
        assert logged == [
            "tritonserver was killed by SIGABRT: restarting the server",
            "tritonserver was killed by SIGABRT: restarting the server in 60 s",
            "stopped before the server was started again",
        ]
        assert setup.seconds < 20

    @pytest.mark.parametrize(
        "fault", [OSError(28, "No space left on device"), ServerSetupError("the temporary folder is full")]
    )
    def test_a_restart_waits_for_room(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch, logged: list[str], fault: Exception
    ) -> None:
        attempts: list[int] = []

        class NoRoomAtFirst(RunFolder):
            def __init__(self) -> None:
                attempts.append(1)
                if len(attempts) in {2, 3, 4}:
                    raise fault
                super().__init__()

        def end(count: int) -> None:
            stop() if count == 2 else os.kill(setup.starts[-1]["pid"], signal.SIGKILL)

        monkeypatch.setattr(module, "RunFolder", NoRoomAtFirst)
        monkeypatch.setattr(module, "_RETRY_S", 0.05)
        assert setup.run(on_live=end, on_sigterm=0) == 0
        assert len(attempts) == 5
        errors = [line for line in logged if line.startswith("the server cannot be started again yet")]
        assert errors == [f"the server cannot be started again yet, trying every 0.05 s: {fault}"]

    def test_an_error_while_it_serves_is_a_fault(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch, logged: list[str]
    ) -> None:
        def fail(_: object, *, live: bool) -> None:
            if live:
                stop_if(len(setup.starts) == 5)
                raise OSError(24, "Too many open files")

        monkeypatch.setattr(module.MemoryLimit, "follow", fail)
        monkeypatch.setattr(module, "_RETRY_S", 0.05)
        monkeypatch.setattr(module, "MAX_RESTARTS", 1)
        monkeypatch.setattr(module, "SERVED_S", 120.0)
        assert setup.run() == 1
        assert logged == [
            "tritonserver cannot be watched: [Errno 24] Too many open files: restarting the server",
            "tritonserver cannot be watched: [Errno 24] Too many open files, 1 restarts did not help: giving up",
        ]

    def test_a_signal_ends_the_wait_for_room(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch, logged: list[str]
    ) -> None:
        def end(_: int) -> None:
            monkeypatch.setattr(module, "RunFolder", no_room)
            os.kill(setup.starts[-1]["pid"], signal.SIGKILL)
            when(lambda: any("No space left on device" in line for line in logged), stop)

        monkeypatch.setattr(module, "_RETRY_S", 60.0)
        assert setup.run(on_live=end, on_sigterm=0) == 0
        assert setup.seconds < 30

    def test_restarts_are_counted_on_the_metrics_port(self, setup: Setup) -> None:
        counts: list[dict[str, float]] = []

        def end(count: int) -> None:
            counts.append(setup.restarts())
            stop() if count == 3 else os.kill(setup.starts[-1]["pid"], signal.SIGKILL)

        setup.when_started(lambda: counts.append(setup.restarts()))  # before it is live
        assert setup.run(on_live=end, on_sigterm=0, metrics=True) == 0
        assert [each["server_died"] for each in counts] == [0, 0, 1, 2]
        assert [sum(each.values()) for each in counts] == [0, 0, 1, 2]
        with pytest.raises(OSError, match="refused"):
            setup.restarts()


class TestLive:
    @pytest.mark.parametrize(("self_test", "proven"), [("within the limits - PASS", 1), ("", 0)])
    def test_versions_with_golden_samples_are_proven(self, setup: Setup, self_test: str, proven: int) -> None:
        texts: list[str] = []

        def read_and_stop(_: int) -> None:
            texts.append(fetch_metrics(f"http://127.0.0.1:{setup.metrics_port}/metrics"))
            stop()

        status = encode(instance_status(self_test=self_test, backend="graphkiln"))
        assert setup.run(on_live=read_and_stop, index=[READY], instances=[status], on_sigterm=0, metrics=True) == 0
        line = f'graphkiln_version_proven{{model="m",version="3",backend="graphkiln",seat="python"}} {proven}\n'
        assert line in texts[0]

    def test_models_are_listed_with_the_status_of_their_instances(self, setup: Setup) -> None:
        index = [READY, {"name": "bad", "version": "1", "state": "UNAVAILABLE", "reason": "no graph"}]
        assert setup.run(on_live=stop, index=index, instances=[STATUS], on_sigterm=0) == 0
        ((bad, served),) = setup.live
        assert (served.model, served.version, served.state) == ("m", "3", "READY")
        assert served.status is not None
        assert served.status.engine == "e"
        assert (bad.state, bad.reason, bad.status) == ("UNAVAILABLE", "no graph", None)

    def test_without_http_there_is_nothing_to_list(self, setup: Setup) -> None:
        (port,) = free_ports(1)
        flags = ("--allow-http=false", "--allow-grpc=true", f"--grpc-port={port}")
        assert setup.run(*flags, on_live=stop, on_sigterm=0, instances=[STATUS]) == 0
        ((state,),) = setup.live
        assert (state.model, state.version, state.state) == ("m", "3", "READY")

    def test_a_server_that_does_not_list_its_models_is_served_on(self, setup: Setup, logged: list[str]) -> None:
        options = {"index": {"error": "restricted"}, "index_status": 403, "instances": [STATUS], "on_sigterm": 0}
        assert setup.run(on_live=stop, **options) == 0
        ((state,),) = setup.live
        assert (state.model, state.version, state.state) == ("m", "3", "READY")
        assert any("does not list its models" in line and "403" in line for line in logged)


class TestStop:
    def test_a_server_that_ends_by_itself(self, setup: Setup, logged: list[str]) -> None:
        assert setup.run(on_live=stop, on_sigterm=0) == 0
        assert logged[-2:] == ["stopping: finishing the requests in flight", "stopped"]
        assert setup.last_words == ""

    def test_a_server_that_ends_with_an_error(self, setup: Setup, logged: list[str]) -> None:
        assert setup.run(on_live=stop, on_sigterm=4) == 4
        assert logged[-1] == "tritonserver ended with code 4"
        assert setup.last_words == logged[-1]

    def test_a_server_that_does_not_end_is_ended(self, setup: Setup, logged: list[str]) -> None:
        assert setup.run(on_live=stop, index=[READY], instances=[STATUS]) == 0
        assert logged[-1] == "stopped"
        assert setup.seconds < 20

    def test_a_batch_in_flight_is_waited_for(self, setup: Setup, logged: list[str]) -> None:
        assert setup.run(on_live=stop, index=[READY], instances=[STATUS], busy_s=1.5, on_sigterm=0) == 0
        assert logged[-1] == "stopped"
        assert setup.seconds > 1.5

    def test_a_batch_is_waited_for_no_longer_than_allowed(self, setup: Setup, logged: list[str]) -> None:
        limits = TimeLimits(drain=0.3)
        assert setup.run(on_live=stop, instances=[STATUS], busy_s=50, on_sigterm=0, limits=limits) == 0
        assert any("still in flight after 0.3 s (--drain), 1 batches are being computed" in line for line in logged)
        assert setup.seconds < 20

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
    def test_every_signal_that_asks_for_the_end(self, setup: Setup, logged: list[str], number: signal.Signals) -> None:
        assert setup.run(on_live=lambda _: stop(number=number), on_sigterm=0) == 0
        assert logged[-1] == "stopped"

    @pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
    def test_a_second_signal_ends_at_once(
        self, setup: Setup, logged: list[str], second: signal.Signals, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("graphkiln_backend.system.signals._TOGETHER_S", 0.0)

        def stop_twice(_: int) -> None:
            stop()
            when(lambda: any("stopping: " in line for line in logged), lambda: stop(number=second))

        limits = TimeLimits(drain=60)
        code = setup.run(on_live=stop_twice, index=[READY], instances=[STATUS], busy_s=50, limits=limits)
        assert code == 128 + signal.SIGKILL
        assert logged[-1] == "stopping at once: second signal"
        assert setup.last_words == "tritonserver was killed at the second signal"
        assert setup.seconds < 20

    def test_a_second_signal_ends_a_drained_server_at_once(
        self, setup: Setup, logged: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(drain, "_EXIT_S", 60.0)

        def stop_twice(_: int) -> None:
            stop()
            later(1.5, stop)

        assert setup.run(on_live=stop_twice, instances=[STATUS]) == 128 + signal.SIGKILL
        assert logged[-1] == "stopping at once: second signal"
        assert setup.seconds < 30

    @pytest.mark.parametrize("edge", ["off", pytest.param("on", marks=needs_haproxy)])
    @pytest.mark.parametrize("busy", [False, True])
    def test_no_time_for_requests_in_flight(self, setup: Setup, logged: list[str], edge: str, busy: bool) -> None:
        options = {"busy_s": 50} if busy else {}
        limits = TimeLimits(drain=0)
        assert setup.run(on_live=stop, instances=[STATUS], on_sigterm=0, limits=limits, edge=edge, **options) == 0
        warned = any("still in flight after 0 s (--drain)" in line for line in logged)
        assert warned is (busy and edge == "off")  # the edge counts requests, and there is none

    def test_a_server_that_is_still_loading_is_ended(self, setup: Setup) -> None:
        setup.when_started(stop)
        assert setup.run(listen_after_s=50) == 0
        assert setup.live == []
        assert setup.seconds < 20

    def test_a_signal_before_the_preparation_ends_it(self, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
        class Late(RunFolder):
            def __init__(self) -> None:
                stop()
                super().__init__()

        class Slow(Launch):
            def prepare(self, folder: RunFolder) -> list[str]:
                time.sleep(40)
                return super().prepare(folder)

        monkeypatch.setattr(module, "RunFolder", Late)
        assert setup.run(launch=Slow) == 0
        assert setup.starts == []
        assert setup.seconds < 20

    def test_a_signal_before_the_start_starts_nothing(self, setup: Setup, logged: list[str]) -> None:
        class Slow(Launch):
            def prepare(self, folder: RunFolder) -> list[str]:
                stop()
                time.sleep(40)
                return super().prepare(folder)

        assert setup.run(launch=Slow) == 0
        assert setup.starts == []
        assert logged == ["stopped before the server was started"]
        assert setup.seconds < 20


class TestDeadInstance:
    OPTIONS: ClassVar[dict[str, Any]] = {"index": [READY], "instances": [STATUS], "on_sigterm": 0}

    def kill_until(self, setup: Setup, last: int) -> Callable[[int], None]:
        """Kills the instance each time that the server is live, and stops at the last time."""

        def act(count: int) -> None:
            stop() if count == last else kill_instance(setup)

        return act

    def test_the_server_is_started_again(self, setup: Setup, logged: list[str]) -> None:
        assert setup.run(on_live=self.kill_until(setup, 3), **self.OPTIONS) == 0
        assert len(setup.starts) == 3
        assert logged[:2] == ["an instance of m version 3 died: restarting the server"] * 2

    def test_a_killed_instance_is_noticed_at_once(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch, logged: list[str]
    ) -> None:
        monkeypatch.setattr("graphkiln_backend.server.supervisor.WATCH_S", 50)

        def kill_later(count: int) -> None:
            stop() if count == 2 else later(0.2, lambda: kill_instance(setup))

        assert setup.run(on_live=kill_later, **self.OPTIONS) == 0
        assert len(setup.starts) == 2
        assert setup.seconds < 20
        assert logged[0] == "an instance of m version 3 died: restarting the server"

    @needs_haproxy
    def test_meanwhile_requests_get_503(self, setup: Setup, tmp_path: Path) -> None:
        seen: list[int] = []
        refused = tmp_path / "a request was refused"
        over = threading.Event()

        def ask() -> int:
            connection = http.client.HTTPConnection("127.0.0.1", setup.port, timeout=10)
            try:
                connection.request("GET", "/v2/health/ready")
                return connection.getresponse().status
            except (OSError, http.client.HTTPException):
                return 0
            finally:
                connection.close()

        def watch() -> None:
            while not over.is_set():
                seen.append(ask())
                if seen[-1] == 503:
                    refused.touch()
                time.sleep(0.01)

        def act(count: int) -> None:
            if count == 1:
                assert ask() == 200
                threading.Thread(target=watch).start()
                return kill_instance(setup)
            over.set()
            assert {ask() for _ in range(20)} == {200}
            return stop()

        try:
            later = {"listen_when": str(refused)}
            assert setup.run(on_live=act, later=later, edge="on", **self.OPTIONS) == 0
        finally:
            over.set()
        assert 503 in seen
        assert 0 not in seen, "no connection was refused"

    @needs_haproxy
    @pytest.mark.parametrize("explicit", [False, True])
    def test_requests_are_admitted_once_golden_samples_are_right(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch, explicit: bool
    ) -> None:
        """In explicit mode the loaded models are known once the controller has begun."""
        controller = Judging(explicit=explicit)
        monkeypatch.setattr(ManagedStores, "provable", property(lambda _: controller.provable))
        monkeypatch.setattr(Launch, "version_controller", lambda *_: controller)
        seen: list[int] = []

        def ask() -> int:
            connection = http.client.HTTPConnection("127.0.0.1", setup.port, timeout=10)
            try:
                connection.request("GET", "/v2/health/ready")
                return connection.getresponse().status
            finally:
                connection.close()

        def judge() -> None:
            seen.extend(ask() for _ in range(5))
            time.sleep(0.3)
            seen.extend(ask() for _ in range(5))
            controller.settled()

        when(lambda: controller.begun, judge)

        def act(_: int) -> None:
            seen.append(ask())
            stop()

        assert setup.run(on_live=act, edge="on", on_sigterm=0) == 0
        assert seen == [503] * 10 + [200]

    def test_a_version_that_computes_wrong_outputs_restarts_the_server(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch, logged: list[str]
    ) -> None:
        controllers = [Judging(), Judging()]
        remaining = iter(controllers)
        monkeypatch.setattr(Launch, "version_controller", lambda *_: next(remaining))

        def act(count: int) -> None:
            if count == 1:
                controllers[0].fault = "m version 1 computes wrong outputs: NaN"
            else:
                stop()

        when(lambda: controllers[0].begun, controllers[0].report)
        when(lambda: controllers[1].begun, controllers[1].report)
        assert setup.run(on_live=act, on_sigterm=0) == 0
        assert logged[0] == "m version 1 computes wrong outputs: NaN: restarting the server"
        assert [controller.ended for controller in controllers] == [True, True]

    def test_a_death_while_the_server_loads_counts_too(self, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
        self.limit(monkeypatch, restarts=1)
        assert setup.run(instances=[STATUS], die_after_s=0.05, listen_after_s=50) == 1
        assert len(setup.starts) == 2
        assert setup.live == []

    def test_an_instance_that_is_unloaded_is_not_dead(self, setup: Setup, logged: list[str]) -> None:
        setup.when_started(lambda: later(0.6, stop))
        options = {"index": [READY], "instances": [STATUS, STATUS], "unload_after_s": 0.2, "on_sigterm": 0}
        assert setup.run(**options) == 0
        assert len(setup.starts) == 1
        assert not any("died" in line for line in logged)

    def limit(self, monkeypatch: pytest.MonkeyPatch, *, restarts: int, served_s: float = 120.0) -> None:
        monkeypatch.setattr(module, "MAX_RESTARTS", restarts)
        monkeypatch.setattr(module, "SERVED_S", served_s)


class TestHanging:
    """Each is noticed, ended, and the server is started again."""

    def check(self, setup: Setup, logged: list[str], expected: str, *, action: Any = None, **options: Any) -> None:
        def act(count: int) -> None:
            if count == 2:
                return stop()
            return action() if action else None

        limits = TimeLimits(compute=5.0, load=0.5)
        assert setup.run(on_live=act, limits=limits, **{"on_sigterm": 0, "index": [READY], **options}) == 0
        assert len(setup.starts) == 2
        assert expected in logged[0]
        assert setup.seconds < 30

    def test_a_stopped_instance(self, setup: Setup, logged: list[str]) -> None:
        def freeze() -> None:
            os.kill(setup.live[-1][0].status.pid, signal.SIGSTOP)  # type: ignore[union-attr]

        expected = "an instance of m version 3 was stopped by a signal: restarting the server"
        self.check(setup, logged, expected, action=freeze, instances=[STATUS])

    def test_a_stopped_server(self, setup: Setup, logged: list[str]) -> None:
        def freeze() -> None:
            os.kill(setup.starts[-1]["pid"], signal.SIGSTOP)

        self.check(setup, logged, "tritonserver was stopped by a signal: restarting the server", action=freeze)

    def test_wrong_outputs(self, setup: Setup, logged: list[str]) -> None:
        options = {"instances": [STATUS], "fault": "y differs", "later": {"instances": []}}
        self.check_late(setup, logged, "an instance of m version 3 no longer serves (y differs)", options)

    def check_late(self, setup: Setup, logged: list[str], expected: str, options: dict[str, Any]) -> None:
        """A fault that is there from the start: it may be found before the server is live."""
        limits = TimeLimits(compute=5.0)
        assert setup.run(on_live=lambda _: stop_if(len(setup.starts) == 2), limits=limits, on_sigterm=0, **options) == 0
        assert expected in logged[0]
        assert len(setup.starts) == 2

    def test_a_server_that_accepts_and_never_responds(
        self, setup: Setup, monkeypatch: pytest.MonkeyPatch, logged: list[str]
    ) -> None:
        monkeypatch.setattr("graphkiln_backend.server.watchdog.SILENT_S", 1.0)
        monkeypatch.setattr(repository_control, "_TIMEOUT_S", 0.2)
        options = {"deaf": True, "later": {"deaf": False}}
        assert setup.run(on_live=lambda count: stop_if(count == 2), on_sigterm=0, **options) == 0
        assert "tritonserver has not responded for 1 s: restarting the server" in logged

    def test_a_hang_is_no_service(self, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
        """A server that hangs as soon as it is live is given up."""
        monkeypatch.setattr("graphkiln_backend.server.watchdog.SILENT_S", 2.0)
        monkeypatch.setattr(repository_control, "_TIMEOUT_S", 0.2)
        monkeypatch.setattr(module, "SERVED_S", 2.0)
        monkeypatch.setattr(module, "MAX_RESTARTS", 1)
        assert setup.run(on_live=lambda count: stop_if(count == 4), deaf=True, on_sigterm=0) == 1
        assert len(setup.starts) == 2

    def test_a_model_that_loads_without_end_is_ended_and_the_server_is_not(
        self, setup: Setup, logged: list[str]
    ) -> None:
        counted: list[dict[str, float]] = []

        def read_and_stop(_: int) -> None:
            counted.append(setup.restarts())
            stop(1)

        limits = TimeLimits(load=0.5)
        assert setup.run(on_live=read_and_stop, loading=True, on_sigterm=0, limits=limits, metrics=True) == 0
        assert [each["load_deadline"] for each in counted] == [1], "at once, not at the next start"
        assert len(setup.starts) == 1
        assert logged[0] == (
            "loading endless version 1 did not finish within 0.5 s (--load-deadline): its process is killed"
        )


@needs_haproxy
class TestKeepAlive:
    """Behind an edge, a client that sends one request after the other over one connection, while the server stops."""

    def test_every_request_is_answered_and_the_connection_is_closed_in_order(self, setup: Setup) -> None:
        statuses, closing, errors = self.run_client(setup, pause_s=0.02)
        assert errors == []
        assert statuses[0] == 200
        assert statuses[-1] == 503
        assert closing[-1] == "close"
        assert statuses == sorted(statuses)

    def test_a_slow_request_is_answered_first(self, setup: Setup) -> None:
        statuses, _, errors = self.run_client(setup, pause_s=0.0, slow_s=1.0)
        assert errors == []
        assert (statuses[0], statuses[-1]) == (200, 503)
        assert statuses == sorted(statuses)  # how many are answered before the signal is the machine's

    def run_client(
        self, setup: Setup, *, pause_s: float, slow_s: float = 0.0
    ) -> tuple[list[int], list[str], list[Exception]]:
        statuses: list[int] = []
        closing: list[str] = []
        errors: list[Exception] = []
        begun = threading.Event()

        def ask() -> None:
            connection = http.client.HTTPConnection("127.0.0.1", setup.port, timeout=20)
            try:
                while not statuses or statuses[-1] == 200:
                    connection.request("GET", "/")
                    begun.set()
                    response = connection.getresponse()
                    response.read()
                    statuses.append(response.status)
                    closing.append(response.headers.get("Connection", ""))
                    time.sleep(pause_s)
            except (OSError, http.client.HTTPException) as error:
                errors.append(error)
            finally:
                connection.close()

        client = threading.Thread(target=ask)

        def act(_: int) -> None:
            client.start()
            begun.wait(10)
            later(0.3, stop)

        assert setup.run(on_live=act, on_sigterm=0, slow_s=slow_s, edge="on") == 0
        client.join(30)
        return statuses, closing, errors


def test_an_error_of_the_setup_leaves_nothing(setup: Setup) -> None:
    class Broken(Launch):
        def prepare(self, folder: RunFolder) -> list[str]:
            raise PermissionError(f"no {folder}")

    with pytest.raises(ServerSetupError, match="cannot start the server: no "):
        setup.run(launch=Broken)
    assert setup.starts == []


def test_a_machine_without_room_for_another_process(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(module, "Guard", fail)
    with pytest.raises(ServerSetupError, match="temporarily unavailable"):
        setup.run()


def test_an_error_of_the_listener_of_events_kills_the_server(setup: Setup) -> None:
    def fail(_: int) -> None:
        raise RuntimeError("the table cannot be printed")

    with pytest.raises(RuntimeError, match="the table"):
        setup.run(on_live=fail)
    assert len(setup.starts) == 1


def test_a_program_that_cannot_be_started(setup: Setup, installation: Installation) -> None:
    shutil.rmtree(installation.binary.parent)
    with pytest.raises(ServerSetupError, match="tritonserver does not run here"):
        setup.run()


def test_what_a_start_does_not_need_is_not_imported_before_it() -> None:
    """The command takes 0.35 s of processor time until tritonserver runs; with these it was 0.5 s."""
    later = """numpy ml_dtypes onnx onnxruntime psutil pyarrow http.client ssl multiprocessing
        graphkiln_backend.lowering.plan graphkiln_backend.repository.records graphkiln_backend.server.rollout_loop
        graphkiln_backend.server.rollout_gates graphkiln_backend.server.rollout_changes"""
    code = f"""if True:
        import sys
        import graphkiln_backend.server.store_copies, graphkiln_backend.server.supervisor, graphkiln_backend.server.tls
        print(*(name for name in {later.split()} if name in sys.modules))"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert printed.stdout.split() == []
