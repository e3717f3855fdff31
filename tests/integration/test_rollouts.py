"""Rollouts on a real server: compare, give traffic, promote, abort; faults of the candidate; killed processes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import psutil
import pytest
import tritonclient.http
import zoo
from onnx import TensorProto, helper
from running import Server, Serving, StartServer, is_stub

import graphkiln
from graphkiln_backend.graph.errors import ClientError
from graphkiln_backend.server.rollouts import Gates, Phase, Progress, RolloutFolder, first_change
from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.wide]

SHAPE = ("batch", 3)
SERVING, CANDIDATE = 2.0, 3.0  # factors


def wrong_above(limit: float) -> onnx.ModelProto:
    """`y = x * 2`, and 1 more in the first column where `x` is above a limit there."""
    nodes = [
        helper.make_node("Mul", ["x", "factor"], ["scaled"]),
        helper.make_node("Greater", ["x", "limit"], ["above"]),
        helper.make_node("Cast", ["above"], ["bonus"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["bonus", "first"], ["extra"]),
        helper.make_node("Add", ["scaled", "extra"], ["y"]),
    ]
    constants = {
        "factor": np.float32(SERVING),
        "limit": np.float32(limit),
        "first": np.array([1, 0, 0], np.float32),
    }
    return zoo.model(nodes, [zoo.value("x", SHAPE)], [zoo.value("y", SHAPE)], constants)


def fails_above(limit: float) -> onnx.ModelProto:
    """`y = x * 2`, and an error for elements above a limit."""
    nodes = [
        helper.make_node("Mul", ["x", "factor"], ["scaled"]),
        helper.make_node("Greater", ["x", "limit"], ["above"]),
        helper.make_node("Cast", ["above"], ["index"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "index"], ["extra"]),
        helper.make_node("Add", ["scaled", "extra"], ["y"]),
    ]
    constants = {"factor": np.float32(SERVING), "limit": np.float32(limit), "table": np.zeros(1, np.float32)}
    return zoo.model(nodes, [zoo.value("x", SHAPE)], [zoo.value("y", SHAPE)], constants)


def hangs_above(limit: float) -> onnx.ModelProto:
    """`y = x * 2`; a loop of hours where an element is above a limit."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["go_in"], ["go_out"]), helper.make_node("MatMul", ["s_in", "unit"], ["s_out"])],
        "body",
        [
            zoo.value("i", (), TensorProto.INT64),
            zoo.value("go_in", (), TensorProto.BOOL),
            zoo.value("s_in", (256, 256)),
        ],
        [zoo.value("go_out", (), TensorProto.BOOL), zoo.value("s_out", (256, 256))],
    )
    nodes = [
        helper.make_node("Mul", ["x", "factor"], ["scaled"]),
        helper.make_node("Greater", ["x", "limit"], ["above"]),
        helper.make_node("Cast", ["above"], ["flags"], to=TensorProto.INT64),
        helper.make_node("ReduceMax", ["flags"], ["flag"], keepdims=0),
        helper.make_node("Mul", ["flag", "many"], ["rounds"]),
        helper.make_node("Loop", ["rounds", "", "unit"], ["state"], body=body),
        helper.make_node("ReduceSum", ["state"], ["sum"], keepdims=0),
        helper.make_node("Mul", ["sum", "nothing"], ["extra"]),
        helper.make_node("Add", ["scaled", "extra"], ["y"]),
    ]
    constants = {
        "factor": np.float32(SERVING),
        "limit": np.float32(limit),
        "many": np.int64(1 << 40),
        "unit": np.eye(256, dtype=np.float32),
        "nothing": np.float32(0),
    }
    return zoo.model(nodes, [zoo.value("x", SHAPE)], [zoo.value("y", SHAPE)], constants)


def wider() -> onnx.ModelProto:
    """`y` has twice as many columns."""
    nodes = [helper.make_node("Concat", ["x", "x"], ["y"], axis=1)]
    return zoo.model(nodes, [zoo.value("x", SHAPE)], [zoo.value("y", ("batch", 6))])


def publish(store: Path, version: int, proto: onnx.ModelProto) -> None:
    """Write a version elsewhere and rename it into place, as converters do."""
    prepared = store.parent / f"prepared-{version}"
    prepared.mkdir()
    (prepared / "model.onnx").write_bytes(proto.SerializeToString())
    prepared.rename(store / "swap" / str(version))


