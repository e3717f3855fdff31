"""Sequences: each request gets the states that the request before it computed.

Triton's sequence batcher routes the requests of a sequence to one instance, one at a time and in order, and provides
the control inputs. It provides states with their initial values only, because its Python stub hands none back: they are
kept here by correlation id. A request whose states are gone is refused, never computed from initial states.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ExecutionError, GraphkilnError, SignatureError
from graphkiln_backend.repository.batch_tensors import SequenceState, SequenceTensors
from graphkiln_backend.triton.executor import InferenceRequest, Result
from graphkiln_backend.triton.tensors import ArrayTensor, InputTensor, to_array

_START, _END = 1, 2  # source: `tritonserver.h`, `TRITONSERVER_REQUEST_FLAG_SEQUENCE_START` and `_END`
_QUEUE_S = 60.0  # Triton's idle time begins when a request arrives, ours when it was computed

_log = logging.getLogger("graphkiln.triton")

CorrelationId: TypeAlias = int | str
States: TypeAlias = dict[str, AnyArray]  # by the name of the input that takes them


class SequenceRequest(InferenceRequest, Protocol):
    """The part of a sequence's `pb_utils.InferenceRequest` that is used."""

    def correlation_id(self) -> CorrelationId:
        """Correlation id; 0 or empty for requests that Triton makes itself: warm-up, and filled slots of a batch."""
        ...

    def flags(self) -> int:
        """Bits: first or last request of its sequence."""
        ...


class Computing(Protocol):
    """The part of `Executor` that is used."""

    def execute(self, request: InferenceRequest) -> Result:
        """Execute a single request."""
        ...

    def execute_batch(self, requests: Sequence[InferenceRequest]) -> list[Result]:
        """Execute requests, as one batch where possible."""
        ...


class SequenceLost(GraphkilnError):
    """The states of a sequence are gone: continuing it would compute wrong outputs."""

    triton_code = "INVALID_ARG"
    exit_code = 2


