"""Requests that end their instance: who is a suspect, who is refused, and what is forgotten."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from fake_session import FakeSession, spec
from fake_triton import InferenceRequest

from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.triton import deadly_requests as module
from graphkiln_backend.triton.deadly_requests import DeadlyRequests
from graphkiln_backend.triton.executor import Executor
from graphkiln_backend.triton.request_notes import DeadlyRequest, Feeds, RequestNotes

PID = 17


class Server:
    """Runs of one instance, each in its own folder, with what the supervisor keeps between them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, 0
        self.known = DeadlyRequests()
        self.start()

    def start(self) -> None:
        self.runs += 1
        self.run = self.folder / str(self.runs)
        self.run.mkdir()
        self.known.publish(self.run)
        self.notes = RequestNotes(self.run, "m_0", PID, "m 1 onnxruntime")

    def die_of(self, *requests: Feeds) -> None:
        self.notes.begin(requests)
        self.restart()

    def restart(self) -> None:
        """The process is gone without another word."""
        self.known.learn(self.run, f"m_0.{PID}")
        self.start()

    def survive(self, *requests: Feeds) -> None:
        self.notes.begin(requests)
        self.notes.end()


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


def feeds(number: float, size: int = 5000) -> Feeds:
    return {"x": np.full((1, size), number, np.float32)}


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 3), np.float32),
        np.zeros((), np.int64),
        np.zeros((0, 3), np.float32),
        np.zeros(100_000, np.uint8),
        np.zeros((4, 4), ml_dtypes.bfloat16)[:, ::2],
        np.array([[b"a", "\u00e9"]], np.object_),
        np.array([b"word"] * 1000, np.object_),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)
def test_the_third_time_a_request_is_refused_for_good(server: Server, array: np.ndarray, logged: list[str]) -> None:
    deadly = {"x": array, "y": np.ones(3)}
    server.die_of(deadly)
    assert server.notes.is_known(deadly)
    server.die_of(deadly)
    for _ in range(2):
        with pytest.raises(DeadlyRequest, match="has ended two instances"):
            server.notes.begin([{name: each.copy() for name, each in deadly.items()}])
        server.survive(feeds(1))
        server.restart()
    assert [line for line in logged if "the second time" in line and "m_0" in line] == logged


def test_neighbours_in_a_batch_are_suspects_and_not_refused(server: Server) -> None:
    deadly, innocent = feeds(0), [feeds(number) for number in range(1, 4)]
    for _ in range(3):  # they meet the deadly one again and again
        server.die_of(*innocent, deadly)
        assert all(map(server.notes.is_known, innocent))
        for request in innocent:
            server.survive(request)
            assert not server.notes.is_known(request)
    server.die_of(deadly)
    with pytest.raises(DeadlyRequest):
        server.notes.begin([deadly])
    server.survive(*innocent)


def test_a_popular_request_is_not_blamed_for_kills_from_outside(server: Server) -> None:
    for _ in range(5):
        server.survive(feeds(1))
        server.die_of(feeds(1))
    server.survive(feeds(1))


def test_a_request_that_differs_in_one_byte_is_another(server: Server) -> None:
    deadly, similar = feeds(0), feeds(0)
    similar["x"][0, 2000] = 1  # outside of what the fingerprint reads
    for _ in range(2):
        server.die_of(deadly)
    server.survive(similar)
    with pytest.raises(DeadlyRequest):
        server.notes.begin([deadly])


def test_idle_deaths_and_missing_notes_blame_nobody(server: Server) -> None:
    server.survive(feeds(1))
    server.restart()
    assert not server.notes.is_known(feeds(1))
    server.notes.close()
    server.restart()


def test_the_notes_of_every_ended_process_count(server: Server) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    for pid, number in ((gone.pid, 1), (os.getpid(), 2)):
        RequestNotes(server.run, "other", pid, "m 1 onnxruntime").begin([feeds(number)])
    server.restart()
    assert server.notes.is_known(feeds(1))
    assert not server.notes.is_known(feeds(2)), "its process goes on"


def test_images_under_way_are_suspects_when_another_instance_dies(server: Server) -> None:
    """They wait for the tensor model, whose death is not yet theirs: they are sent alone, and never refused for it."""
    for number in range(3, 6):
        images = RequestNotes(server.run, "m.images_0_0", os.getpid(), "m.images 1")
        images.begin([feeds(2)])
        server.die_of(feeds(number))
    again = RequestNotes(server.run, "m.images_0_0", os.getpid(), "m.images 1")
    assert again.is_known(feeds(2))
    again.begin([feeds(2)])


def test_what_was_not_survived_stays_a_suspect(server: Server) -> None:
    server.die_of(feeds(1))
    server.notes.begin([feeds(1)])  # and no end, as it did not end well
    server.survive(feeds(2))
    server.restart()
    assert server.notes.is_known(feeds(1))


def test_other_files_or_another_engine_compute_it_again(server: Server) -> None:
    for _ in range(2):
        server.die_of(feeds(0))
    RequestNotes(server.run, "m_0", PID + 1, "m 1 openvino").begin([feeds(0)])


def test_memory_is_bounded(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_KNOWN", 20)
    server.die_of(*(feeds(number, 1) for number in range(300)))
    assert len(server.known._suspects) == 20
    for number in range(300, 330):
        server.die_of(feeds(number, 1))
        server.die_of(feeds(number, 1))
    assert len(server.known._refused) == 20


class Died(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_loses_the_deadly_request_alone(server: Server, seed: int) -> None:
    """Batches of an executor, two deadly requests among twenty, and a kill from outside now and then."""
    chance, deadly, deaths = random.Random(seed), {3, 11}, 0
    kill = False

    def compute(batch: Feeds) -> dict[str, np.ndarray]:
        if kill or deadly & set(batch["x"][:, 0].astype(int)):
            server.restart()  # first: a process that dies runs no more code
            raise Died
        return {"y": batch["x"] * 2}

    signature = Signature(inputs=(spec("x", "batch", 2),), outputs=(spec("y", "batch", 2),))
    for _ in range(400):
        executor = Executor(FakeSession(signature, compute), batching=True)
        executor.notes = server.notes
        numbers = [chance.randrange(20) for _ in range(chance.randrange(1, 6))]
        kill = chance.random() < 0.02
        requests = [InferenceRequest({"x": np.full((1, 2), number, np.float32)}, ("y",)) for number in numbers]
        try:
            results = executor.execute_batch(requests)
        except Died:
            deaths += not kill
            continue
        for number, result in zip(numbers, results, strict=True):
            if number in deadly:
                assert isinstance(result, DeadlyRequest)
            else:
                assert isinstance(result, dict), (number, result)
                assert result["y"][0, 0] == 2 * number
    assert 2 <= deaths <= 6
