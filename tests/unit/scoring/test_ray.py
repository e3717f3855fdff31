"""Connecting to Ray, room on nodes, and the supervision of workers. Only slow tests start Ray."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from graphkiln_backend.scoring import fleet as module
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.fleet import EMPTY_S, MAX_LOST, WAITING_S, Node, RayFleet, connect, node_check, room_of
from graphkiln_backend.scoring.messages import Blame, Ended, Event, NodeRefused, ScoreRequest
from graphkiln_backend.scoring.worker import WorkerActor

NODE = Node(id="n", name="node", cores=1, gpus=0)
HERE = version("graphkiln")


@pytest.mark.parametrize(
    ("address", "message"), [("ray://head:10001", "HOST:6379"), ("127.0.0.1:1", r"no Ray cluster .*127\.0\.0\.1:1")]
)
def test_unusable_address_is_refused(address: str, message: str) -> None:
    with pytest.raises(ScoringError, match=message):
        connect(address).__enter__()


@pytest.mark.parametrize(("message", "tries"), [("The current node timed out during startup.", 3), ("no space", 1)])
def test_start_of_ray_is_retried_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch, message: str, tries: int) -> None:
    tried: list[str] = []

    def fail(address: str, **_: object) -> None:
        tried.append(address)
        raise Exception(message)  # noqa: TRY002 - as Ray does

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(ScoringError, match=message):
        connect("").__enter__()
    assert tried == ["local"] * tries


@pytest.mark.parametrize("address", ["", "auto", "127.0.0.1:6379", "localhost:6379", "10.1.2.3:6379"])
def test_existing_connection_is_used(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_connection(monkeypatch)
    with connect(address):
        pass


@pytest.mark.parametrize("address", ["10.1.2.4:6379", "127.0.0.1:6380", "ray://head:10001"])
def test_connection_to_another_cluster_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_connection(monkeypatch)
    with pytest.raises(ScoringError, match=r"10\.1\.2\.3:6379"):
        connect(address).__enter__()


def pretend_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="10.1.2.3:6379"))


@pytest.mark.slow
def test_long_temporary_path_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a socket has at most 107 characters."""
    for length in (18, 60):
        parent = Path(tempfile.mkdtemp(prefix="t" * (length - len("/tmp/") - 8), dir="/tmp"))
        assert len(str(parent)) == length
        try:
            monkeypatch.setattr(tempfile, "tempdir", str(parent))
            with connect(""):
                assert ray.is_initialized()
            assert list(parent.iterdir()) == []
        finally:
            shutil.rmtree(parent)


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


def test_node_check(tmp_path: Path) -> None:
    check = node_check()
    assert check(HERE, str(tmp_path)) == ""
    assert check(HERE, "") == ""
    assert "install 'graphkiln[score]==9.9'" in check("9.9", "")
    assert f"cannot read {tmp_path / 'none'}: mount" in check(HERE, str(tmp_path / "none"))


