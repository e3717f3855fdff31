"""An instance's part in a rollout: which requests it copies and gives away, and what it counts."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_kserve import Arrays, FakeKserve
from fake_triton import InferenceRequest
from waiting import wait_until

from graphkiln_backend.graph.contract import Contract
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.repository.config import ModelConfigProto, guard_batch, pb
from graphkiln_backend.triton import rollout as module
from graphkiln_backend.triton.request_position import position_of
from graphkiln_backend.triton.rollout import Rollout
from graphkiln_backend.triton.rollout_files import Assignment, InstanceTally, read_tallies


class Executor:
    """`y = x * 2`; negative values are errors."""

    def execute(self, request: Any) -> Any:
        (tensor,) = request.inputs()
        array = tensor.as_numpy()
        return ExecutionError("negative") if np.any(array < 0) else {"y": array.reshape(-1, 3) * 2}

    def execute_batch(self, requests: Any) -> list[Any]:
        return [self.execute(request) for request in requests]


class Candidate:
    """The candidate, behind a server.

    Attributes:
        factor: Its factor.
        shape: Shape of its answers.
        error: Its error, or empty.
    """

    def __init__(self) -> None:
        self.factor, self.shape, self.error = 2.0, (-1, 3), ""
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.server = FakeKserve(self._compute)

    def _compute(self, inputs: Arrays) -> Arrays:
        assert self.may_answer.wait(20)
        if self.error:
            raise ValueError(self.error)
        return {"y": inputs["x"].reshape(self.shape) * np.float32(self.factor)}

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the inputs it was sent."""
        assert {name for name, _ in self.server.asked} <= {"m.candidate"}
        return [inputs["x"].shape for _, inputs in self.server.asked]


def config() -> ModelConfigProto:
    made = ModelConfigProto(name="m", max_batch_size=8)
    for tensors, name in ((made.input, "x"), (made.output, "y")):
        tensors.add(name=name, data_type=pb.TYPE_FP32, dims=[3])
    guard_batch(made)
    return made


@pytest.fixture
def candidate() -> Iterator[Candidate]:
    made = Candidate()
    with made.server:
        yield made
        made.may_answer.set()


def assignment(candidate: Candidate, serial: int = 1, **fields: Any) -> Assignment:
    host, port = candidate.server.address.local_address
    return Assignment(serial=serial, candidate=2, host=host, port=port, headers={"key": "secret"}, **fields)


@pytest.fixture
def begin(tmp_path: Path, candidate: Candidate) -> Iterator[Callable[..., Rollout]]:
    begun: list[Rollout] = []

    def make(**assigned: Any) -> Rollout:
        rollout = Rollout(
            model="m",
            instance="m_0",
            folder=tmp_path,
            config=config(),
            contract=Contract(),
            executor=Executor,
            computing=threading.Lock(),
            assignment=assignment(candidate, **assigned),
        )
        begun.append(rollout)
        return rollout

    yield make
    candidate.may_answer.set()
    for each in begun:
        each.close()


def request(value: float = 1.0, request_id: str = "7", parameters: str = "") -> InferenceRequest:
    rows = np.full((1, 1, 3), value, np.float32)  # with the dimension of `guard_batch`
    return InferenceRequest({"x": rows}, request_id=request_id, parameters=parameters)


def counts(rollout: Rollout, folder: Path, serial: int = 1) -> Any:
    rollout.report()
    return read_tallies(folder, "m", serial)


def test_copies_are_compared(begin: Callable[..., Rollout], candidate: Candidate, tmp_path: Path) -> None:
    rollout = begin(compared=1.0)
    responses = rollout.execute([request(value) for value in (1.0, 2.0)])
    assert [response.outputs["y"][0, 0] for response in responses] == [2.0, 4.0]
    wait_until(lambda: counts(rollout, tmp_path).compared == 2)
    candidate.factor = 3.0
    rollout.execute([request(request_id="8")])
    wait_until(lambda: counts(rollout, tmp_path).compared == 3)
    seen = counts(rollout, tmp_path)
    assert (seen.agreed, seen.disagreed, seen.failed, seen.dropped) == (2, 1, 0, 0)
    assert [example.request for example in seen.examples] == ["8"]
    assert candidate.shapes == [(1, 3)] * 3  # as clients send it
    assert seen.serving_latency.total == 1  # of the request that was computed alone


