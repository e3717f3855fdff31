"""An instance's part in a rollout: copy requests to the candidate and compare, or let it answer a share of them.

Imported while a rollout of the instance's model is active only. Which requests are chosen depends on the request alone
(its id, else its content), so that a retry meets the same version. Copies are made once the answers are there, and sent
by a thread, one at a time; a copy that finds the queue full is dropped. A request that the candidate does not answer in
time is computed here.

The candidate is asked over Triton's HTTP, not by `InferenceRequest.exec` (BLS): stubs of Triton 24.10
can be killed by segmentation faults in it, and with them the requests of users. BLS also goes through the locks of the
shared-memory region of this instance. Over HTTP the two processes share none: the locks of the candidate's own region
are taken by its stub and by the thread of tritonserver that drives it, so that a candidate that gets no processor time
while it holds one delays nothing but its own answers.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Protocol

import numpy as np
import triton_python_backend_utils as pb_utils

from graphkiln_backend.graph.contract import PINNED_PARAMETER, REQUEST_PARAMETER, Contract
from graphkiln_backend.graph.decoding import encode_json
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ExecutionError, GraphkilnError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.proof.answers import AnswerComparison, limits_between
from graphkiln_backend.repository.config import ModelConfigProto
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.files import write_whole
from graphkiln_backend.triton.executor import InferenceRequest, Outputs, Result
from graphkiln_backend.triton.features import Feature, TritonFeatures
from graphkiln_backend.triton.request_position import position_of
from graphkiln_backend.triton.responses import to_response, to_tensor
from graphkiln_backend.triton.rollout_files import (
    Assignment,
    Example,
    InstanceTally,
    candidate_name,
    tally_path,
    write_file,
)
from graphkiln_backend.triton.served_model import Reshapes, ServedModel, size_in_request
from graphkiln_backend.triton.snapshot import read_snapshot
from graphkiln_backend.triton.tensors import to_array

_log = logging.getLogger("graphkiln.triton")

ANSWERED_BY = "answered_by_version"  # response parameter

_QUEUE = 8  # copies that wait
_MOST_EXAMPLES = 20
_OPEN_AFTER = 3  # failures in a row: then the candidate gets a request a second
_RETRY_S = 1.0
_MOST_WAITING = 16  # requests of users that wait for the candidate, or were given up
_CLOSE_S = 2.0
_HEADER_BYTES = 64 << 10  # of a request besides its tensors
_COPY_S = 600.0  # for an answer to a copy: a candidate without processor time is late, and harms no user

Tensors = Mapping[str, AnyArray]


class Executing(Protocol):
    """The part of the instance's executor that is used."""

    def execute(self, request: Any) -> Result:
        """Execute a single request."""
        ...

    def execute_batch(self, requests: Sequence[Any]) -> list[Result]:
        """Execute requests."""
        ...


@dataclass(frozen=True, slots=True)
class _Copy:
    request_id: str
    inputs: Tensors
    outputs: Outputs


