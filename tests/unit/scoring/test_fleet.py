"""Workers on three nodes: workers and nodes are killed, nodes join, and every row is answered once."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ray_cluster import RayNodes, kill, processes_of, ray_nodes
from scoring_runs import PLANTED, check_each_once, make_images, make_request

from graphkiln_backend.scoring import fleet as module
from graphkiln_backend.scoring import schedule
from graphkiln_backend.scoring.driver import score_data_set
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.messages import Event, NodeLost, NodeRefused, UnitCommitted, WorkerEnded, WorkerReady

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder by which this process and planted rows signal each other."""
    return tmp_path_factory.mktemp("planted")


@pytest.fixture(scope="module")
def cluster(planted: Path) -> Iterator[RayNodes]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("GRAPHKILN_PLANTED", str(planted))
        with ray_nodes(3, str(PLANTED)) as nodes:
            yield nodes


class Killer:
    """Kills a worker or a node after every so many commits."""

    def __init__(self, cluster: RayNodes, every: int, seed: int) -> None:
        self._cluster, self._every, self._random = cluster, every, random.Random(seed)
        self._commits = 0
        self._threads: list[threading.Thread] = []
        self.kills: list[str] = []
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, UnitCommitted):
            self._commits += 1
            if self._commits % self._every == 0:
                self._threads.append(threading.Thread(target=self._kill))
                self._threads[-1].start()

    def finish(self) -> None:
        """Wait for kills in progress: adding a node takes half a minute on a busy machine."""
        for thread in self._threads:
            thread.join()

    def _kill(self) -> None:
        kind = self._random.choice(["worker", "worker", "worker", "node"])
        self.kills.append(kind)
        if kind == "node":
            self._cluster.add()
            self._cluster.kill(self._cluster.nodes[0])
            return
        victims = processes_of("ray::WorkerActor")
        if victims:
            kill(self._random.choice(victims))


def test_killed_workers_and_nodes_lose_no_row(tmp_path: Path, cluster: RayNodes) -> None:
    request = make_request(make_images(tmp_path / "in", 400), tmp_path / "out", 4, address=cluster.address)
    killer = Killer(cluster, every=12, seed=5)
    try:
        score_data_set(request, killer)
    finally:
        killer.finish()
    assert check_each_once(tmp_path / "out", 400) == {}
    assert len(killer.kills) >= 5
    assert any(isinstance(each, WorkerEnded) for each in killer.events)
    assert sum(isinstance(each, NodeLost) for each in killer.events) <= killer.kills.count("node")


def test_new_node_gets_a_worker(
    tmp_path: Path, cluster: RayNodes, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row waits for that worker: on a busy machine the run could end before the new node has joined."""
    monkeypatch.setattr(schedule, "MIN_HANG_TIMEOUT_S", schedule.FIRST_HANG_TIMEOUT_S)
    folder = make_images(tmp_path / "in", 100, {50: b"wait"})
    request = make_request(folder, tmp_path / "out", 4, address=cluster.address)
    new: list[str] = []

    def report(event: Event) -> None:
        if isinstance(event, UnitCommitted) and not new:
            new.append(cluster.add().node_id)
        if isinstance(event, WorkerReady) and new and event.facts.node.endswith(f"/{new[0][:6]}"):
            (planted / "go on").touch()

    score_data_set(request, report)
    assert check_each_once(tmp_path / "out", 100).keys() == {"00050.png"}


def test_number_of_workers_is_limited(tmp_path: Path, cluster: RayNodes) -> None:
    request = make_request(make_images(tmp_path / "in", 40), tmp_path / "out", 4, address=cluster.address, workers=1)
    events: list[Event] = []
    score_data_set(request, events.append)
    assert len({each.worker for each in events if isinstance(each, UnitCommitted)}) == 1


def test_nodes_of_another_version_are_refused(
    tmp_path: Path, cluster: RayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request(make_images(tmp_path / "in", 4), tmp_path / "out", 4, address=cluster.address)
    monkeypatch.setattr(module, "version", lambda _: "9.9")
    events: list[Event] = []
    with pytest.raises(ScoringError, match=r"no node can take part: .*the driver 9.9: install"):
        score_data_set(request, events.append)
    assert sum(isinstance(each, NodeRefused) for each in events) == len(cluster.nodes)


def test_poison_row_on_three_nodes(tmp_path: Path, cluster: RayNodes) -> None:
    planted = {57: b"segfault", 3: b"no image"}
    folder = make_images(tmp_path / "in", 80, planted)
    request = replace(make_request(folder, tmp_path / "out", 20), address=cluster.address)
    events: list[Event] = []
    score_data_set(request, events.append)
    errors = check_each_once(tmp_path / "out", 80)
    assert errors.keys() == {"00003.png", "00057.png"}
    assert errors["00057.png"] == f"its worker {module.CRASHED}"
    assert any(isinstance(each, WorkerEnded) for each in events)
