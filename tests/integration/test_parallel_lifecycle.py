"""Split models that are loaded and unloaded, or killed under load: no leftovers, no wrong output."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import split_graphs
from graphs import compute, draw
from running import Server, Serving, is_stub

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError
from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.slow]

SPLITS = {"staged": "pipeline=2, micro_batches=4", "sharded": "tensor=2"}
CALLERS, ROWS = 3, 4


def add(store: Path, name: str) -> None:
    split_graphs.save(split_graphs.attention(), store / name / "1")
    (store / name / "config.pbtxt").write_text(
        'backend: "graphkiln" max_batch_size: 8\n'
        f'parameters {{ key: "parallel" value {{ string_value: "{SPLITS[name]}" }} }}'
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lifecycle store")
    for name in SPLITS:
        add(folder, name)
    return folder


@pytest.fixture(scope="module")
def expected() -> tuple[AnyArray, AnyArray]:
    """A request and its output."""
    x = draw(ROWS, 5, 24, seed=4)
    return x, compute(split_graphs.attention(), x=x)["y"]


def stubs(server: Server) -> list[psutil.Process]:
    return [child for child in psutil.Process(server.process.pid).children(recursive=True) if is_stub(child)]


def test_loading_and_unloading_leaves_nothing(store: Path, tmp_path: Path, expected: tuple[AnyArray, AnyArray]) -> None:
    x, right = expected
    with Serving(tmp_path, "--model-store", store, "--model-control-mode=explicit") as server:
        server.wait_until(lambda: server.status("/v2/health/live") == 200)
        threads: list[int] = []
        with Client(server.url, timeout_s=120) as client:
            for _ in range(3):
                for name in SPLITS:
                    client.load(name)
                    np.testing.assert_allclose(client.model(name).infer({"x": x})["y"], right, rtol=1e-4, atol=1e-5)
                assert len(stubs(server)) == len(SPLITS)
                for name in SPLITS:
                    client.unload(name)
                server.wait_until(lambda: not stubs(server))
                threads.append(sum(process.num_threads() for process in psutil.Process(server.process.pid).children()))
        shared = [path for path in server.temporary.glob("graphkiln-*/shared/*") if path.is_dir()]
        assert not shared, "copies of weights that nobody maps"
        grown = [later - before for before, later in itertools.pairwise(threads)]
        assert min(grown) < len(SPLITS), f"threads of instances that are gone: {threads}"


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid)


def instance_of(server: Server, model: str) -> int:
    statuses = [json.loads(path.read_text()) for path in server.temporary.glob("graphkiln-*/instances/*.json")]
    (pid,) = {int(status["pid"]) for status in statuses if status.get("model") == model}
    return pid


class Callers:
    """Ask all models repeatedly, in threads; keep wrong outputs."""

    def __init__(self, server: Server, x: AnyArray, right: AnyArray) -> None:
        self._server, self._x, self._right = server, x, right
        self._ending = threading.Event()
        self.wrong: list[AnyArray] = []
        self.answers = dict.fromkeys(SPLITS, 0)
        self.errors = 0
        self._threads = [threading.Thread(target=self._ask, args=(name,)) for name in SPLITS for _ in range(CALLERS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, name: str) -> None:
        with Client(self._server.url, timeout_s=30, max_retries=0) as client:
            while not self._ending.wait(0.01):
                try:
                    found = client.model(name).infer({"x": self._x})["y"]
                except ClientError:
                    self.errors += 1
                    continue
                if not np.allclose(found, self._right, rtol=1e-4, atol=1e-5):
                    self.wrong.append(found)
                self.answers[name] += 1

    def has_answered(self, name: str, count: int) -> bool:
        return self.answers[name] >= count

    def end(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(60)


@pytest.fixture(scope="module")
def server(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Serving(tmp_path_factory.mktemp("lifecycle"), "--model-store", store) as running:
        running.wait_ready()
        yield running


@pytest.mark.parametrize("name", SPLITS)
def test_process_killed_under_load(server: Server, expected: tuple[AnyArray, AnyArray], name: str) -> None:
    callers = Callers(server, *expected)
    try:
        server.wait_until(lambda: min(callers.answers.values()) >= 5)
        starts = server.log.count("serving HTTP")
        os.kill(instance_of(server, name), signal.SIGKILL)
        server.wait_until(lambda: server.log.count("serving HTTP") > starts)
        server.wait_ready()
        before = dict(callers.answers)
        server.wait_until(lambda: all(callers.answers[each] >= before[each] + 5 for each in SPLITS))
    finally:
        callers.end()
    assert not callers.wrong
    assert callers.errors, "those who waited for the process that died were told"
    restarts = 'graphkiln_restarts_total{cause="instance_died"}'
    server.wait_until(lambda: server.metrics().get(restarts, 0) >= 1)


def test_versions_reloaded_under_load_answer_every_request(tmp_path: Path, expected: tuple[AnyArray, AnyArray]) -> None:
    """The old process ends once the new one responds."""
    store = tmp_path / "store"
    for name in SPLITS:
        add(store, name)
    with Serving(tmp_path, "--model-store", store, "--model-control-mode=explicit") as server:
        server.wait_until(lambda: server.status("/v2/health/live") == 200)
        with Client(server.url, timeout_s=120) as client:
            for name in SPLITS:
                client.load(name)
            callers = Callers(server, *expected)
            try:
                for name in SPLITS:
                    before, old = callers.answers[name], instance_of(server, name)
                    config = store / name / "config.pbtxt"
                    config.write_text(config.read_text().replace("max_batch_size: 8", "max_batch_size: 16"))
                    client.load(name)
                    server.wait_until(partial(is_gone, old))
                    server.wait_until(partial(callers.has_answered, name, before + 5))
                    assert instance_of(server, name) != old
            finally:
                callers.end()
    assert not callers.wrong
    assert not callers.errors
