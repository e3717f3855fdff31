"""Room on nodes, and the supervision of workers, on machines that only pretend."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from graphkiln_backend.scoring import fleet as module
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.fleet import (
    CRASHED,
    EMPTY_S,
    MAX_LOST,
    OUT_OF_MEMORY,
    WAITING_S,
    CallFailed,
    Fleet,
    Node,
    Room,
    WorkerLost,
    room_of,
)
from graphkiln_backend.scoring.messages import Blame, Ended, Event, NodeRefused, ScoreRequest
from graphkiln_backend.scoring.worker import WorkerActor

NODE = Node(id="n", name="node", cores=1, gpus=0)


class FakeMachines:
    """Nodes whose workers are names, and calls texts.

    Attributes:
        living: The nodes.
        error: Raised by each call.
    """

    def __init__(self) -> None:
        self.living = [NODE]
        self.error: Exception | None = None

    def nodes(self) -> Sequence[Node]:
        return self.living

    def check(self, node: Node, _version: str, _model: str) -> str:
        return f"check of {node.name}"

    def start(self, _node: Node, _room: Room, name: str, _request: ScoreRequest) -> str:
        return name

    def call(self, worker: str, method: str, *_: object) -> str:
        assert hasattr(WorkerActor, method)
        return f"{method} of {worker}"

    def wait(self, _calls: Sequence[str], _timeout_s: float, *, every: bool = False) -> Sequence[str]:
        assert not every
        return []

    def result(self, _call: str) -> None:
        if self.error:
            raise self.error

    def kill(self, _worker: str) -> None:
        """Nothing runs."""


def node(cores: int, gpus: int = 0) -> Node:
    return Node(id="a", name="node", cores=cores, gpus=gpus)


@pytest.mark.parametrize(
    ("one", "per_worker", "on_gpu", "expected"),
    [
        (node(8), 0, False, (1, 8, 0)),
        (node(7), 2, False, (3, 2, 0)),
        (node(2), 16, False, (1, 2, 0)),
        (node(0), 2, False, (0, 0, 0)),
        (node(64, 8), 0, True, (8, 8, 1)),
        (node(64, 8), 0, False, (1, 64, 0)),
        (node(64, 8), 16, True, (4, 16, 1)),
        (node(16), 4, True, (4, 4, 0)),
        (node(2, 4), 0, True, (0, 0, 1)),
    ],
)
def test_room(one: Node, per_worker: int, on_gpu: bool, expected: tuple[int, int, int]) -> None:
    room = room_of(one, per_worker, on_gpu=on_gpu)
    assert (room.workers, room.cores, room.gpus) == expected


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def machines() -> FakeMachines:
    return FakeMachines()


@pytest.fixture
def fleet(events: list[Event], machines: FakeMachines) -> Fleet:
    request = ScoreRequest(source="in", model="/store/m", destination="out")
    return Fleet(machines, request, "configuration", on_gpu=False, report=events.append)


def add(fleet: Fleet, name: str, *calls: str, **state: object) -> module._Member:
    member = module._Member(worker=name, node=NODE, heartbeat="heartbeat", calls=set(calls), **state)  # type: ignore[arg-type]
    fleet._members[name] = member
    return member


def test_node_that_loses_all_starting_workers_is_refused(
    fleet: Fleet, events: list[Event], machines: FakeMachines
) -> None:
    machines.error = WorkerLost(CRASHED, "no memory\nlong")
    for number in range(MAX_LOST):
        assert events == []
        add(fleet, f"worker-{number}", "start")
        fleet._collect(f"worker-{number}", "start")
    (refused,) = events
    assert isinstance(refused, NodeRefused)
    assert refused.reason.endswith("before they were ready: no memory")
    with pytest.raises(ScoringError, match="no node can take part: node: 10 workers"):
        fleet._check_not_empty(0.0)


def test_node_that_cannot_be_checked_ends_the_run(fleet: Fleet, machines: FakeMachines) -> None:
    machines.error = CallFailed("its memory is full\nlong")
    fleet._admit(NODE, "check")
    fleet._checks["check"] = NODE  # it is checked again
    fleet._check_not_empty(fleet._last_not_empty + EMPTY_S - 1)
    with pytest.raises(ScoringError, match=r"600 s \(node could not be checked: its memory is full\)"):
        fleet._check_not_empty(fleet._last_not_empty + EMPTY_S + 1)


def test_workers_that_are_not_placed_are_logged_once(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    add(fleet, "worker-1", since=1.0)
    add(fleet, "worker-2", since=1.0, progress=0)
    for now in (60.0, 62.0, 63.0):
        fleet._move_waiting(now)
    (message,) = caplog.messages
    assert message.startswith("1 of 2 workers")


def test_worker_moves_from_a_busy_node_to_one_with_room(fleet: Fleet, machines: FakeMachines) -> None:
    """With `--workers 1` only one worker is started, on a node whose cores something else may use."""
    idle = replace(NODE, id="idle", name="idle")
    machines.living = [NODE, idle]
    fleet._request = replace(fleet._request, workers=1)
    fleet._nodes = {each.id: each for each in (NODE, idle)}
    fleet._update_nodes()
    for expected in (NODE, idle, NODE):
        (member,) = fleet._members.values()
        assert member.node == expected
        fleet._nodes_listed = float("-inf")
        member.since -= WAITING_S + 1
        fleet._update_nodes()
    (member,) = fleet._members.values()
    assert member.node == NODE, "which has more time now"


@pytest.mark.parametrize(
    ("error", "reason", "blame"),
    [
        (WorkerLost(OUT_OF_MEMORY, "low on memory"), OUT_OF_MEMORY, Blame.ROWS),
        (WorkerLost(CRASHED, ""), CRASHED, Blame.ROWS),
        (CallFailed("odd"), "its actor failed: odd", Blame.WORKER),
    ],
)
def test_end_of_a_worker_has_a_reason_and_its_pending_commits(
    fleet: Fleet, machines: FakeMachines, error: Exception, reason: str, blame: Blame
) -> None:
    machines.error = error
    add(fleet, "w", "compute 1", "commit 2", committing={"commit 2": 2}, ready=True)
    expected = Ended(worker="w", blame=blame, reason=reason, committing=frozenset([2]))
    assert fleet._collect("w", "compute 1") == expected
    assert fleet._members == {}


def test_hanging_worker_is_ended(fleet: Fleet) -> None:
    now = time.monotonic()
    add(fleet, "hangs", "compute 1", since=now - 100, progress=7, ready=True)
    add(fleet, "idle", since=now - 100, progress=7, ready=True)
    busy = add(fleet, "busy", "compute 2", since=now, progress=7, ready=True)
    assert fleet._end_hanging(lambda _: 60.0) == [Ended(worker="hangs", blame=Blame.ROWS, reason="hung for 100 s")]
    fleet._last_hang_check -= 1000  # this process was suspended
    busy.since -= 1000
    assert fleet._end_hanging(lambda _: 60.0) == []
