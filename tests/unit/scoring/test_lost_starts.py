"""A node on which no worker comes up is left out; one that loses some now and then is not. No Ray is started."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_fleet import facts
from ray.exceptions import RayActorError

from graphkiln_backend.scoring import fleet as module
from graphkiln_backend.scoring.cluster import Node
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.events import Event, NodeRefused
from graphkiln_backend.scoring.fleet import MOST_LOST, RayFleet
from graphkiln_backend.scoring.outcomes import Blame, Ready
from graphkiln_backend.scoring.request import ScoreRequest

NODE = Node(id="n", name="node", cores=1, gpus=0, memory_bytes=1e9)


@pytest.fixture
def told() -> list[Event]:
    return []


@pytest.fixture
def fleet(told: list[Event], monkeypatch: pytest.MonkeyPatch) -> RayFleet:
    monkeypatch.setattr(module, "living_nodes", lambda: [NODE])
    request = ScoreRequest(source="in", model="/store/m", destination="out")
    return RayFleet(request, "configuration", on_gpu=False, tell=told.append)


def lose(fleet: RayFleet, times: int, *, ready: bool = False) -> None:
    for _ in range(times):
        member = module._Member(actor=None, node=NODE, poll=None, ready=ready)
        assert fleet._lost("worker", member, RayActorError(error_msg="no memory\nlong")).blame is Blame.UNKNOWN


def test_after_many_in_a_row_the_node_is_refused_with_the_reason(fleet: RayFleet, told: list[Event]) -> None:
    lose(fleet, MOST_LOST - 1)
    assert told == []
    lose(fleet, 1)
    reason = f"{MOST_LOST} workers in a row were lost before they were ready: no memory"
    assert told == [NodeRefused(node="node", reason=reason)]
    with pytest.raises(ScoringError, match="no node can take part: node: 10 workers in a row"):
        fleet._check_anybody(0.0)


def test_a_worker_that_was_ready_counts_anew(fleet: RayFleet, told: list[Event]) -> None:
    lose(fleet, MOST_LOST - 1)
    fleet._members["worker"] = module._Member(actor=None, node=NODE, poll=None)
    fleet._note(Ready(worker="worker", facts=replace(facts("node"), configuration="configuration")))
    assert fleet._members["worker"].ready
    lose(fleet, MOST_LOST - 1)
    lose(fleet, MOST_LOST, ready=True)
    assert told == []


def test_workers_whose_cores_others_use_are_told_once(fleet: RayFleet, caplog: pytest.LogCaptureFixture) -> None:
    """A Ray that is shared, or one that this process has started and uses itself: nothing would happen, in silence."""
    for name, begins in (("worker-1", 1.0), ("worker-2", None), ("worker-3", 50.0)):
        fleet._members[name] = module._Member(actor=None, node=NODE, poll=None, begins=begins)
    fleet._tell_waiting(60.0)
    assert caplog.messages == []
    for _ in range(2):
        fleet._tell_waiting(62.0)
    (message,) = caplog.messages
    assert message.startswith("1 of 3 workers have been waiting for cores of node for 60 s")