def test_failed_requests_are_not_copied(begin: Callable[..., Rollout], candidate: Candidate) -> None:
    (response,) = begin(compared=1.0).execute([request(-1.0)])
    assert response.error
    assert candidate.shapes == []


def test_a_full_queue_drops_copies(begin: Callable[..., Rollout], candidate: Candidate, tmp_path: Path) -> None:
    rollout = begin(compared=1.0)
    candidate.may_answer.clear()
    for _ in range(20):
        rollout.execute([request()])
    assert counts(rollout, tmp_path).dropped >= 11
    wait_until(lambda: counts(rollout, tmp_path).waiting_s > 0)
    candidate.may_answer.set()
    wait_until(lambda: counts(rollout, tmp_path).compared == 20 - counts(rollout, tmp_path).dropped)
    assert counts(rollout, tmp_path).waiting_s == 0


def test_a_failing_candidate_costs_copies(begin: Callable[..., Rollout], candidate: Candidate, tmp_path: Path) -> None:
    rollout = begin(compared=1.0)
    candidate.error = "no memory"
    rollout.execute([request()])
    wait_until(lambda: counts(rollout, tmp_path).failed == 1)
    assert counts(rollout, tmp_path).failure == "no memory"


@pytest.mark.parametrize("share", ["compared", "answered"])
@pytest.mark.parametrize("shape", [(1, 6), (3, 2), (6,), (1, 2, 3)])
def test_answers_of_another_shape_are_failures(
    begin: Callable[..., Rollout], candidate: Candidate, tmp_path: Path, share: str, shape: tuple[int, ...]
) -> None:
    rollout = begin(deadline_s=20.0, **{share: 1.0})
    candidate.shape = shape
    (response,) = rollout.execute([InferenceRequest({"x": np.ones((2, 1, 3), np.float32)}, request_id="7")])
    assert response.outputs["y"].shape == (2, 3)
    wait_until(lambda: counts(rollout, tmp_path).failed == 1)
    assert f"shape {list(shape)}, expected [2, 3]" in counts(rollout, tmp_path).failure


def test_the_candidate_answers(begin: Callable[..., Rollout], candidate: Candidate, tmp_path: Path) -> None:
    rollout = begin(answered=1.0, deadline_s=20.0)
    candidate.factor = 3.0
    responses = rollout.execute([request(1.0), request(2.0)])
    assert [response.outputs["y"][0, 0] for response in responses] == [3.0, 6.0]
    assert counts(rollout, tmp_path).answered == 2


@pytest.mark.parametrize("parameters", ['{"pinned_version": "1"}', '{"contract": "another"}'])
def test_some_requests_are_never_moved(begin: Callable[..., Rollout], candidate: Candidate, parameters: str) -> None:
    candidate.factor = 3.0
    (response,) = begin(answered=1.0).execute([request(parameters=parameters)])
    assert response.outputs["y"][0, 0] == 2.0
    assert candidate.shapes == []


def test_a_late_or_failed_answer_is_computed_here(
    begin: Callable[..., Rollout], candidate: Candidate, tmp_path: Path
) -> None:
    rollout = begin(answered=1.0, deadline_s=0.5)
    candidate.error = "it is broken"
    responses = rollout.execute([request(1.0), request(-1.0)])
    assert responses[0].outputs["y"][0, 0] == 2.0
    assert responses[1].error
    candidate.may_answer.clear()
    begun = time.monotonic()
    for _ in range(4):  # the others were queued while the first one waited
        (response,) = rollout.execute([request()])
        assert response.outputs["y"][0, 0] == 2.0
    assert time.monotonic() - begun < 1.0
    seen = counts(rollout, tmp_path)
    assert (seen.failed, seen.answered) == (2, 0)  # the invalid request fails here, too


