"""Execute requests on a session: read and validate, batch, run, split. Needs no Triton.

The tensors of each request are read and validated separately, so that an error affects one request. Requests of equal
shapes are computed as one batch; if that fails, each is computed alone, so that only the invalid request fails.

The path of a single request is kept short: a run evicts the processor's caches, so that each line of Python costs ten
times what a micro-benchmark shows.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from graphkiln_backend.engines.base import Session
from graphkiln_backend.graph.contract import REQUEST_PARAMETER, ContractChanged
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ExecutionError, GraphkilnError, SignatureError
from graphkiln_backend.triton.request_notes import RequestNotes
from graphkiln_backend.triton.tensors import InputTensor, to_array

# Checking for cancellation is a round trip to Triton of 0.1 to 0.8 ms, not worth it for short runs. Triton itself
# checks requests in its queue.
CANCELLATION_CHECK_S = 30e-3
_MAX_VALID_SHAPES = 1024
_MAX_BATCH_SIZES = 1 << 16  # bounded in case nothing reads them

_CONTRACT_KEY = f'"{REQUEST_PARAMETER}"'

_log = logging.getLogger("graphkiln.triton")

Feeds = dict[str, AnyArray]  # arrays by input name
Outputs = dict[str, AnyArray]
Result = Outputs | GraphkilnError  # requested outputs in the signature's order, or the error of the request


class InferenceRequest(Protocol):
    """The part of `pb_utils.InferenceRequest` that is used."""

    def inputs(self) -> Sequence[InputTensor]:
        """Input tensors."""
        ...

    def requested_output_names(self) -> Collection[str]:
        """Names of the outputs to compute."""
        ...

    def parameters(self) -> str:
        """Parameters as JSON."""
        ...

    def is_cancelled(self) -> bool:
        """True if the client has cancelled the request."""
        ...

    def request_id(self) -> str:
        """Id assigned by the client; may be empty."""
        ...


class Cancelled(GraphkilnError):
    """The client cancelled the request before it was computed."""

    triton_code = "CANCELLED"


class OutOfMemory(GraphkilnError):
    """Not enough memory for a request, or for its batch."""

    triton_code = "UNAVAILABLE"


class Executor:
    """Execute requests on a session. Not thread-safe; does not own the session.

    Args:
        session: Proven session of the version.
        batching: The first dimension of every tensor is the batch (`max_batch_size` above 0).
        input_ranks: Rank of each input as Triton delivers it, including the batch. An input with one more dimension
            than the graph's has a 1 after the batch, so that a request of 2^32 rows cannot break the batch of others
            (`repository.config.guard_batch`); it is removed here.
        contract: Digest of the version's contract; requests for another contract are refused. Empty: not checked.
        separate: Compute requests one by one, because the graph mixes the rows of a batch.

    Attributes:
        batch_sizes: Rows of each run, the latest last; the reader removes them.
        engine_failed: Set when the engine failed on a request; cleared by the replayer.
        last_run_at: When the last run ended, in seconds of `time.monotonic`.
        notes: Notes the requests under way; None if no supervisor reads them.
    """

    def __init__(
        self,
        session: Session,
        *,
        batching: bool,
        input_ranks: Mapping[str, int] | None = None,
        contract: str = "",
        separate: bool = False,
    ) -> None:
        self.batch_sizes: deque[int] = deque(maxlen=_MAX_BATCH_SIZES)
        self.engine_failed = threading.Event()
        self.last_run_at = 0.0
        self.notes: RequestNotes | None = None
        self._session = session
        self._batching = batching
        self._counting = batching
        self._separate = separate or not batching
        self._signature = signature = session.signature
        inputs = (*self._signature.inputs, *self._signature.optional_inputs)
        self._input_types = {spec.name: spec.dtype for spec in inputs}
        self._scalars = {spec.name for spec in inputs if not spec.shape}
        ranks = input_ranks or {}
        guarded = [spec for spec in inputs if batching and ranks.get(spec.name) == len(spec.shape) + 1]
        self._guarded = [(spec.name, ranks[spec.name]) for spec in guarded]
        self._output_names = [spec.name for spec in signature.outputs]
        self._concatenator = Concatenator()
        self._valid_shapes: set[tuple[object, ...]] = set()
        self._run_s = 0.0
        self._warned_of_failed_batch = False
        self._contract = contract

    def execute(self, request: InferenceRequest) -> Result:
        """Execute a single request."""
        try:
            if self._contract or self._run_s > CANCELLATION_CHECK_S:
                self._refuse_outdated(request)
            feeds = self.read(request)
            if self.notes:
                self.notes.begin([feeds])
            return self._run(feeds, self._requested_outputs(request))
        except Exception as error:  # noqa: BLE001 - any error becomes the result of its request
            return self._to_error(error, request)

    def execute_batch(self, requests: Sequence[InferenceRequest]) -> list[Result]:
        """Execute requests; those of equal shapes as one batch.

        Returns:
            One result per request, in order.
        """
        results: dict[int, Result] = {}
        feeds: dict[int, Feeds] = {}
        for index, request in enumerate(requests):
            try:
                if self._contract or self._run_s > CANCELLATION_CHECK_S:
                    self._refuse_outdated(request)
                feeds[index] = self.read(request)
            except Exception as error:  # noqa: BLE001 - any error becomes the result of its request
                results[index] = self._to_error(error, request)
        notes = self.notes
        alone = [[index] for index in feeds if notes.is_known(feeds[index])] if notes else []
        together = {index: feeds[index] for index in feeds if [index] not in alone} if alone else feeds
        for group in [*self._groups(together), *alone]:
            group_results = self._execute_group([requests[i] for i in group], [feeds[i] for i in group])
            results.update(zip(group, group_results, strict=True))
        return [results[index] for index in range(len(requests))]

    def read(self, request: InferenceRequest) -> Feeds:
        """Read and validate the inputs of a request, in the shapes of the graph."""
        feeds: dict[str, AnyArray] = {}
        for tensor in request.inputs():
            name = tensor.name()
            feeds[name] = to_array(tensor, self._input_types.get(name))
        for name, rank in self._guarded:
            if name in feeds:
                array = feeds[name]
                feeds[name] = array[:, 0] if array.ndim == rank and array.shape[1] == 1 else _without_batch(array)
        for name in self._scalars:
            if name in feeds and feeds[name].shape == (1,):
                feeds[name] = feeds[name].reshape(())
        shapes = tuple([(name, array.dtype.char, array.shape) for name, array in feeds.items()])
        if shapes not in self._valid_shapes:
            self._signature.check(feeds)
            if self._batching:
                _check_rows(feeds)
            if len(self._valid_shapes) < _MAX_VALID_SHAPES:
                self._valid_shapes.add(shapes)
        return feeds

    def _refuse_outdated(self, request: InferenceRequest) -> None:
        """Refuse a request that was cancelled, or that was made for another contract."""
        if self._run_s > CANCELLATION_CHECK_S and request.is_cancelled():
            raise Cancelled("the client cancelled the request before it was computed")
        if self._contract:
            check_contract(request.parameters(), self._contract)

    def _requested_outputs(self, request: InferenceRequest) -> tuple[str, ...]:
        """Requested outputs, in the signature's order."""
        requested = request.requested_output_names()
        return tuple([name for name in self._output_names if name in requested])

    def _groups(self, feeds: dict[int, Feeds]) -> Iterable[list[int]]:
        """Group the indices of requests that are computed together."""
        indices = list(feeds)
        if self._separate:
            return [[index] for index in indices]
        return [[indices[position] for position in group] for group in group_by_shape(list(feeds.values()))]

    def _execute_group(self, requests: list[InferenceRequest], feeds: list[Feeds]) -> list[Result]:
        """Run requests of equal shapes together; if that fails, each alone."""
        requested = [self._requested_outputs(request) for request in requests]
        try:
            if self.notes:
                self.notes.begin(feeds)
            return [*self._run_together(feeds, requested)]
        except Exception as error:  # noqa: BLE001 - the request at fault fails again, alone
            if len(requests) == 1:
                return [self._to_error(error, requests[0])]
            results = [self.execute(request) for request in requests]
            self._warn_of_failed_batch(error, results)
            return results

    def _run_together(self, feeds: Sequence[Feeds], requested: Sequence[tuple[str, ...]]) -> list[Outputs]:
        """Compute the requested outputs of each request in one run."""
        if len(feeds) == 1:
            return [self._run(feeds[0], requested[0])]
        outputs = self._run(self._concatenator.concatenate(feeds), self._union(requested))
        parts = split_batch(outputs, [batch_size(request_feeds) for request_feeds in feeds])
        return [{name: part[name] for name in names} for part, names in zip(parts, requested, strict=True)]

    def _union(self, requested: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
        """Outputs that at least one request asks for, in the signature's order."""
        return tuple([name for name in self._output_names if any(name in names for names in requested)])

    def _warn_of_failed_batch(self, error: Exception, results: list[Result]) -> None:
        """Warn once if no request was invalid: a graph that cannot batch would be slow without any message."""
        if self._warned_of_failed_batch or any(isinstance(result, GraphkilnError) for result in results):
            return
        self._warned_of_failed_batch = True
        _log.warning("a batch of %d requests failed, but each of them succeeded alone: %s", len(results), error)

    def _run(self, feeds: Feeds, outputs: tuple[str, ...]) -> Outputs:
        if self._counting:
            self.batch_sizes.append(len(next(iter(feeds.values()))))  # batch_size(feeds), without the call
        # Some runtimes do not support unaligned or read-only memory.
        for name, array in feeds.items():
            if not array.flags.carray:
                feeds[name] = array.copy()
        begun = time.monotonic()
        try:
            return self._session.run(feeds, outputs)
        finally:
            self.last_run_at = time.monotonic()
            self._run_s = self.last_run_at - begun
            if self.notes:
                self.notes.end()

    def _to_error(self, error: Exception, request: InferenceRequest) -> GraphkilnError:
        result = to_result(error, request)
        if isinstance(result, ExecutionError):
            self.engine_failed.set()
        return result


def to_result(error: Exception, request: InferenceRequest | None = None) -> GraphkilnError:
    """Convert an exception to the result of its request; log unexpected ones with their traceback."""
    if isinstance(error, GraphkilnError):
        return error
    if isinstance(error, MemoryError):
        return OutOfMemory(f"not enough memory for this request: {error}")
    request_id = request.request_id() if request else ""
    _log.error("a request failed unexpectedly", exc_info=error, extra={"request_id": request_id})
    return ExecutionError(f"unexpected {type(error).__name__}: {error}")


def check_contract(parameters: str, digest: str) -> None:
    """Refuse a request that names a contract other than the version's; a request without one is accepted.

    Args:
        parameters: The request's parameters: a JSON object, or an empty string.
        digest: Digest of the version's contract.

    Raises:
        ContractChanged: The contracts differ.
    """
    if _CONTRACT_KEY not in parameters:  # most requests; parsing JSON would cost more than everything else
        return
    named = json.loads(parameters).get(REQUEST_PARAMETER, digest)
    if named != digest:
        raise ContractChanged


def batch_size(feeds: Feeds) -> int:
    """Number of rows: the first dimension of the first tensor."""
    return len(next(iter(feeds.values())))


def group_by_shape(requests: Sequence[Feeds]) -> list[list[int]]:
    """Group requests that can share one run: equal names, and equal shapes except the first dimension.

    Returns:
        Indices into `requests`; groups in the order of their first request, requests in order within a group.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, feeds in enumerate(requests):
        key = tuple((name, array.shape[1:]) for name, array in feeds.items())
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def split_batch(outputs: Feeds, sizes: Sequence[int]) -> list[dict[str, AnyArray]]:
    """Split the outputs of a batch into those of each request, as views.

    Args:
        outputs: `[sum(sizes), ...]` arrays by name.
        sizes: Rows of each request.

    Raises:
        ExecutionError: The first dimension of an output is not the batch.
    """
    ends = np.cumsum(sizes)
    for name, array in outputs.items():
        if array.shape[:1] != (ends[-1],):
            raise ExecutionError(
                f"output '{name}' has the shape {list(array.shape)} for a batch of {ends[-1]} rows",
                hint="the graph mixes the rows of a batch: serve it with max_batch_size: 0",
            )
    return [
        {name: array[end - size : end] for name, array in outputs.items()}
        for end, size in zip(ends, sizes, strict=True)
    ]


class Concatenator:
    """Concatenate the tensors of requests along the batch, in buffers that are reused.

    The result is a view of the buffers, valid until the next call. Not thread-safe.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, AnyArray] = {}

    def concatenate(self, requests: Sequence[Feeds]) -> Feeds:
        """Concatenate along the first dimension; a single request is returned without a copy."""
        if len(requests) == 1:
            return requests[0]
        return {name: self._concatenate(name, [feeds[name] for feeds in requests]) for name in requests[0]}

    def _concatenate(self, name: str, arrays: list[AnyArray]) -> AnyArray:
        rows = sum(len(array) for array in arrays)
        buffer = self._buffers.get(name)
        first = arrays[0]
        if buffer is None or len(buffer) < rows or buffer.shape[1:] != first.shape[1:] or buffer.dtype != first.dtype:
            buffer = self._buffers[name] = np.empty((rows, *first.shape[1:]), first.dtype)
        return np.concatenate(arrays, out=buffer[:rows])