class Rollout:
    """A rollout of the model `swap` from version 1 to 2."""

    def __init__(self, root: Path, config: str = "") -> None:
        self.store, self.state = root / "store", root / "state"
        zoo.add(self.store, "swap", zoo.scale(SHAPE, SERVING), config)
        self.folder = RolloutFolder(self.state, self.store)

    @property
    def arguments(self) -> list[str | Path]:
        return ["--model-store", self.store, "--state", self.state]

    def begin(self, candidate: onnx.ModelProto, share: float = 1.0, gates: Gates | None = None) -> None:
        publish(self.store, 2, candidate)
        self.ask(share, gates)

    def ask(self, share: float = 1.0, gates: Gates | None = None) -> None:
        before = self.folder.read_wanted("swap")
        gates = gates or Gates()
        self.folder.write_wanted(first_change("swap", candidate=2, serving=1, share=share, gates=gates, before=before))

    def change(self, phase: Phase, share: float = 0.0) -> None:
        wanted = self.folder.read_wanted("swap")
        assert wanted
        self.folder.write_wanted(wanted.changed(phase, share))

    @property
    def progress(self) -> Progress:
        return self.folder.read_progress("swap") or Progress(model="swap", candidate=2, serving=1)

    def is_applied(self) -> bool:
        wanted, progress = self.folder.read_wanted("swap"), self.progress
        return bool(wanted) and (progress.applied_serial, progress.phase) == (wanted.serial, wanted.phase)

    def wait(self, server: Server, phase: Phase | None = None) -> Progress:
        """Wait until the server has applied the last change, by the user or by a gate, and its instances know it."""
        server.wait_until(lambda: self.is_applied() and phase in {None, self.progress.phase}, timeout_s=60)
        time.sleep(1.5)
        return self.progress


class Users(threading.Thread):
    """Send requests without a version, one after the other, until stopped; keep every answer."""

    def __init__(self, server: Server, *, version: str = "", grpc: bool = False, least: float = 0.0) -> None:
        super().__init__(daemon=True)
        self._url = server.grpc_url if grpc else server.url
        self._version = version
        self._least = np.float32(least)
        self.running = True
        self.factors: Counter[float] = Counter()
        self.errors: list[Exception] = []

    def run(self) -> None:
        generator = np.random.default_rng(0)
        with Client(self._url, timeout_s=30) as client:
            model = client.model("swap", version=self._version) if self._version else client.model("swap")
            while self.running:
                rows = self._least + generator.random((1, 3), np.float32)
                try:
                    found = model.infer({"x": rows})["y"]
                except ClientError as error:
                    self.errors.append(error)
                    continue
                self.factors[round(float(found[0, 1] / rows[0, 1]), 3)] += 1

    def __enter__(self) -> Users:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.running = False
        self.join(60)

    def ask(self, count: int) -> None:
        """Wait until so many more answers are there."""
        wanted = sum(self.factors.values()) + count
        deadline = time.monotonic() + 120
        while sum(self.factors.values()) < wanted:
            assert time.monotonic() < deadline, self.errors[-1:]
            time.sleep(0.02)


@pytest.fixture
def rollout(tmp_path: Path) -> Rollout:
    return Rollout(tmp_path)


@pytest.fixture
def server(rollout: Rollout, start_server: StartServer) -> Server:
    started: Server = start_server(*rollout.arguments)
    started.wait_until(lambda: "serving HTTP" in started.log)
    return started


def instances(server: Server, model: str) -> list[psutil.Process]:
    """Processes of a model's instances."""
    return [
        process
        for process in psutil.Process(server.process.pid).children(recursive=True)
        if is_stub(process) and any(f"/{model}/" in word for word in process.cmdline())
    ]


def classes(server: Server, model: str) -> set[int]:
    """Scheduling classes of all threads of a model's instances."""
    found = set()
    for process in instances(server, model):
        for thread in process.threads():
            with suppress(ProcessLookupError):
                found.add(os.sched_getscheduler(thread.id))
    return found


def test_an_equal_candidate_agrees_gets_traffic_and_is_promoted(rollout: Rollout, server: Server) -> None:
    rollout.begin(zoo.scale(SHAPE, SERVING))
    rollout.wait(server)
    with Users(server) as users, Users(server, grpc=True) as others:
        users.ask(300)
        others.ask(100)
        server.wait_until(lambda: rollout.progress.compared > 50 < rollout.progress.candidate_latency.total)
        seen = rollout.progress
        assert (seen.agreed, seen.disagreed, seen.failed) == (seen.compared, 0, 0)
        assert seen.serving_latency.p99 > 0 < seen.candidate_latency.p99
        (candidate,) = instances(server, "swap.candidate")
        assert os.sched_getscheduler(candidate.pid) == os.SCHED_IDLE
        assert os.SCHED_OTHER in classes(server, "swap.candidate")  # helpers of the stub: tritonserver waits for a sign
        assert os.SCHED_IDLE not in classes(server, "swap")
        rollout.change("traffic", 0.5)
        rollout.wait(server)
        users.ask(300)
        server.wait_until(lambda: rollout.progress.answered > 50)
        server.wait_until(lambda: os.SCHED_IDLE not in classes(server, "swap.candidate"))
        rollout.change("promoted")
        rollout.wait(server)
        users.ask(50)
    assert (users.errors, others.errors) == ([], [])
    assert server.status("/v2/models/swap/versions/2/ready") == 200
    assert server.status("/v2/models/swap.candidate/ready") != 200
    assert server.status("/v2/health/ready") == 200
    assert instances(server, "swap.candidate") == []