class Rollout(Closeable):
    """Execute the requests of an instance while a rollout of its model is active.

    Args:
        model: Name of the model.
        instance: Triton's name of the instance.
        folder: Folder of status files.
        config: Configuration of the model.
        contract: Contract of the instance's version.
        executor: Returns the instance's executor.
        computing: Held around each batch.
        assignment: What to do.
    """

    def __init__(
        self,
        *,
        model: str,
        instance: str,
        folder: Path,
        config: ModelConfigProto,
        contract: Contract,
        executor: Callable[[], Executing],
        computing: AbstractContextManager[object],
        assignment: Assignment,
    ) -> None:
        self._model = model
        self._path = tally_path(folder, instance, os.getpid())
        tensors = (*config.input, *config.output)
        self._types = {tensor.name: DType.from_config(tensor.data_type) for tensor in tensors}
        self._reshapes = Reshapes(config)
        self._dims = {tensor.name: tuple(tensor.dims) for tensor in config.output}
        self._batched = config.max_batch_size > 0
        self._candidate = ServedModel((assignment.host, assignment.port), assignment.headers, candidate_name(model))
        self._contract = contract
        self._executor = executor
        self._computing = computing
        self._assignment = assignment
        self._tells = TritonFeatures.of_this_stub().has(Feature.RESPONSE_PARAMETERS)
        statuses = read_snapshot(folder).statuses.values()
        found = [each.precision for each in statuses if each.model in {model, candidate_name(model)}]
        precisions = [Precision(text) for text in found if text in [*Precision]]
        self._comparison = AnswerComparison(contract, limits_between(precisions))
        self._lock = threading.Lock()  # of the tally
        self._tally = InstanceTally(model=model, serial=assignment.serial)
        self._written = b""
        self._waiting = 0  # users' requests at the candidate
        self._paused_at = 0.0  # when the candidate began to get no requests of users
        self._copied_at = 0.0  # when the copy under way was sent
        self._copies: Queue[_Copy] = Queue(_QUEUE)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._compare_copies, name="graphkiln-rollout", daemon=True)
        self._thread.start()
        self._moving = ThreadPoolExecutor(_MOST_WAITING, thread_name_prefix="graphkiln-moved")

    def assign(self, assignment: Assignment) -> None:
        """Do something else from now on; counts begin anew."""
        with self._lock:
            self._assignment = assignment
            self._tally = InstanceTally(model=self._model, serial=assignment.serial)

    def report(self) -> None:
        """Write the counts if there are new ones.

        Raises:
            OSError: They cannot be written.
        """
        with self._lock:
            begun = self._copied_at
            self._tally.waiting_s = time.monotonic() - begun if begun else 0.0
            content = encode_json(self._tally).encode()
        if content != self._written:
            write_whole(self._path, content)
            self._written = content

    def close(self) -> None:
        """Stop comparing; requests that are under way are given up."""
        self._closing.set()
        self._candidate.close()
        self._thread.join(_CLOSE_S)  # the pool ends with this object: `execute` may be running
        with suppress(OSError):
            self.report()

    def execute(self, requests: Sequence[InferenceRequest]) -> list[Any]:
        """Compute a response for every request, like `TritonPythonModel.execute`."""
        assignment, candidate = self._assignment, {}
        marks = [self._position(request) for request in requests]
        if assignment.answered:
            for index, request in enumerate(requests):
                if marks[index] < assignment.answered and (asked := self._give_away(request, assignment)):
                    candidate[index] = asked
        own = [index for index in range(len(requests)) if index not in candidate]
        results: dict[int, Result] = self._compute([requests[index] for index in own], own) if own else {}
        answered: set[int] = set()
        late: list[int] = []
        for index, asked in candidate.items():
            if (outputs := self._take(asked)) is not None:
                results[index] = outputs
                answered.add(index)
            else:
                late.append(index)
        if late:
            results |= self._compute([requests[index] for index in late], late)
            self._count_failures([candidate[index] for index in late], [results[index] for index in late])
        responses = [self._respond(results[i], requests[i], i in answered) for i in range(len(requests))]
        limit = assignment.answered + assignment.compared
        for index in own:
            result = results[index]
            if assignment.answered <= marks[index] < limit and not isinstance(result, GraphkilnError):
                self._copy(requests[index], result)
        return responses

    def _position(self, request: InferenceRequest) -> float:
        request_id = request.request_id()
        return position_of(request_id, {} if request_id else self._inputs(request), b"rollout")

    def _compute(self, requests: Sequence[InferenceRequest], indices: Sequence[int]) -> dict[int, Result]:
        executor = self._executor()
        with self._computing:
            begun = time.monotonic()
            results = [executor.execute(requests[0])] if len(requests) == 1 else executor.execute_batch(requests)
            seconds = time.monotonic() - begun
        if len(requests) == 1 and not isinstance(results[0], GraphkilnError):
            with self._lock:
                self._tally.serving_latency.add(seconds)
        return dict(zip(indices, results, strict=True))

    def _respond(self, result: Result, request: InferenceRequest, answered: bool) -> Any:
        if not (answered and self._tells) or isinstance(result, GraphkilnError):
            return to_response(result, request)
        tensors = [to_tensor(name, array) for name, array in result.items()]
        return pb_utils.InferenceResponse(tensors, parameters={ANSWERED_BY: str(self._assignment.candidate)})

    def _inputs(self, request: InferenceRequest) -> dict[str, AnyArray]:
        return {tensor.name(): to_array(tensor, self._types.get(tensor.name())) for tensor in request.inputs()}

    # Shadow.

    def _copy(self, request: InferenceRequest, outputs: Outputs) -> None:
        if self._copies.full() or not self._fits(arrays := self._inputs(request)):
            self._count_dropped(self._tally.serial)
            return
        inputs = {name: array.copy() for name, array in arrays.items()}
        answers = {name: np.array(array, ndmin=1) for name, array in outputs.items()}  # Triton has no scalars
        # This thread is the only one that fills the queue.
        self._copies.put_nowait(_Copy(request.request_id(), inputs, answers))

    def _fits(self, inputs: Tensors) -> bool:
        """False for inputs that Triton's HTTP would refuse."""
        most = self._assignment.most_bytes
        return not most or _HEADER_BYTES + sum(map(size_in_request, inputs.values())) <= most

    def _compare_copies(self) -> None:
        """Send copies to the candidate, one at a time; main function of the thread."""
        while not self._closing.is_set():
            try:
                copy = self._copies.get(timeout=0.2)
            except Empty:
                continue
            serial = self._assignment.serial
            self._copied_at = time.monotonic()
            try:
                outputs = self._ask(copy.inputs, [*copy.outputs], copy.request_id, self._copied_at + _COPY_S)
                self._copied_at = 0.0
                self._count_comparison(copy, outputs, serial)
            except TimeoutError:
                self._count_dropped(serial)
            except (GraphkilnError, OSError, HTTPException) as error:
                self._count_failure(str(error), serial)
            except Exception as error:  # noqa: BLE001 - an error costs a copy, never the thread
                _log.warning("a copy cannot be compared", exc_info=error)
                self._count_failure(str(error), serial)
            self._copied_at = 0.0

    def _count_comparison(self, copy: _Copy, outputs: Outputs, serial: int) -> None:
        decision = self._comparison.decide(copy.outputs, outputs)
        with self._lock:
            tally = self._tally
            if tally.serial != serial:
                return
            tally.compared += 1
            tally.failed_in_a_row = 0
            setattr(tally, decision.outcome, getattr(tally, decision.outcome) + 1)
            if decision.outcome == "disagreed":
                example = Example(
                    request=copy.request_id[:200], serving=decision.first, candidate=decision.second, at=time.time()
                )
                tally.examples = (*tally.examples, example)[-_MOST_EXAMPLES:]

    # Traffic.

    def _give_away(self, request: InferenceRequest, assignment: Assignment) -> _Asked | None:
        """Send a user's request to the candidate; None if it has to be computed here."""
        inputs = self._inputs(request)
        if not self._may_be_moved(request.parameters()) or not self._fits(inputs):
            return None
        now = time.monotonic()
        with self._lock:
            if self._waiting >= _MOST_WAITING or now - self._paused_at < _RETRY_S:
                return None
            if self._tally.failed_in_a_row >= _OPEN_AFTER:
                self._paused_at = now
            self._waiting += 1
        # A copy: a request that is given up ends before it is sent.
        copies = {name: array.copy() for name, array in inputs.items()}
        names, deadline = [*request.requested_output_names()], now + assignment.deadline_s
        outputs = self._moving.submit(self._ask, copies, names, request.request_id(), deadline)
        outputs.add_done_callback(self._count_answer)
        return _Asked(outputs, deadline, assignment.serial)

    def _count_answer(self, _: object) -> None:
        with self._lock:
            self._waiting -= 1

    def _may_be_moved(self, parameters: str) -> bool:
        """False for requests that name a version, or another contract than this version's."""
        if PINNED_PARAMETER not in parameters and REQUEST_PARAMETER not in parameters:
            return True
        named = json.loads(parameters)
        return PINNED_PARAMETER not in named and named.get(REQUEST_PARAMETER, "") in {"", self._contract.digest}

    def _take(self, asked: _Asked) -> Outputs | None:
        """Wait for an answer until its deadline; None if there is none."""
        try:
            outputs = asked.outputs.result(max(0.0, asked.deadline - time.monotonic()))
        except TimeoutError:
            # Requests that were queued meanwhile have waited for this one, and must not wait for another.
            self._paused_at = time.monotonic()
            asked.error = "it did not answer in time"
            return None
        except Exception as error:  # noqa: BLE001 - the request is computed here then
            asked.error = str(error)
            return None
        with self._lock:
            if self._tally.serial == asked.serial:
                self._tally.answered += 1
                self._tally.failed_in_a_row = 0
        return outputs

    def _count_failures(self, asked: Sequence[_Asked], results: Sequence[Result]) -> None:
        """Count requests on which only the candidate failed."""
        for each, result in zip(asked, results, strict=True):
            if not isinstance(result, GraphkilnError):
                self._count_failure(each.error, each.serial)

    def _count_failure(self, error: str, serial: int) -> None:
        with self._lock:
            if self._tally.serial == serial and not self._closing.is_set():
                self._tally.failed += 1
                self._tally.failed_in_a_row += 1
                self._tally.failure = error[:500]

    def _count_dropped(self, serial: int) -> None:
        with self._lock:
            if self._tally.serial == serial:
                self._tally.dropped += 1

    def _ask(self, inputs: Tensors, names: Sequence[str], request_id: str, deadline: float) -> Outputs:
        """Have the candidate compute some outputs.

        Raises:
            ExecutionError: It answers with an error, without one of the outputs, or in another shape than configured.
            OSError, HTTPException: It does not answer.
        """
        given = {name: self._reshapes.outside(name, array) for name, array in inputs.items()}
        left_s = deadline - time.monotonic()
        found = self._candidate.infer(given, names, request_id=request_id, timeout_s=left_s)
        if missing := [name for name in names if name not in found]:
            raise ExecutionError(f"the answer lacks {', '.join(missing)}")
        rows = [len(next(iter(given.values())))] if self._batched else []
        for name in names:  # Triton checks no shapes of answers
            shape, expected = found[name].shape, (*rows, *self._dims[name])
            if len(shape) != len(expected) or any(
                dim not in (-1, size) for dim, size in zip(expected, shape, strict=True)
            ):
                raise ExecutionError(f"output {name} has the shape {list(shape)}, expected {list(expected)}")
        return {name: self._reshapes.inside(name, found[name]) for name in names}