def _without_batch(array: AnyArray) -> AnyArray:
    """Raise a `SignatureError` for a request of 0 rows, from which Triton has removed the batch dimension."""
    raise SignatureError("wrong batch size", expected="at least one row", got=f"{list(array.shape)} without a batch")


def _check_rows(feeds: Feeds) -> None:
    """Raise a `SignatureError` if inputs differ in rows: a batch would mix up the rows of its requests."""
    rows = {name: len(array) for name, array in feeds.items() if array.ndim}
    if len(set(rows.values())) > 1:
        raise SignatureError("wrong batch size", expected="equal rows of every input", got=str(rows))


class InstanceFault(GraphkilnError):
    """The instance computes wrong outputs and refuses requests."""

    triton_code = "UNAVAILABLE"


class Refusal:
    """Executor that refuses every request, because this instance computes wrong outputs."""

    def __init__(self, reason: str) -> None:
        self._error = InstanceFault(
            f"this instance computes wrong outputs: {reason}", hint="try again: the server is being restarted"
        )

    def execute(self, request: InferenceRequest) -> Result:
        """Refuse a request."""
        return self.execute_batch([request])[0]

    def execute_batch(self, requests: Sequence[InferenceRequest]) -> list[Result]:
        """Refuse requests."""
        return [self._error for _ in requests]
