"""The metrics port: the supervisor's metrics beside those of a canned tritonserver."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from canned import Answer, CannedHttp, hang_up, http, silence
from running import free_ports
from waiting import wait_until

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server import metrics_port as module
from graphkiln_backend.server.flags import ListenAddress
from graphkiln_backend.server.metrics_port import MetricsPort
from graphkiln_backend.server.ports import fetch_metrics
from graphkiln_backend.server.proofs import ProofBook, ProofState
from graphkiln_backend.server.rollouts import Gates, Latencies, Progress, RolloutFolder, Wanted

TRITONS = """# HELP nv_inference_count samples
# TYPE nv_inference_count counter
nv_inference_count{model="m",version="1"} 7
"""
INSTANCES = """graphkiln_self_test_error{model="m",version="1",instance="m_0"} 1e-06
graphkiln_load_seconds{model="m",version="1",instance="m_0"} 0.5
"""
RIGHT = ProofState(
    model="r", version=3, backend="tensorrt", seat="", proven=True, error=0.25, replays=5, failures=1, last_right_at=9.5
)
OWN = ProofState(model="own", version=1, backend="graphkiln", seat="python", proven=True)
UNPROVEN = ProofState(
    model='odd "\\\n', version=2, backend="onnxruntime", seat="native", proven=False, instances=2, device="cpu"
)

Open = Callable[..., str]


def at(port: int) -> ListenAddress:
    return ListenAddress(protocol="metrics", host="127.0.0.1", port=port)


@pytest.fixture
def book() -> ProofBook:
    return ProofBook()


@pytest.fixture
def open_port(book: ProofBook) -> Iterator[Open]:
    """Open a metrics port in front of a port of this machine, or of none."""
    with ExitStack() as stack:

        def start(triton: CannedHttp | None = None, rollouts: Sequence[RolloutFolder] = ()) -> str:
            own, other = free_ports(2)
            inner = int(triton.url.rpartition(":")[2]) if triton else other
            restarts = {"server_died": 2, "load_deadline": 0}
            port = MetricsPort(
                at(own),
                at(inner),
                version="2.51.0",
                restarts=lambda: restarts,
                rows=book.rows,
                instances=lambda: INSTANCES.splitlines(keepends=True),
                rollouts=lambda: rollouts,
            )
            stack.enter_context(port)
            return f"http://127.0.0.1:{own}/metrics"

        yield start


def ask(url: str, request: bytes) -> bytes:
    """Send a request; return the first line of the response."""
    host, port = url.removeprefix("http://").removesuffix("/metrics").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(4096), b"")).partition(b"\r\n")[0]


def test_both_are_in_one_text(open_port: Open, book: ProofBook) -> None:
    book.record(RIGHT)
    book.record(UNPROVEN)
    book.record(OWN)
    with CannedHttp([http(TRITONS.encode())]) as triton:
        text = fetch_metrics(open_port(triton))
    assert [line for line in (TRITONS + INSTANCES).splitlines() if line not in text] == []
    lines = text.splitlines()
    for line in (
        'graphkiln_restarts_total{cause="server_died"} 2',
        'graphkiln_restarts_total{cause="load_deadline"} 0',
        'graphkiln_triton_info{version="2.51.0"} 1',
        'graphkiln_version_proven{model="r",version="3",backend="tensorrt",seat=""} 1',
        'graphkiln_version_proven{model="odd \\"\\\\\\n",version="2",backend="onnxruntime",seat="native"} 0',
        'graphkiln_self_test_error{model="r",version="3",instance="server"} 0.25',
        'graphkiln_self_test_error{model="odd \\"\\\\\\n",version="2",instance="server"} -1.0',
        'graphkiln_self_test_replays_total{model="r",version="3",instance="server"} 5',
        'graphkiln_self_test_failures_total{model="r",version="3",instance="server"} 1',
        'graphkiln_self_test_timestamp_seconds{model="r",version="3",instance="server"} 9.5',
    ):
        assert line in lines
    native = [line for line in lines if line.startswith('graphkiln_instance_info{model="odd')]
    assert [line.count('engine="onnxruntime"') for line in native] == [1, 1], "autoscaling counts instances"
    assert [line for line in lines if '"own"' in line] == [
        'graphkiln_version_proven{model="own",version="1",backend="graphkiln",seat="python"} 1'
    ], "its instances publish their self-tests"
    names = [re.split(r"[{ ]", line.removeprefix("# TYPE ").removeprefix("# HELP "))[0] for line in lines]
    changes = [name for name, before in zip(names, ["", *names], strict=False) if name != before]
    assert len(changes) == len(set(changes)), "the lines of one metric follow each other"
    if promtool := shutil.which("promtool"):
        checked = subprocess.run(
            [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
        )
        assert "error" not in checked.stderr, checked.stderr


def cut_off(connection: socket.socket) -> None:
    connection.sendall(http(b"not yet", length=1000))


@pytest.mark.parametrize("answer", [None, http(b"not yet", "503 Service Unavailable"), cut_off, hang_up])
def test_while_tritonserver_is_away(open_port: Open, answer: Answer | None) -> None:
    with CannedHttp([answer or b""]) as triton:
        text = fetch_metrics(open_port(triton if answer else None))
    assert 'graphkiln_restarts_total{cause="server_died"} 2' in text
    assert "not yet" not in text
    assert "graphkiln_triton_info" not in text, "alerts depend on it"


def test_tritonserver_that_does_not_answer(open_port: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TRITON_TIMEOUT_S", 0.2)
    with CannedHttp([silence]) as triton:
        assert "graphkiln_restarts_total" in fetch_metrics(open_port(triton))


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", b"HTTP/1.1 200 OK"),
        (b"GET /metrics?name=x HTTP/1.0\r\n\r\n", b"HTTP/1.1 200 OK"),
        (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.1 405 Method Not Allowed"),
        (b"\r\n\r\n", b"HTTP/1.1 405 Method Not Allowed"),
        (b"GET /metrics HTTP/1.1\r\na: " + b"x" * 20_000, b""),
    ],
)
def test_requests(open_port: Open, request_: bytes, status: bytes) -> None:
    try:
        assert ask(open_port(), request_) == status
    except ConnectionResetError:  # it was too long, and was not read to its end
        assert not status


def test_slow_and_silent_clients_hold_nobody_up(open_port: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REQUEST_TIMEOUT_S", 0.3)
    url = open_port()
    port = int(url.split(":")[2].partition("/")[0])
    with ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(8)]
        stopped = threading.Event()

        def trickle() -> None:
            while not stopped.wait(0.05):
                for connection in slow[:4]:
                    try:
                        connection.sendall(b"a")
                    except OSError:
                        return

        thread = threading.Thread(target=trickle)
        thread.start()
        stack.callback(thread.join)
        stack.callback(stopped.set)
        begun = time.monotonic()
        assert "graphkiln_restarts_total" in fetch_metrics(url)
        assert time.monotonic() - begun < 3


def test_a_client_that_hangs_up_ends_no_thread(open_port: Open) -> None:
    url = open_port()
    for _ in range(2 * module._THREADS):
        host, port = url.removeprefix("http://").removesuffix("/metrics").split(":")
        socket.create_connection((host, int(port))).close()
    assert "graphkiln_restarts_total" in fetch_metrics(url)


def test_port_and_threads_are_free_after_close() -> None:
    before = set(threading.enumerate())
    (port,) = free_ports(1)
    options: dict[str, Any] = {"version": "", "restarts": dict, "rows": tuple}
    with MetricsPort(at(port), at(port), **options):
        with pytest.raises(ServerSetupError, match="cannot listen on"):
            MetricsPort(at(port), at(port), **options)
        assert len(set(threading.enumerate()) - before) == module._THREADS
    wait_until(lambda: set(threading.enumerate()) <= before)
    socket.create_server(("127.0.0.1", port)).close()


def write_rollout(folder: RolloutFolder, model: str, *, phase: str, reason: str = "", age_s: float = 0.0) -> None:
    """Write a rollout to version 2 with 1,000 compared requests."""
    running = phase in {"shadow", "traffic"}
    folder.write_wanted(
        Wanted(
            model=model, candidate=2, serving=1, phase=phase, reason=reason,  # type: ignore[arg-type]
            gates=Gates(agree=0.995) if running else Gates(),
        )
    )  # fmt: skip
    latency = Latencies()
    latency.add(0.001)
    folder.write_progress(
        Progress(
            model=model, candidate=2, serving=1, phase=phase, share=0.05, compared=1000, agreed=990,  # type: ignore[arg-type]
            disagreed=10, dropped=3, failed=1, candidate_latency=latency, updated_at=time.time() - age_s,
        )
    )  # fmt: skip


def test_rollouts(open_port: Open, tmp_path: Path) -> None:
    folder = RolloutFolder(tmp_path / "state", tmp_path / "store")
    write_rollout(folder, "m", phase="shadow", age_s=200_000)  # no requests for days
    write_rollout(folder, "ended", phase="aborted", reason="too slow")
    write_rollout(folder, "forgotten", phase="aborted", reason="too slow", age_s=90_000)
    text = fetch_metrics(open_port(rollouts=[folder, RolloutFolder(tmp_path / "none", tmp_path)]))
    for line in (
        'graphkiln_rollout_info{model="m",version="2",phase="shadow",by="user",serving="1"} 1',
        'graphkiln_rollout_info{model="ended",version="2",phase="aborted",by="server",serving="1"} 1',
        'graphkiln_rollout_share{model="m",version="2"} 0.05',
        'graphkiln_rollout_compared_total{model="m",version="2"} 1000',
        'graphkiln_rollout_disagreed_total{model="m",version="2"} 10',
        'graphkiln_rollout_dropped_total{model="m",version="2"} 3',
        'graphkiln_rollout_failed_total{model="m",version="2"} 1',
        'graphkiln_rollout_agreement_limit{model="m",version="2"} 0.995',
        'graphkiln_rollout_agreement_limit{model="ended",version="2"} 0.99',
    ):
        assert line in text.splitlines()
    low, high = (
        float(re.findall(rf'^graphkiln_rollout_agreement{{model="m",version="2",bound="{each}"}} (.*)$', text, re.M)[0])
        for each in ("lower", "upper")
    )
    assert 0.9 < low < 0.99 < high < 1
    assert re.search(r'^graphkiln_rollout_latency_seconds{.*role="candidate",quantile="0.99"} 0.001', text, re.M)
    assert 'role="serving"' not in text  # without requests
    assert "forgotten" not in text


def test_no_rollout_loads_no_code() -> None:
    code = "import sys, graphkiln_backend.server.metrics_port; sys.exit(any('rollout_gates' in e for e in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