@pytest.mark.parametrize("named", [True, False])
def test_traffic_is_a_share_and_a_retry_meets_the_same_version(rollout: Rollout, server: Server, named: bool) -> None:
    share = 0.3
    rollout.begin(zoo.scale(SHAPE, CANDIDATE), share)
    rollout.wait(server)
    rollout.change("traffic", share)
    rollout.wait(server)
    client = tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http_port}")

    def factor(number: int, rows: np.ndarray) -> float:
        tensor = tritonclient.http.InferInput("x", [1, 3], "FP32")
        tensor.set_data_from_numpy(rows)
        answer = client.infer("swap", [tensor], request_id=f"request-{number}" if named else "")
        return round(float(answer.as_numpy("y")[0, 0] / rows[0, 0]), 3)

    rows = np.random.default_rng(1).random((400, 1, 3), np.float32)
    first, again = ([factor(number, each) for number, each in enumerate(rows)] for _ in range(2))
    client.close()
    assert first == again
    moved = first.count(CANDIDATE)
    assert moved + first.count(SERVING) == len(first)
    assert abs(moved / len(first) - share) < 4 * (share * (1 - share) / len(first)) ** 0.5


def test_a_client_that_names_a_version_is_not_moved(rollout: Rollout, server: Server) -> None:
    rollout.begin(zoo.scale(SHAPE, CANDIDATE))
    rollout.wait(server)
    rollout.change("traffic", 1.0)
    rollout.wait(server)
    with Users(server, version="1") as pinned, Users(server, version="1", grpc=True) as others, Users(server) as users:
        pinned.ask(100)
        others.ask(100)
        users.ask(100)
    assert {*pinned.factors} == {*others.factors} == {SERVING}
    assert users.factors[CANDIDATE] > 50
    assert (pinned.errors, others.errors, users.errors) == ([], [], [])


def test_a_wrong_candidate_is_found_and_never_promoted(rollout: Rollout, server: Server) -> None:
    gates = Gates(agree=0.995, requests=3000, then=(0.1, 1.0))
    rollout.begin(wrong_above(0.98), gates=gates)
    with Users(server) as users, Users(server) as others:
        server.wait_until(lambda: rollout.progress.phase == "aborted", timeout_s=120)
    assert rollout.progress.disagreed > 0
    assert rollout.progress.examples[0].request
    assert "agree" in rollout.progress.reason or "decision" in rollout.progress.reason
    assert {*users.factors, *others.factors} == {SERVING}
    assert (users.errors, others.errors) == ([], [])


def test_an_equal_candidate_is_promoted_by_itself(rollout: Rollout, server: Server) -> None:
    rollout.begin(zoo.scale(SHAPE, SERVING), gates=Gates(agree=0.9, requests=200, then=(0.5, 1.0)))
    with Users(server) as users:
        server.wait_until(lambda: rollout.progress.phase == "promoted", timeout_s=120)
        users.ask(50)
    assert users.errors == []
    assert server.status("/v2/models/swap/versions/2/ready") == 200


FAULTY: dict[str, Any] = {"fails": fails_above(100), "hangs": hangs_above(100)}
# A graph with a loop that counts all rows does not support batches.
UNBATCHED = """input { name: "x" data_type: TYPE_FP32 dims: [-1, 3] }
output { name: "y" data_type: TYPE_FP32 dims: [-1, 3] }"""