def test_requests_larger_than_the_server_takes_stay_here(
    begin: Callable[..., Rollout], candidate: Candidate, tmp_path: Path
) -> None:
    rollout = begin(answered=0.5, compared=0.5, deadline_s=20.0, most_bytes=module._HEADER_BYTES + 11)
    rollout.execute([request(request_id=str(number)) for number in range(20)])
    seen = counts(rollout, tmp_path)
    assert candidate.shapes == []
    assert (seen.answered, seen.failed) == (0, 0)
    assert seen.dropped > 0


def test_threads_and_connections_are_kept(begin: Callable[..., Rollout], candidate: Candidate) -> None:
    rollout = begin(answered=1.0, deadline_s=20.0)
    for _ in range(20):
        rollout.execute([request(), request()])
    assert len(candidate.shapes) == 40
    assert candidate.server.connections <= 2
    assert candidate.server.headers["key"] == "secret"


def test_a_rollout_that_ends_while_requests_are_moved_costs_none(
    begin: Callable[..., Rollout], candidate: Candidate
) -> None:
    rollout = begin(answered=1.0, deadline_s=20.0)
    candidate.may_answer.clear()
    with ThreadPoolExecutor(1) as users:
        answer = users.submit(rollout.execute, [request()])
        wait_until(lambda: candidate.server.connections == 1)
        rollout.close()
        assert answer.result(10)[0].outputs["y"][0, 0] == 2.0
    assert rollout.execute([request()])[0].outputs["y"][0, 0] == 2.0


def test_after_failures_in_a_row_the_candidate_is_asked_rarely(
    begin: Callable[..., Rollout], candidate: Candidate, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = begin(answered=1.0, deadline_s=20.0)
    candidate.error = "it is broken"
    for _ in range(20):
        (response,) = rollout.execute([request()])
        assert response.outputs["y"][0, 0] == 2.0
    assert len(candidate.shapes) == 4  # three, and then one a second
    monkeypatch.setattr(module, "_RETRY_S", 0.0)
    candidate.error = ""
    for _ in range(3):
        rollout.execute([request()])
    assert len(candidate.shapes) == 7


def test_counts_begin_anew_with_another_assignment(
    begin: Callable[..., Rollout], candidate: Candidate, tmp_path: Path
) -> None:
    rollout = begin(answered=1.0, deadline_s=20.0)
    rollout.execute([request()])
    assert counts(rollout, tmp_path).answered == 1
    rollout.assign(assignment(candidate, serial=2, answered=1.0, deadline_s=20.0))
    rollout.execute([request()])
    assert (counts(rollout, tmp_path).answered, counts(rollout, tmp_path, 2).answered) == (0, 1)


def test_a_million_requests_are_chosen_evenly() -> None:
    share, total = 0.01, 1_000_000
    chosen = sum(position_of(f"request-{number}", {}, b"rollout") < share for number in range(total))
    assert abs(chosen - share * total) < 4 * math.sqrt(total * share * (1 - share))


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, object])
def test_requests_without_an_id_are_chosen_by_their_content(dtype: Any) -> None:
    generator = np.random.default_rng(0)
    contents = [
        np.array([[b"%d" % number]], object)
        if dtype is object
        else generator.integers(0, 255, (1, 64, 64)).astype(dtype)
        for number in range(1000)
    ]
    first, again = ([position_of("", {"x": content}, b"rollout") for content in contents] for _ in range(2))
    assert first == again
    assert len({*first}) == 1000
    assert 0.4 < np.mean(np.array(first) < 0.5) < 0.6


def test_tallies_of_other_changes_and_models_do_not_count(tmp_path: Path) -> None:
    for name, serial in (("m", 1), ("m", 2), ("n", 1), ("m.candidate", 1)):
        tally = InstanceTally(model=name, serial=serial, compared=1, agreed=1)
        module.write_file(tmp_path / f"{name}_{serial}.1.tally", tally)
    (tmp_path / "torn.1.tally").write_text("{")
    assert read_tallies(tmp_path, "m", 1).compared == 2
