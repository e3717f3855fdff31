"""Ragged batches: requests of different lengths in one row, with inputs that describe where each request begins.

Implements `allow_ragged_batch`, `batch_input` and `batch_output` as Triton's C++ backends do; its Python stub does not.

Source: Triton backend utilities, `BackendInputCollector::ProcessBatchInput`, `BackendOutputResponder::ProcessTensor`
and `ProcessBatchOutput`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from graphkiln_backend.engines.base import Session
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.repository.batch_tensors import BatchInput, BatchInputKind, BatchOutput, BatchTensors
from graphkiln_backend.triton.executor import (
    Executor,
    Feeds,
    InferenceRequest,
    Outputs,
    Result,
    batch_size,
    group_by_shape,
)


class RaggedExecutor(Executor):
    """Execute requests of different lengths as one batch; see `Executor`.

    Args:
        session: Proven session of the version.
        tensors: Tensors whose first dimension is not the batch.
        input_ranks: As for `Executor`.
        contract: As for `Executor`.
    """

    def __init__(
        self, session: Session, tensors: BatchTensors, *, input_ranks: Mapping[str, int], contract: str = ""
    ) -> None:
        rows = {name: rank for name, rank in input_ranks.items() if name not in tensors.ragged}
        super().__init__(session, batching=True, input_ranks=rows, contract=contract)
        self._tensors = tensors
        self._counting = False  # rows are counted in `_run_together`
        self._graph = session.signature
        self._signature = tensors.of_requests(session.signature)
        ragged = tensors.ragged.items()
        self._guarded += [(name, rank + 1) for name, rank in ragged if input_ranks.get(name) == rank + 1]

    def execute(self, request: InferenceRequest) -> Result:
        """Execute a single request, as a batch of one."""
        return self.execute_batch([request])[0]

    def _groups(self, feeds: dict[int, Feeds]) -> Iterable[list[int]]:
        """Group requests whose other inputs have equal shapes."""
        indices = list(feeds)
        ragged = self._tensors.ragged
        rows = [
            {name: array.reshape(-1) if name in ragged else array for name, array in request.items()}
            for request in feeds.values()
        ]
        return [[indices[position] for position in group] for group in group_by_shape(rows)]

    def _run_together(self, feeds: Sequence[Feeds], requested: Sequence[tuple[str, ...]]) -> list[Outputs]:
        batch = form_batch(feeds, self._tensors)
        self._graph.check(batch)
        self.batch_sizes.append(sum(map(batch_size, feeds)))
        parts = split_outputs(self._run(batch, self._union(requested)), feeds, self._tensors)
        return [{name: part[name] for name in names} for part, names in zip(parts, requested, strict=True)]


def form_batch(requests: Sequence[Feeds], tensors: BatchTensors) -> dict[str, AnyArray]:
    """Concatenate the inputs of requests to the inputs of the graph.

    Args:
        requests: Inputs of each request, with equal names and the batch as first dimension.
        tensors: Tensors whose first dimension is not the batch.
    """
    batch: dict[str, AnyArray] = {}
    for name in requests[0]:
        arrays = [feeds[name] for feeds in requests]
        if name in tensors.ragged:
            arrays = [array.reshape(-1) for array in arrays]
        batch[name] = np.concatenate(arrays)
    for batch_input in tensors.inputs:
        array = _describe(batch_input, [feeds[batch_input.source].shape for feeds in requests])
        batch |= dict.fromkeys(batch_input.targets, array)
    return batch


def _describe(batch_input: BatchInput, shapes: Sequence[tuple[int, ...]]) -> AnyArray:
    """Compute a `batch_input` from the shapes of its source in each request, including the batch."""
    dtype = batch_input.dtype.numpy
    counts = [math.prod(shape) for shape in shapes]
    match batch_input.kind:
        case BatchInputKind.ELEMENT_COUNT:
            return np.array(counts).astype(dtype)
        case BatchInputKind.ACCUMULATED_ELEMENT_COUNT:
            return np.cumsum(counts).astype(dtype)
        case BatchInputKind.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO:
            return np.cumsum([0, *counts]).astype(dtype)
        case BatchInputKind.MAX_ELEMENT_COUNT_AS_SHAPE:
            return np.zeros(max(counts), dtype)
    items = np.array([shape[1:] for shape in shapes for _ in range(shape[0])]).astype(dtype)
    items = items.reshape(-1, len(shapes[0]) - 1)
    return items if batch_input.kind is BatchInputKind.ITEM_SHAPE else items.reshape(-1)


def split_outputs(outputs: Feeds, requests: Sequence[Feeds], tensors: BatchTensors) -> list[Outputs]:
    """Split the outputs of a batch into those of each request.

    Args:
        outputs: Outputs of the batch by name.
        requests: Inputs of each request.
        tensors: Tensors whose first dimension is not the batch.

    Raises:
        ExecutionError: The number of elements of an output does not match the requests.
    """
    parts: list[Outputs] = [{} for _ in requests]
    for name, array in outputs.items():
        if name in tensors.outputs:
            split = _split_elements(name, array, tensors.outputs[name], requests)
        else:
            split = _split_rows(name, array, [batch_size(feeds) for feeds in requests])
        for part, array_of_request in zip(parts, split, strict=True):
            part[name] = array_of_request
    return parts


def _split_elements(name: str, array: AnyArray, output: BatchOutput, requests: Sequence[Feeds]) -> list[AnyArray]:
    shapes = [_fill(output.shape, feeds[output.source].shape) for feeds in requests]
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    if array.size != ends[-1]:
        raise _shape_error(name, array, f"{ends[-1]} elements")
    parts = np.split(array.reshape(-1), ends[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _fill(shape: tuple[int, ...], source: tuple[int, ...]) -> tuple[int, ...]:
    """Replace each -1 of a shape by the size of the source in that dimension."""
    if len(shape) > len(source):
        raise ExecutionError(f"a batch_output of shape {list(shape)} has more dimensions than its input {list(source)}")
    return tuple(source[axis] if size == -1 else size for axis, size in enumerate(shape))


def _split_rows(name: str, array: AnyArray, sizes: Sequence[int]) -> list[AnyArray]:
    """Split by rows; surplus rows are dropped, as in Triton's C++ backends."""
    ends = np.cumsum(sizes)
    if not array.ndim or len(array) < ends[-1]:
        raise _shape_error(name, array, f"a batch of {ends[-1]} rows")
    return [array[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _shape_error(name: str, array: AnyArray, expected: str) -> ExecutionError:
    return ExecutionError(
        f"output '{name}' has the shape {list(array.shape)} for {expected}",
        hint="write a batch_output for it, or serve the graph with max_batch_size: 0",
    )