@pytest.mark.parametrize("phase", ["shadow", "traffic"])
@pytest.mark.parametrize("fault", ["fails", "hangs", "is killed", "is stopped"])
def test_a_faulty_candidate_costs_no_answer_and_is_aborted(
    tmp_path: Path, start_server: StartServer, fault: str, phase: Phase
) -> None:
    rollout = Rollout(tmp_path, UNBATCHED)
    server = start_server(*rollout.arguments)
    server.wait_until(lambda: "serving HTTP" in server.log)
    rollout.begin(FAULTY.get(fault) or zoo.scale(SHAPE, SERVING))
    rollout.wait(server)
    if phase == "traffic":
        rollout.change(phase, 1.0)
        rollout.wait(server)
    server.wait_until(lambda: len(instances(server, "swap.candidate")) == 1)  # that of the shadow may end slowly
    (candidate,) = instances(server, "swap.candidate")
    with Users(server, least=0.0 if fault.startswith("is") else 200.0) as users:
        users.ask(100 if fault.startswith("is") else 3)
        if fault == "is killed":
            candidate.kill()
        elif fault == "is stopped":
            candidate.suspend()
        server.wait_until(lambda: rollout.progress.phase == "aborted", timeout_s=60)
        users.ask(50)
    assert rollout.progress.reason.startswith("the candidate")
    assert (users.errors, {*users.factors}) == ([], {SERVING})
    assert "restarting the server" not in server.log
    server.wait_until(lambda: server.status("/v2/models/swap.candidate/ready") != 200)
    server.wait_until(lambda: server.status("/v2/health/ready") == 200)
    server.wait_until(lambda: instances(server, "swap.candidate") == [])


@pytest.mark.parametrize(
    ("candidate", "config", "reason"),
    [
        (wider(), "", "signature"),
        (zoo.scale(SHAPE, SERVING), "sequence_batching { }", "sequences"),
        (zoo.scale(SHAPE, SERVING), "version_policy { specific { versions: 1 } }", "version_policy"),
        (zoo.endless(), "", "not served"),
    ],
)
def test_a_rollout_that_cannot_be_is_refused(
    tmp_path: Path, start_server: StartServer, candidate: onnx.ModelProto, config: str, reason: str
) -> None:
    rollout = Rollout(tmp_path, config)
    limit = ["--load-deadline=5"] if reason == "not served" else []
    server = start_server(*rollout.arguments, *limit)
    server.wait_until(lambda: "serving HTTP" in server.log)
    rollout.begin(candidate)
    assert reason in rollout.wait(server, "aborted").reason
    assert server.status("/v2/models/swap/versions/1/ready") == 200
    assert server.status("/v2/health/ready") == 200


def test_in_explicit_mode_it_is_refused(rollout: Rollout, start_server: StartServer) -> None:
    server = start_server(*rollout.arguments, "--model-control-mode=explicit", "--load-model=swap")
    server.wait_until(lambda: "serving HTTP" in server.log)
    rollout.begin(zoo.scale(SHAPE, SERVING))
    assert "explicit" in rollout.wait(server, "aborted").reason


def test_poll_mode_leaves_the_candidate_to_the_rollout(rollout: Rollout, start_server: StartServer) -> None:
    server = start_server(*rollout.arguments, "--model-control-mode=poll", "--repository-poll-secs=1")
    server.wait_until(lambda: "serving HTTP" in server.log)
    rollout.ask()
    server.wait_until(lambda: "waiting for version 2" in rollout.progress.reason)
    publish(rollout.store, 2, zoo.scale(SHAPE, CANDIDATE))
    rollout.wait(server)
    time.sleep(3)
    assert server.status("/v2/models/swap/versions/1/ready") == 200
    assert server.status("/v2/models/swap/versions/2/ready") != 200
    rollout.change("aborted")
    rollout.wait(server)
    time.sleep(3)
    assert server.status("/v2/models/swap/versions/2/ready") != 200
    publish(rollout.store, 3, zoo.scale(SHAPE, 5))
    server.wait_until(lambda: server.status("/v2/models/swap/versions/3/ready") == 200)


def killed(server: Server, whom: str) -> None:
    if whom == "supervisor":
        processes = psutil.Process(server.process.pid).children(recursive=True)
        server.process.kill()
        server.process.wait()
        psutil.wait_procs(processes, timeout=30)  # the guard ends them
        for left in server.temporary.iterdir():
            shutil.rmtree(left)
        return
    processes = psutil.Process(server.process.pid).children(recursive=True)
    if whom == "tritonserver":
        chosen = [each for each in processes if each.name() == "tritonserver"]
    else:
        chosen = [each for each in processes if is_stub(each)]
    for each in random.Random(0).sample(chosen, min(1, len(chosen))):
        os.kill(each.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["supervisor", "tritonserver", "instance"])
