"""A node on which no worker comes up is left out; one that loses some now and then is not. No Ray is started."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from graphkiln_backend.scoring import fleet as module
from graphkiln_backend.scoring.cluster import Node
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.fleet import MOST_LOST, RayFleet
from graphkiln_backend.scoring.messages import Blame, Ended, Event, NodeRefused
from graphkiln_backend.scoring.request import ScoreRequest
from graphkiln_backend.scoring.worker import WorkerActor

NODE = Node(id="n", name="node", cores=1, gpus=0)


@pytest.fixture
def told() -> list[Event]:
    return []


@pytest.fixture
def fleet(told: list[Event], monkeypatch: pytest.MonkeyPatch) -> RayFleet:
    monkeypatch.setattr(module, "living_nodes", lambda: [NODE])
    request = ScoreRequest(source="in", model="/store/m", destination="out")
    return RayFleet(request, "configuration", on_gpu=False, report=told.append)


def lose(fleet: RayFleet, times: int, *, ready: bool = False) -> None:
    for _ in range(times):
        member = module._Member(actor=None, node=NODE, heartbeat_call=None, calls={}, ready=ready)
        assert fleet._lost("worker", member, RayActorError(error_msg="no memory\nlong")).blame is Blame.ROWS


def test_after_many_in_a_row_the_node_is_refused_with_the_reason(fleet: RayFleet, told: list[Event]) -> None:
    lose(fleet, MOST_LOST - 1)
    assert told == []
    lose(fleet, 1)
    reason = f"{MOST_LOST} workers in a row were lost before they were ready: no memory"
    assert told == [NodeRefused(node="node", reason=reason)]
    with pytest.raises(ScoringError, match="no node can take part: node: 10 workers in a row"):
        fleet._check_not_empty(0.0)


def test_workers_whose_cores_others_use_are_told_once(fleet: RayFleet, caplog: pytest.LogCaptureFixture) -> None:
    """A Ray that is shared, or one that this process has started and uses itself: nothing would happen, in silence."""
    for name, since, progress in (("worker-1", 1.0, None), ("worker-2", 1.0, 0), ("worker-3", 50.0, None)):
        fleet._members[name] = module._Member(
            actor=None, node=NODE, heartbeat_call=None, calls={}, since=since, progress=progress
        )
    fleet._warn_of_waiting(60.0)
    assert caplog.messages == []
    for _ in range(2):
        fleet._warn_of_waiting(62.0)
    (message,) = caplog.messages
    assert message.startswith("1 of 3 workers have been waiting for cores of node for 60 s")


class Actor:
    """Answers with references that a test has made."""

    def __getattr__(self, name: str) -> object:
        assert hasattr(WorkerActor, name)
        return SimpleNamespace(remote=lambda *_: f"{name} call")


def test_what_ray_says_of_a_worker_becomes_a_reason(fleet: RayFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt that was being committed is named, so that its rows are not blamed."""
    monkeypatch.setattr(module.ray, "kill", lambda _: None)
    for error, reason, blame in (
        (OutOfMemoryError("low on memory"), module.OUT_OF_MEMORY, Blame.ROWS),
        (RayActorError(), module.CRASHED, Blame.ROWS),
        (RayError("odd"), "its actor failed: odd", Blame.WORKER),
    ):

        def fail(_: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(module.ray, "get", fail)
        fleet._members["w"] = module._Member(
            actor=Actor(),
            node=NODE,
            heartbeat_call="heartbeat",
            calls={"one": module._Call(module._Stage.COMPUTE, 1), "two": module._Call(module._Stage.COMMIT, 2)},
            ready=True,
        )
        ended = fleet._collect("w", "one")
        assert ended == Ended(worker="w", blame=blame, reason=reason, committing=frozenset([2]))
        assert fleet._members == {}


def test_a_worker_that_stands_still_is_ended_and_one_that_goes_on_is_not(
    fleet: RayFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.ray, "kill", lambda _: None)
    now = time.monotonic()
    for name, since, calls in (
        ("still", now - 100, {"one": module._Call(module._Stage.COMPUTE, 1)}),
        ("idle", now - 100, {}),
        ("on", now, {"c": module._Call(module._Stage.COMMIT, 2)}),
    ):
        fleet._members[name] = module._Member(
            actor=Actor(), node=NODE, heartbeat_call="heartbeat", calls=dict(calls), since=since, progress=7, ready=True
        )
    (ended,) = fleet._end_hanging(60.0)
    assert isinstance(ended, Ended)
    assert (ended.worker, ended.blame, ended.reason) == ("still", Blame.ROWS, "hung for 100 s")
    fleet._watched -= 1000  # this process was suspended
    fleet._members["on"].since -= 1000
    assert fleet._end_hanging(60.0) == []