def test_node_check_runs_where_graphkiln_is_not_installed() -> None:
    pickled = ray.cloudpickle.dumps(node_check())
    program = f"""
import importlib.metadata, pickle, sys
def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.version = missing
sys.modules["graphkiln_backend"] = None
print(pickle.loads({pickled!r})("1.0", ""))
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "it has no graphkiln in its Python environment" in printed


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def fleet(events: list[Event], monkeypatch: pytest.MonkeyPatch) -> RayFleet:
    monkeypatch.setattr(module, "living_nodes", lambda: [NODE])
    monkeypatch.setattr(ray, "kill", lambda _: None)
    request = ScoreRequest(source="in", model="/store/m", destination="out")
    return RayFleet(request, "configuration", on_gpu=False, report=events.append)


class Actor:
    """Returns names as references of calls."""

    def __getattr__(self, name: str) -> object:
        assert hasattr(WorkerActor, name)
        return SimpleNamespace(remote=lambda *_: f"{name} call")


def new_actor(*_: object) -> Actor:
    return Actor()


def add(fleet: RayFleet, name: str, *calls: str, **state: object) -> module._Member:
    member = module._Member(actor=Actor(), node=NODE, heartbeat="heartbeat", calls=set(calls), **state)  # type: ignore[arg-type]
    fleet._members[name] = member
    return member


def fail_calls(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def get(_: object) -> None:
        raise error

    monkeypatch.setattr(ray, "get", get)


def test_node_that_loses_all_starting_workers_is_refused(
    fleet: RayFleet, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_calls(monkeypatch, RayActorError(error_msg="no memory\nlong"))
    for number in range(MAX_LOST):
        assert events == []
        add(fleet, f"worker-{number}", "start")
        fleet._collect(f"worker-{number}", "start")
    (refused,) = events
    assert isinstance(refused, NodeRefused)
    assert refused.reason.endswith("before they were ready: no memory")
    with pytest.raises(ScoringError, match="no node can take part: node: 10 workers"):
        fleet._check_not_empty(0.0)


def test_node_that_cannot_be_checked_ends_the_run(fleet: RayFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_calls(monkeypatch, RayError("its memory is full\nlong"))
    fleet._admit(NODE, "check")
    fleet._checks["check"] = NODE  # it is checked again
    fleet._check_not_empty(fleet._last_not_empty + EMPTY_S - 1)
    with pytest.raises(ScoringError, match=r"600 s \(node could not be checked: its memory is full\)"):
        fleet._check_not_empty(fleet._last_not_empty + EMPTY_S + 1)


def test_workers_that_are_not_placed_are_logged_once(fleet: RayFleet, caplog: pytest.LogCaptureFixture) -> None:
    add(fleet, "worker-1", since=1.0)
    add(fleet, "worker-2", since=1.0, progress=0)
    for now in (60.0, 62.0, 63.0):
        fleet._move_waiting(now)
    (message,) = caplog.messages
    assert message.startswith("1 of 2 workers")


def test_worker_moves_from_a_busy_node_to_one_with_room(fleet: RayFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--workers 1` only one worker is started, on a node whose cores something else may use."""
    idle = replace(NODE, id="idle", name="idle")
    monkeypatch.setattr(module, "living_nodes", lambda: [NODE, idle])
    monkeypatch.setattr(module, "_on", lambda node: node)
    monkeypatch.setattr(ray, "remote", lambda _: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=new_actor)))
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
        (OutOfMemoryError("low on memory"), module.OUT_OF_MEMORY, Blame.ROWS),
        (RayActorError(), module.CRASHED, Blame.ROWS),
        (RayError("odd"), "its actor failed: odd", Blame.WORKER),
    ],
)
def test_end_of_a_worker_has_a_reason_and_its_pending_commits(
    fleet: RayFleet, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str, blame: Blame
) -> None:
    fail_calls(monkeypatch, error)
    add(fleet, "w", "compute 1", "commit 2", committing={"commit 2": 2}, ready=True)
    expected = Ended(worker="w", blame=blame, reason=reason, committing=frozenset([2]))
    assert fleet._collect("w", "compute 1") == expected
    assert fleet._members == {}


def test_hanging_worker_is_ended(fleet: RayFleet) -> None:
    now = time.monotonic()
    add(fleet, "hangs", "compute 1", since=now - 100, progress=7, ready=True)
    add(fleet, "idle", since=now - 100, progress=7, ready=True)
    busy = add(fleet, "busy", "compute 2", since=now, progress=7, ready=True)
    assert fleet._end_hanging(lambda _: 60.0) == [Ended(worker="hangs", blame=Blame.ROWS, reason="hung for 100 s")]
    fleet._last_hang_check -= 1000  # this process was suspended
    busy.since -= 1000
    assert fleet._end_hanging(lambda _: 60.0) == []
