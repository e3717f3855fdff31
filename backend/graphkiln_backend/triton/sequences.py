"""Sequences: each request gets the states that the previous request of its sequence computed.

Triton's sequence batcher routes the requests of a sequence to one instance, one at a time and in order, and provides
the control inputs. It provides only initial values of states, because its Python stub cannot return states to it. So
states are kept here by correlation id. A request whose states were freed is refused, never computed from initial ones.
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
from graphkiln_backend.triton.executor import Executor, InferenceRequest, Result
from graphkiln_backend.triton.tensors import ArrayTensor, InputTensor, to_array

_START, _END = 1, 2  # source: `tritonserver.h`, `TRITONSERVER_REQUEST_FLAG_SEQUENCE_START` and `_END`
_QUEUE_S = 60.0  # Triton measures idle time from a request's arrival, this module from its completion

_log = logging.getLogger("graphkiln.triton")

CorrelationId: TypeAlias = int | str
States: TypeAlias = dict[str, AnyArray]  # by input name


class SequenceRequest(InferenceRequest, Protocol):
    """The part of a sequence's `pb_utils.InferenceRequest` that is used."""

    def correlation_id(self) -> CorrelationId:
        """Correlation id; 0 or empty for requests that Triton creates itself: warm-up, and empty slots of a batch."""
        ...

    def flags(self) -> int:
        """Bits that mark the first and the last request of a sequence."""
        ...


class SequenceLost(GraphkilnError):
    """The states of a sequence were freed: continuing it would compute wrong outputs."""

    triton_code = "INVALID_ARG"
    exit_code = 2


class SequenceExecutor:
    """Execute requests of sequences with their states; see `Executor`."""

    def __init__(
        self, executor: Executor, tensors: SequenceTensors, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._executor = executor
        self._states = KeptStates(tensors, clock)

    def execute(self, request: SequenceRequest) -> Result:
        """Execute a single request."""
        return self.execute_batch([request])[0]

    def execute_batch(self, requests: Sequence[SequenceRequest]) -> list[Result]:
        """Execute requests; those of different sequences as one batch.

        Returns:
            One result per request, in order; without outputs for those that only fill a slot.
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
    """Group indices of requests that can be computed together: each group has one request per sequence at most.

    Requests that Triton's direct strategy creates for empty slots are left out.
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
    """A request with states among its inputs and outputs."""

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
    """States of an instance's sequences, by correlation id.

    They are freed at the end of a sequence, when another sequence starts with its id, and some time after Triton has
    ended an idle sequence. At most twice as many sequences are kept as Triton has slots.
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
            SequenceLost: It is not the first request of its sequence, and there are no states.
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
        """Keep the states that a request computed, and return the outputs that the client requested.

        A failed request changes no state; a sequence whose first request failed has no states.
        """
        identity, flags = request.request.correlation_id(), request.request.flags()
        if flags & _END:
            self._kept.pop(identity, None)
        if isinstance(result, GraphkilnError):
            return result
        if identity and self._tensors.states and not flags & _END:
            states = {state.input_name: _copy_view(result[state.output_name]) for state in self._tensors.states}
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
                f"sequence {identity!r} has no states: its first request failed, or it was idle too long",
                hint="restart the sequence from its first request",
            )
        return self._kept[identity][1]

    def _initial(self, state: SequenceState, given: InputTensor | None, *, warming: bool) -> AnyArray:
        """Initial state of a sequence from config.pbtxt; zeros if there is none.

        Raises:
            ExecutionError: Triton did not provide the value of config.pbtxt.
        """
        if given is not None and state.initialized:
            return to_array(given, state.dtype)
        if given is None and state.initialized and not warming:
            raise ExecutionError(f"Triton provides no initial value of state '{state.input_name}'")
        shape = ((1,) if self._tensors.batched else ()) + tuple(1 if dim < 0 else dim for dim in state.dims)
        if state.dtype is DType.BYTES:
            return np.full(shape, b"", np.object_)
        return np.zeros(shape, state.dtype.numpy)  # Triton's memory is not initialized

    def _id_for(self, request: SequenceRequest) -> dict[str, AnyArray]:
        """Provide the correlation id as a string if the graph expects one; Triton provides a number.

        Raises:
            SignatureError: The id does not fit the graph's type; Triton would truncate it.
        """
        identity = request.correlation_id()
        if self._id_type is DType.BYTES:
            shape = (1, 1) if self._tensors.batched else (1,)
            return {self._tensors.id_input: np.full(shape, str(identity).encode(), np.object_)}
        fits = isinstance(identity, int) and self._id_type and identity <= np.iinfo(self._id_type.numpy.name).max
        if self._id_type and identity and not fits:
            expected = f"{self._id_type}, the type of input '{self._tensors.id_input}'"
            raise SignatureError("wrong sequence id", expected=expected, got=f"{type(identity).__name__} {identity!r}")
        return {}

    def _free(self) -> None:
        """Free sequences that Triton has ended without a last request."""
        oldest_s = self._clock() - self._tensors.idle_s - _QUEUE_S
        while self._kept:
            identity, (used_s, _) = next(iter(self._kept.items()))
            if used_s >= oldest_s and len(self._kept) <= 2 * self._tensors.slots:
                return
            _log.debug("freeing the states of sequence %r, which ended without a last request", identity)
            del self._kept[identity]


def _copy_view(array: AnyArray) -> AnyArray:
    """Copy a view, so that it does not keep the whole batch alive."""
    return array if array.base is None else np.array(array)