@dataclass(slots=True)
class _Asked:
    """A user's request that was given to the candidate."""

    outputs: Future[Outputs]
    deadline: float
    serial: int
    error: str = ""


class Candidate(Closeable):
    """Measure the computing times of an instance that is a candidate.

    Args:
        name: Name of the candidate's model.
        instance: Triton's name of the instance.
        folder: Folder of status files.
        executor: Returns the instance's executor.
        computing: Held around each batch.
        assignment: What the instances of the tried model do.
    """

    def __init__(
        self,
        *,
        name: str,
        instance: str,
        folder: Path,
        executor: Callable[[], Executing],
        computing: AbstractContextManager[object],
        assignment: Assignment,
    ) -> None:
        self._name = name
        self._path = tally_path(folder, instance, os.getpid())
        self._executor = executor
        self._computing = computing
        self._tally = InstanceTally(model=name, serial=assignment.serial)
        self._written = 0

    def assign(self, assignment: Assignment) -> None:
        """Begin anew."""
        self._tally, self._written = InstanceTally(model=self._name, serial=assignment.serial), 0

    def report(self) -> None:
        """Write the computing times if there are new ones.

        Raises:
            OSError: They cannot be written.
        """
        if (total := self._tally.candidate_latency.total) != self._written:
            write_file(self._path, self._tally)
            self._written = total

    def close(self) -> None:
        """Write the last times."""
        with suppress(OSError):
            self.report()

    def execute(self, requests: Sequence[InferenceRequest]) -> list[Any]:
        """Compute a response for every request, like `TritonPythonModel.execute`."""
        executor = self._executor()
        with self._computing:
            begun = time.monotonic()
            results = [executor.execute(requests[0])] if len(requests) == 1 else executor.execute_batch(requests)
            seconds = time.monotonic() - begun
        if len(requests) == 1:
            self._tally.candidate_latency.add(seconds)
        return [*map(to_response, results, requests)]
