"""The inputs that are computed from a whole batch, and the outputs and inputs that have no batch dimension.

Requests of different lengths share a batch in which an input with `allow_ragged_batch` is one row of all their
elements; `batch_input` tells the graph where each request begins, and `batch_output` how its outputs are shared out.

Source: Triton, `model_config.proto` (`BatchInput`, `BatchOutput`) and "Ragged Batching".
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.signature import Signature, TensorSpec, free_dim

_COUNT_TYPES = (DType.INT32, DType.FP32)
"""Source: Triton core, `ValidateBatchIO`."""


class BatchInputKind(enum.StrEnum):
    """What a `batch_input` holds, by Triton's name."""

    ELEMENT_COUNT = "BATCH_ELEMENT_COUNT"
    ACCUMULATED_ELEMENT_COUNT = "BATCH_ACCUMULATED_ELEMENT_COUNT"
    ACCUMULATED_ELEMENT_COUNT_WITH_ZERO = "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"
    MAX_ELEMENT_COUNT_AS_SHAPE = "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"
    ITEM_SHAPE = "BATCH_ITEM_SHAPE"
    ITEM_SHAPE_FLATTEN = "BATCH_ITEM_SHAPE_FLATTEN"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchInput:
    """Inputs that tell the graph something of another input of the batch.

    Attributes:
        kind: What they hold.
        targets: Their names.
        dtype: Their element type.
        source: The input that they describe.
    """

    kind: BatchInputKind
    targets: tuple[str, ...]
    dtype: DType
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOutput:
    """An output whose elements are shared out by the elements of an input.

    Attributes:
        source: The input.
        shape: Of a response, the batch first; -1 for the size that the request's input has there.
    """

    source: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTensors:
    """What a configuration says of tensors that are no rows of a batch.

    Attributes:
        ragged: Dimensions of each ragged input in a request, the batch among them.
        inputs: Computed from the batch.
        outputs: Shared out by the elements of an input, by name.
    """

    ragged: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[BatchInput, ...] = ()
    outputs: Mapping[str, BatchOutput] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.ragged or self.inputs or self.outputs)

    def of_graph(self, signature: Signature) -> BatchTensors:
        """These tensors, without the ragged inputs that a graph takes as rows: requests of equal shapes share a batch.

        Args:
            signature: Of the graph.
        """
        rows = {spec.name for spec in (*signature.inputs, *signature.optional_inputs) if len(spec.shape) != 1}
        return replace(self, ragged={name: rank for name, rank in self.ragged.items() if name not in rows})

    def of_requests(self, signature: Signature) -> Signature:
        """What a request holds and is given, each tensor with the batch first.

        Args:
            signature: Of the graph.
        """
        ranks = {**self.ragged, **{name: len(output.shape) for name, output in self.outputs.items()}}
        computed = self.input_names
        return replace(
            signature,
            inputs=tuple(_of_rank(spec, ranks) for spec in signature.inputs if spec.name not in computed),
            outputs=tuple(_of_rank(spec, ranks) for spec in signature.outputs),
        )

    def of_rows(self, signature: Signature) -> Signature:
        """The tensors whose first dimension is the batch.

        Args:
            signature: Of the graph.
        """
        others = {*self.ragged, *self.input_names}
        return replace(
            signature,
            inputs=tuple(spec for spec in signature.inputs if spec.name not in others),
            outputs=tuple(spec for spec in signature.outputs if spec.name not in self.outputs),
        )

    @property
    def input_names(self) -> frozenset[str]:
        """Inputs that no request holds."""
        return frozenset(target for batch_input in self.inputs for target in batch_input.targets)


def _of_rank(spec: TensorSpec, ranks: Mapping[str, int]) -> TensorSpec:
    if spec.name not in ranks:
        return spec
    rest = (free_dim(spec.name, axis) for axis in range(1, ranks[spec.name]))
    return replace(spec, shape=(free_dim(spec.name, 0), *rest))