class SequenceExecutor:
    """Execute requests of sequences with their states; see `Executor`."""

    def __init__(
        self, executor: Computing, tensors: SequenceTensors, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._executor = executor
        self._states = KeptStates(tensors, clock)

    def execute(self, request: SequenceRequest) -> Result:
        """Execute a single request."""
        return self.execute_batch([request])[0]

    def execute_batch(self, requests: Sequence[SequenceRequest]) -> list[Result]:
        """Execute requests; those of different sequences as one batch.

        Returns:
            One result per request, in order; no outputs for those that only fill a slot.
        """
        results: list[Result] = [{} for _ in requests]
        for turn in _turns(requests):
            self._execute_turn([(index, requests[index]) for index in turn], results)
        return results

    def _execute_turn(self, requests: Sequence[tuple[int, SequenceRequest]], results: list[Result]) -> None:
        ready: list[tuple[int, _WithStates]] = []
        for index, request in requests:
            try:
                ready.append((index, self._states.supply(request)))
            except GraphkilnError as error:
                results[index] = error
        if len(ready) == 1:
            computed = [self._executor.execute(ready[0][1])]
        else:
            computed = self._executor.execute_batch([request for _, request in ready])
        for (index, prepared), result in zip(ready, computed, strict=True):
            results[index] = self._states.keep(prepared, result)


def _turns(requests: Sequence[SequenceRequest]) -> list[list[int]]:
    """Group indices of requests that can be computed together: the second of a sequence waits for its first.

    Requests with which the direct strategy fills its slots are left out: no client has sent them.
    """
    turns: list[list[int]] = []
    seen: dict[CorrelationId, int] = {}
    for index, request in enumerate(requests):
        identity = request.correlation_id()
        if not identity and not request.requested_output_names():
            continue
        turn = seen[identity] = seen.get(identity, -1) + 1 if identity else 0
        if turn == len(turns):
            turns.append([])
        turns[turn].append(index)
    return turns


@dataclass(frozen=True, kw_only=True, slots=True)
class _WithStates:
    """A request with states among its inputs and its outputs."""

    request: SequenceRequest
    tensors: Sequence[InputTensor]
    outputs: frozenset[str]

    def inputs(self) -> Sequence[InputTensor]:
        return self.tensors

    def requested_output_names(self) -> Collection[str]:
        return self.outputs

    def parameters(self) -> str:
        return self.request.parameters()

    def is_cancelled(self) -> bool:
        return self.request.is_cancelled()

    def request_id(self) -> str:
        return self.request.request_id()


class KeptStates:
    """States of the sequences of an instance, by correlation id.

    They are freed at the end of a sequence, when another one starts with its id, and some time after Triton has ended
    an idle sequence; there are never more than twice as many as Triton has slots.
    """

    def __init__(self, tensors: SequenceTensors, clock: Callable[[], float]) -> None:
        self._tensors = tensors
        self._clock = clock
        self._id_type = tensors.controls.get(tensors.id_input)
        self._provided = {state.input_name for state in tensors.states}
        if self._id_type is DType.BYTES:
            self._provided.add(tensors.id_input)
        self._kept: OrderedDict[CorrelationId, tuple[float, States]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def supply(self, request: SequenceRequest) -> _WithStates:
        """Add the states of its sequence to a request.

        Raises:
            SequenceLost: It is not the first request, and there are no states.
        """
        tensors = request.inputs()
        given = {tensor.name(): tensor for tensor in tensors if tensor.name() in self._provided}
        provided = {**self._states_for(request, given), **self._id_for(request)}
        return _WithStates(
            request=request,
            tensors=[
                *(tensor for tensor in tensors if tensor.name() not in self._provided),
                *(ArrayTensor(name, array) for name, array in provided.items()),
            ],
            outputs=frozenset((*request.requested_output_names(), *(s.output_name for s in self._tensors.states))),
        )

    def keep(self, request: _WithStates, result: Result) -> Result:
        """Keep the states that a request computed; return the outputs that the client requested.

        A failed request changes no state, but a sequence whose first request failed has none.
        """
        identity, flags = request.request.correlation_id(), request.request.flags()
        if flags & _END:
            self._kept.pop(identity, None)
        if isinstance(result, GraphkilnError):
            return result
        if identity and self._tensors.states and not flags & _END:
            states = {state.input_name: _own(result[state.output_name]) for state in self._tensors.states}
            self._kept[identity] = self._clock(), states
            self._kept.move_to_end(identity)
        self._free()
        requested = request.request.requested_output_names()
        return {name: array for name, array in result.items() if name in requested}

    def _states_for(self, request: SequenceRequest, given: dict[str, InputTensor]) -> States:
        identity = request.correlation_id()
        if not self._tensors.states:
            return {}
        if request.flags() & _START or not identity:
            self._kept.pop(identity, None)
            return {
                state.input_name: self._initial(state, given.get(state.input_name), warming=not identity)
                for state in self._tensors.states
            }
        if identity not in self._kept:
            raise SequenceLost(
                f"the states of sequence {identity!r} are gone: its first request failed, or it was idle too long",
                hint="start the sequence again, from its first request",
            )
        return self._kept[identity][1]

    def _initial(self, state: SequenceState, given: InputTensor | None, *, warming: bool) -> AnyArray:
        """Initial state of a sequence: as config.pbtxt says, else zeros.

        Raises:
            ExecutionError: Triton did not provide it.
        """
        if given is not None and state.initialized:
            return np.array(to_array(given, state.dtype))  # Triton's memory ends with its request
        if given is None and state.initialized and not warming:
            raise ExecutionError(f"Triton gives no initial value of state '{state.input_name}'")
        shape = ((1,) if self._tensors.batched else ()) + tuple(1 if dim < 0 else dim for dim in state.dims)
        if state.dtype is DType.BYTES:
            return np.full(shape, b"", np.object_)
        return np.zeros(shape, state.dtype.numpy)  # Triton's memory holds anything

    def _id_for(self, request: SequenceRequest) -> dict[str, AnyArray]:
        """Provide the correlation id as text; Triton provides it as a number.

        Raises:
            SignatureError: The id does not fit the graph's type: Triton would provide some of its bytes.
        """
        identity = request.correlation_id()
        if self._id_type is DType.BYTES:
            shape = (1, 1) if self._tensors.batched else (1,)
            return {self._tensors.id_input: np.full(shape, str(identity).encode(), np.object_)}
        if self._id_type and identity and not _fits(identity, self._id_type):
            expected = f"{self._id_type}: the graph takes it as '{self._tensors.id_input}'"
            raise SignatureError("wrong sequence id", expected=expected, got=f"{type(identity).__name__} {identity!r}")
        return {}

    def _free(self) -> None:
        """Free sequences that Triton has ended without a last request."""
        oldest_s = self._clock() - self._tensors.idle_s - _QUEUE_S
        while self._kept:
            identity, (used_s, _) = next(iter(self._kept.items()))
            if used_s >= oldest_s and len(self._kept) <= 2 * self._tensors.slots:
                return
            _log.debug("the states of sequence %r are freed: it has ended without a last request", identity)
            del self._kept[identity]


def _fits(identity: CorrelationId, dtype: DType) -> bool:
    return isinstance(identity, int) and identity <= np.iinfo(dtype.numpy.name).max


def _own(array: AnyArray) -> AnyArray:
    """Copy a view, so that no larger array stays alive: outputs of a batch are views."""
    return array if array.base is None else np.array(array)