@pytest.mark.parametrize("phase", ["shadow", "traffic", "promoted", "aborted"])
@pytest.mark.parametrize("after_s", [0.0, 0.7, 2.0])
def test_after_kill_9_the_state_is_the_one_asked_for(tmp_path: Path, whom: str, phase: Phase, after_s: float) -> None:
    rollout = Rollout(tmp_path)
    with Serving(tmp_path, *rollout.arguments) as server:
        server.wait_until(lambda: "serving HTTP" in server.log)
        rollout.begin(zoo.scale(SHAPE, CANDIDATE), 0.5)
        if phase != "shadow":
            rollout.wait(server)
            rollout.change(phase, 1.0 if phase == "traffic" else 0.0)
        time.sleep(after_s)
        killed(server, whom)
        if whom != "supervisor":
            _check_state(rollout, server, phase)
    if whom == "supervisor":
        with Serving(tmp_path, *rollout.arguments) as again:
            again.wait_until(lambda: "serving HTTP" in again.log)
            _check_state(rollout, again, phase)


def _check_state(rollout: Rollout, server: Server, phase: Phase) -> None:
    time.sleep(1)  # until the death is noticed
    server.wait_until(lambda: rollout.is_applied() and server.status("/v2/health/ready") == 200, timeout_s=90)

    def is_shown() -> bool:
        return server.status("/v2/models/swap.candidate/ready") == 200

    def is_settled() -> bool:
        wanted = rollout.folder.read_wanted("swap")
        return wanted is not None and is_shown() == wanted.is_running

    server.wait_until(is_settled, timeout_s=60)  # a restarted server answers before its candidate is loaded again
    time.sleep(3)
    server.wait_until(is_settled, timeout_s=60)
    wanted = rollout.folder.read_wanted("swap")
    assert wanted
    if wanted.phase != phase:  # an instance of the candidate itself was killed
        assert (wanted.phase, rollout.progress.phase) == ("aborted", "aborted")
        assert any(words in wanted.reason for words in ("failed", "not served", "could not be promoted"))
    server.wait_until(lambda: server.status("/v2/health/ready") == 200)
    with Users(server) as users:
        users.ask(50)
    expected = {"traffic": {CANDIDATE}, "promoted": {CANDIDATE}}.get(wanted.phase, {SERVING})
    assert (users.errors, {*users.factors}) == ([], expected), server.log


# Inputs as clients send them, the graph, and the configuration.
KINDS: dict[str, tuple[np.ndarray, onnx.ModelProto, str]] = {
    "fp16": (np.ones((2, 3), np.float16), zoo.identity(SHAPE, TensorProto.FLOAT16), "max_batch_size: 8"),
    "bf16": (np.ones((2, 3), ml_dtypes.bfloat16), zoo.identity(SHAPE, TensorProto.BFLOAT16), "max_batch_size: 8"),
    "text": (np.array([[b"", "gr\u00fcn".encode()]], object), zoo.identity(("batch", 2), TensorProto.STRING), ""),
    "empty": (np.ones((0, 3), np.float32), zoo.identity(("rows", 3)), UNBATCHED),
    "scalar": (np.ones(1, np.float32), zoo.identity(()), "max_batch_size: 0"),
    "reshaped": (
        np.ones((2, 6), np.float32),
        zoo.identity(("batch", 2, 3)),
        "".join(
            f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: [6] reshape {{ shape: [2, 3] }} }}\n'
            for kind, name in (("input", "x"), ("output", "y"))
        )
        + "max_batch_size: 8",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_every_kind_are_compared_and_moved(tmp_path: Path, start_server: StartServer, kind: str) -> None:
    """Over HTTP and shared memory, with requested outputs."""
    x, graph, config = KINDS[kind]
    store, state = tmp_path / "store", tmp_path / "state"
    zoo.add(store, "m", graph, config)
    server = start_server("--model-store", store, "--state", state)
    server.wait_ready()
    zoo.add(store, "m", graph, config, version=2)
    rollout = graphkiln.rollout(store / "m", state=state)

    def ask(client: Client) -> None:
        found = client.model("m").infer({"x": x}, outputs=["y"])["y"]
        assert (found.dtype, found.shape, found.tolist()) == (x.dtype, x.shape, x.tolist())

    rollout.start(2, shadow=1.0)
    with Client(server.url) as client:
        for _ in range(10):
            ask(client)
            if kind not in {"text", "empty"}:
                with client.shared_memory() as sharing:
                    ask(sharing)
            time.sleep(0.3)
        server.wait_until(lambda: rollout.status().progress.compared >= 3, timeout_s=30)
        seen = rollout.status().progress
        assert (seen.agreed, seen.failed, seen.failure) == (seen.compared, 0, "")
        rollout.traffic(1.0)
        time.sleep(1.5)
        for _ in range(5):
            ask(client)
        server.wait_until(lambda: rollout.status().progress.answered >= 3, timeout_s=30)
    assert rollout.status().progress.failed == 0