def read_batch_tensors(config: Any) -> BatchTensors:
    """What Triton's `ModelConfig` message says.

    Raises:
        RepositoryError: Something is requested that nobody offers.
        ManifestError: A data type is not known.
    """
    batched = config.max_batch_size > 0
    return BatchTensors(
        ragged={tensor.name: _rank(tensor) for tensor in config.input if tensor.allow_ragged_batch and batched},
        inputs=tuple(map(_input, config.batch_input)),
        outputs={name: _output(batch, name, config) for batch in config.batch_output for name in batch.target_name},
    )


def _rank(tensor: Any) -> int:
    """Dimensions of an input, the batch among them, without the one that `repository.batch_guard` adds."""
    shape = list(tensor.reshape.shape) if tensor.HasField("reshape") else list(tensor.dims)
    return 1 + (len(tensor.dims) if shape == [1, *tensor.dims] else len(shape or [-1]))


def _input(batch: Any) -> BatchInput:
    if len(batch.source_input) != 1:
        raise RepositoryError(f"config.pbtxt: batch_input '{', '.join(batch.target_name)}' needs one source_input")
    dtype = DType.from_config(batch.data_type) if batch.data_type else None
    if dtype not in _COUNT_TYPES:
        raise RepositoryError(
            f"config.pbtxt: batch_input '{', '.join(batch.target_name)}' is of type {dtype}",
            hint="Triton counts in TYPE_INT32 or TYPE_FP32",
        )
    kind = BatchInputKind(batch.Kind.Name(batch.kind))
    return BatchInput(kind=kind, targets=tuple(batch.target_name), dtype=dtype, source=batch.source_input[0])


def _output(batch: Any, name: str, config: Any) -> BatchOutput:
    if len(batch.source_input) != 1:
        raise RepositoryError(f"config.pbtxt: batch_output '{name}' needs one source_input")
    for tensor in config.output:
        if tensor.name == name and tensor.dims:
            shape = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
            return BatchOutput(source=batch.source_input[0], shape=(-1, *shape))
    raise RepositoryError(
        f"config.pbtxt: batch_output '{name}' is not among the outputs", hint="write its `output` with `dims`"
    )


def check_batch_tensors(config: Any, signature: Signature, tensors: BatchTensors) -> None:
    """Compares them with the graph.

    Args:
        config: Triton's `ModelConfig` message.
        signature: Of the graph.
        tensors: What it says.

    Raises:
        RepositoryError: A tensor is not in the graph or does not fit.
    """
    if config.max_batch_size < 1:
        raise RepositoryError(
            f"config.pbtxt of '{config.name}' has a batch_input or batch_output, but max_batch_size is 0",
            hint="set max_batch_size to the largest batch",
        )
    graph = {spec.name: spec for spec in signature.inputs}
    sources = {tensor.name for tensor in config.input}
    described = [batch.source for batch in tensors.inputs] + [output.source for output in tensors.outputs.values()]
    for source in described:
        if source not in sources:
            raise RepositoryError(
                f"config.pbtxt of '{config.name}': source_input '{source}' is not among the inputs",
                hint="name it in `input`",
            )
    for batch in tensors.inputs:
        for target in batch.targets:
            _check_target(target, batch, graph, config.name)
    for name in tensors.ragged:
        if name in graph and isinstance(graph[name].shape[0], int):
            raise _misfit(f"ragged input '{name}'", str(graph[name]), "all elements of a batch: dims [-1] in the graph")


def _check_target(target: str, batch: BatchInput, graph: Mapping[str, TensorSpec], model: str) -> None:
    if target not in graph:
        raise RepositoryError(
            f"config.pbtxt: batch_input '{target}' is not in the graph of '{model}'",
            hint=f"the graph has {', '.join(map(str, graph.values()))}",
        )
    rank = 2 if batch.kind is BatchInputKind.ITEM_SHAPE else 1
    spec = graph[target]
    if spec.dtype is not batch.dtype or len(spec.shape) != rank or isinstance(spec.shape[0], int):
        raise _misfit(f"batch_input '{target}'", str(spec), f"{batch.dtype} of {rank} dimensions, the first one free")


def _misfit(what: str, expected: str, got: str) -> RepositoryError:
    return RepositoryError(
        f"config.pbtxt: {what} does not fit the graph: the graph has {expected}, the batch holds {got}",
        hint="correct config.pbtxt, or export the graph with this type and shape",
    )
