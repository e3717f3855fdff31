"""One process of the load generator, without a process: a server that is not there, and requests in turn."""

from __future__ import annotations

import io
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from graphkiln.bench import worker as load_worker
from graphkiln.bench.arrivals import Moments
from graphkiln.bench.generator import Recording
from graphkiln.bench.job import Feeds, Job, Load, Target, hear, tell

SAMPLES: list[Feeds] = [{"X": np.full((1,), number)} for number in range(3)]


def test_requests_take_turns_in_all_threads() -> None:
    sent: list[int] = []
    requests: list[Callable[[], object]] = [lambda number=number: sent.append(number) for number in range(3)]
    send = load_worker.in_turn(requests)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: send(), range(300)))
    assert Counter(sent) == {0: 100, 1: 100, 2: 100}


class FakeModel:
    """Notes which samples were sent."""

    def __init__(self) -> None:
        self.sent: list[int] = []

    def repeatable(self, feeds: Feeds) -> Callable[[], object]:
        def send() -> None:
            time.sleep(0.001)
            self.sent.append(int(feeds["X"][0]))

        return send


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    fake = FakeModel()
    monkeypatch.setattr(load_worker, "_open", lambda *_: fake)
    return fake


def run(arrivals: Moments | None, samples: list[Feeds]) -> Recording:
    load = Load(callers=2, seconds=0.3, warmup_s=0.05, arrivals=arrivals)
    orders, reports = io.BytesIO(), io.BytesIO()
    tell(orders, Job(target=Target(client={"url": "http://localhost:1"}, model="m"), load=load, samples=samples))
    tell(orders, time.perf_counter())
    orders.seek(0)
    load_worker.work(orders, reports)
    reports.seek(0)
    assert hear(reports) is None
    found = hear(reports)
    assert isinstance(found, Recording)
    return found


def test_a_closed_loop_has_as_many_callers(model: FakeModel) -> None:
    recording = run(None, SAMPLES)
    assert len(recording.traces) == 2
    assert set(model.sent) == {0, 1, 2}
    assert len(recording.responses) == len(model.sent) - 1  # the first one connected


def test_an_open_loop_sends_what_is_due(model: FakeModel) -> None:
    recording = run(np.arange(10) / 100, SAMPLES[:1])
    assert len(recording.responses) == 10
    assert model.sent == [0] * 11


def test_a_server_that_is_not_there_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    target = Target(client={"url": f"http://127.0.0.1:{port}", "max_retries": 0}, model="m")
    orders, reports = io.BytesIO(), io.BytesIO()
    tell(orders, Job(target=target, load=Load(callers=1, seconds=1, warmup_s=0), samples=SAMPLES))
    orders.seek(0)
    load_worker.work(orders, reports)
    reports.seek(0)
    assert f"127.0.0.1:{port}" in hear(reports)
    assert threading.active_count() == 1 or reports.read() == b""


def test_shared_memory_is_opened_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    class FakeClient:
        def __init__(self, **given: object) -> None:
            opened.append(given)

        def __enter__(self) -> FakeClient:
            return self

        def __exit__(self, *_: object) -> None:
            opened.append("closed")

        def shared_memory(self) -> nullcontext[FakeClient]:
            opened.append("shared")
            return nullcontext(self)

        def model(self, name: str, version: str) -> tuple[str, str]:
            return name, version

    monkeypatch.setattr(load_worker, "Client", FakeClient)
    with load_worker.ExitStack() as stack:
        for shared in (False, True):
            target = Target(client={"url": "u"}, model="m", version="3", shared_memory=shared)
            assert load_worker._open(stack, target) == ("m", "3")
    assert opened == [{"url": "u"}, {"url": "u"}, "shared", "closed", "closed"]
