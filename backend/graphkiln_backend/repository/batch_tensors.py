"""Read ragged batches and sequences from config.pbtxt: tensors of a graph that are not rows of a batch.

Requests of different lengths share a batch in which an input with `allow_ragged_batch` is one row of all their
elements; `batch_input` gives the graph the offsets of requests, and `batch_output` divides its outputs.

Source: Triton, `model_config.proto` (`BatchInput`, `BatchOutput`) and "Ragged Batching".
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.signature import Signature, TensorSpec, free_dim

# Source: Triton core, `ValidateBatchIO`.
_COUNT_TYPES = (DType.INT32, DType.FP32)


class BatchInputKind(enum.StrEnum):
    """Kind of a `batch_input`, by Triton's name."""

    ELEMENT_COUNT = "BATCH_ELEMENT_COUNT"
    ACCUMULATED_ELEMENT_COUNT = "BATCH_ACCUMULATED_ELEMENT_COUNT"
    ACCUMULATED_ELEMENT_COUNT_WITH_ZERO = "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"
    MAX_ELEMENT_COUNT_AS_SHAPE = "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"
    ITEM_SHAPE = "BATCH_ITEM_SHAPE"
    ITEM_SHAPE_FLATTEN = "BATCH_ITEM_SHAPE_FLATTEN"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchInput:
    """Inputs that describe another input of the batch.

    Attributes:
        kind: Content of the inputs.
        targets: Names of the inputs.
        dtype: Element type of the inputs.
        source: Name of the described input.
    """

    kind: BatchInputKind
    targets: tuple[str, ...]
    dtype: DType
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOutput:
    """An output that is split between requests in proportion to the elements of an input.

    Attributes:
        source: The input.
        shape: Shape in a response, with the batch; -1 for the same size as in the request's input.
    """

    source: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTensors:
    """Tensors that a configuration does not declare as rows of a batch.

    Attributes:
        ragged: Number of dimensions of each ragged input in a request, with the batch.
        inputs: Inputs that are computed from the batch.
        outputs: Outputs that are split by the elements of an input, by name.
    """

    ragged: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[BatchInput, ...] = ()
    outputs: Mapping[str, BatchOutput] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.ragged or self.inputs or self.outputs)

    def of_graph(self, signature: Signature) -> BatchTensors:
        """Leave out ragged inputs that the graph takes as rows: requests of equal shapes then share a batch.

        Args:
            signature: Signature of the graph.
        """
        rows = {spec.name for spec in (*signature.inputs, *signature.optional_inputs) if len(spec.shape) != 1}
        return replace(self, ragged={name: rank for name, rank in self.ragged.items() if name not in rows})

    def of_requests(self, signature: Signature) -> Signature:
        """Signature of requests and responses, each tensor with the batch first.

        Args:
            signature: Signature of the graph.
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
            signature: Signature of the graph.
        """
        others = {*self.ragged, *self.input_names}
        return replace(
            signature,
            inputs=tuple(spec for spec in signature.inputs if spec.name not in others),
            outputs=tuple(spec for spec in signature.outputs if spec.name not in self.outputs),
        )

    @property
    def input_names(self) -> frozenset[str]:
        """Names of the inputs that are not part of a request."""
        return frozenset(target for batch_input in self.inputs for target in batch_input.targets)


def _of_rank(spec: TensorSpec, ranks: Mapping[str, int]) -> TensorSpec:
    if spec.name not in ranks:
        return spec
    rest = (free_dim(spec.name, axis) for axis in range(1, ranks[spec.name]))
    return replace(spec, shape=(free_dim(spec.name, 0), *rest))


def read_batch_tensors(config: Any) -> BatchTensors:
    """Read batch tensors from Triton's `ModelConfig` message.

    Raises:
        RepositoryError: The configuration uses an unsupported feature.
        ManifestError: A data type is not known.
    """
    batched = config.max_batch_size > 0
    return BatchTensors(
        ragged={tensor.name: _rank(tensor) for tensor in config.input if tensor.allow_ragged_batch and batched},
        inputs=tuple(map(_input, config.batch_input)),
        outputs={name: _output(batch, name, config) for batch in config.batch_output for name in batch.target_name},
    )


def _rank(tensor: Any) -> int:
    """Dimensions of an input, the batch among them, without the one that `config.guard_batch` adds."""
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
    """Check the batch tensors of a configuration against the graph.

    Args:
        config: Triton's `ModelConfig` message.
        signature: Signature of the graph.
        tensors: Batch tensors of the configuration.

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


# Inputs of a graph that Triton's sequence batcher provides, and outputs that become inputs of the next request.
#
# A request of a sequence holds neither: Triton adds the control inputs (start, end, ready, correlation id), and the
# states are kept by `triton.sequences`, because Triton's Python stub hands none back.
#
# Source: Triton, `model_config.proto` (`ModelSequenceBatching`) and "Stateful Models".

# Source: Triton core, `SEQUENCE_IDLE_DEFAULT_MICROSECONDS`.
_DEFAULT_IDLE_S = 1.0
# Parameter with the name of the input for a correlation id as text, which Triton does not provide.
TEXT_ID_PARAMETER = "graphkiln_correlation_id_input"
_TYPE_OF_BOOLEAN = {
    "int32_false_true": DType.INT32,
    "fp32_false_true": DType.FP32,
    "bool_false_true": DType.BOOL,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceState:
    """An output of a request that is an input of the next request of its sequence.

    Attributes:
        input_name: Input of the next request.
        output_name: Output of this request.
        dtype: Element type of both.
        dims: Sizes without the batch; -1 where they vary.
        initialized: Whether config.pbtxt has an initial state; without one it is zeros (empty strings).
    """

    input_name: str
    output_name: str
    dtype: DType
    dims: tuple[int, ...]
    initialized: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceTensors:
    """Tensors that `sequence_batching` declares.

    Attributes:
        controls: Element type of each control input, by name.
        id_input: The control input that takes the correlation id, or empty.
        states: States that are kept between requests.
        idle_s: Seconds without a request after which Triton ends a sequence.
        batched: Whether the first dimension of every tensor is the batch.
        slots: Sequences that an instance may have at a time.
    """

    controls: Mapping[str, DType] = field(default_factory=dict)
    id_input: str = ""
    states: tuple[SequenceState, ...] = ()
    idle_s: float = _DEFAULT_IDLE_S
    batched: bool = False
    slots: int = 1

    def of_requests(self, signature: Signature, named_outputs: Collection[str] = ()) -> Signature:
        """Signature of requests and responses, without control inputs and states.

        Args:
            signature: Signature of the graph.
            named_outputs: States that are also outputs of the response.
        """
        hidden = {state.output_name for state in self.states} - set(named_outputs)
        return replace(
            signature,
            inputs=tuple(spec for spec in signature.inputs if spec.name not in self.input_names),
            optional_inputs=tuple(spec for spec in signature.optional_inputs if spec.name not in self.input_names),
            outputs=tuple(spec for spec in signature.outputs if spec.name not in hidden),
        )

    @property
    def input_names(self) -> frozenset[str]:
        """Names of the inputs that are not part of a request."""
        return frozenset((*self.controls, *(state.input_name for state in self.states)))


def read_sequence_tensors(config: Any) -> SequenceTensors | None:
    """Read sequence tensors from Triton's `ModelConfig` message; None for a model without sequences.

    Raises:
        RepositoryError: A state has no data type.
        ManifestError: A data type is not known.
    """
    if not config.HasField("sequence_batching"):
        return None
    batching = config.sequence_batching
    oldest = batching.oldest.max_candidate_sequences if batching.HasField("oldest") else 0
    text_id = config.parameters[TEXT_ID_PARAMETER].string_value if TEXT_ID_PARAMETER in config.parameters else ""
    typed = [tensor.name for tensor in batching.control_input for control in tensor.control if control.data_type]
    return SequenceTensors(
        controls={**dict(_controls(batching)), **({text_id: DType.BYTES} if text_id else {})},
        id_input=text_id or next(iter(typed), ""),
        states=tuple(_state(state) for state in batching.state),
        idle_s=batching.max_sequence_idle_microseconds / 1e6 or _DEFAULT_IDLE_S,
        batched=config.max_batch_size > 0,
        slots=oldest or max(1, config.max_batch_size),
    )


def _controls(batching: Any) -> Iterator[tuple[str, DType]]:
    for tensor in batching.control_input:
        for control in tensor.control:
            types = [dtype for name, dtype in _TYPE_OF_BOOLEAN.items() if getattr(control, name)]
            if control.data_type:
                types.append(DType.from_config(control.data_type))
            if types:  # Triton itself refuses a control without one, or with two
                yield tensor.name, types[0]


def withhold_text_id(config: Any) -> None:
    """Keep Triton from providing a correlation id as text, which its Python backend (24.10) refuses.

    The instance provides it itself.

    Args:
        config: Triton's `ModelConfig` message, complete; changed in place.
    """
    for tensor in config.sequence_batching.control_input if config.HasField("sequence_batching") else ():
        types = [DType.from_config(control.data_type) for control in tensor.control if control.data_type]
        if DType.BYTES in types:
            config.parameters[TEXT_ID_PARAMETER].string_value = tensor.name
            config.sequence_batching.control_input.remove(tensor)
            return


def refuse_text_id(config: Any) -> None:
    """Refuse a correlation id as text where Triton provides it: it would fail every request.

    Raises:
        RepositoryError: The configuration requests it.
    """
    tensors = read_sequence_tensors(config)
    if tensors and TEXT_ID_PARAMETER not in config.parameters and tensors.controls.get(tensors.id_input) is DType.BYTES:
        raise RepositoryError(
            f"config.pbtxt of '{config.name}': Triton's Python backend takes no CONTROL_SEQUENCE_CORRID of TYPE_STRING",
            hint="serve the model with `graphkiln serve`, or use TYPE_UINT64",
        )


def _state(state: Any) -> SequenceState:
    if not state.data_type:
        raise RepositoryError(f"config.pbtxt: state '{state.input_name}' has no data_type", hint="write one")
    return SequenceState(
        input_name=state.input_name,
        output_name=state.output_name,
        dtype=DType.from_config(state.data_type),
        dims=tuple(state.dims),
        initialized=bool(state.initial_state),
    )


def check_sequence_tensors(config: Any, signature: Signature) -> None:
    """Check the sequence tensors of a configuration against the graph.

    Args:
        config: Triton's `ModelConfig` message, its `max_batch_size` completed.
        signature: Signature of the graph.

    Raises:
        RepositoryError: A tensor is not in the graph or does not fit, or the request is not supported.
        ManifestError: A data type is not known.
    """
    tensors = read_sequence_tensors(config)
    if tensors is None:
        return
    _refuse_unsupported(config)
    _refuse_duplicates(config, tensors)
    inputs = {spec.name: spec for spec in (*signature.inputs, *signature.optional_inputs)}
    outputs = {spec.name: spec for spec in signature.outputs}
    batched = config.max_batch_size > 0
    for name, dtype in tensors.controls.items():
        _check("control input", _find(name, inputs, "control input", config.name), dtype, (1,), batched=batched)
    for state in tensors.states:
        for kind, name, specs in (("input", state.input_name, inputs), ("output", state.output_name, outputs)):
            _check(f"state {kind}", _find(name, specs, f"state {kind}", config.name), state.dtype, state.dims,
                   batched=batched)  # fmt: skip


def _refuse_unsupported(config: Any) -> None:
    batching = config.sequence_batching
    growable = any(getattr(state, "use_growable_memory", False) for state in batching.state)
    unsupported = (
        ("iterative_sequence", getattr(batching, "iterative_sequence", False), "a saved graph runs once per request"),
        ("use_growable_memory", growable, "states are kept in the memory of the instance, not in CUDA's"),
    )
    for key, requested, reason in unsupported:
        if requested:
            raise RepositoryError(
                f"config.pbtxt of '{config.name}' requests {key} for sequences, which is not supported: {reason}",
                hint=f"leave {key} out",
            )


def _refuse_duplicates(config: Any, tensors: SequenceTensors) -> None:
    """Refuse inputs that both the server and a request would provide, and states that overwrite each other."""
    both = sorted(tensors.input_names & {tensor.name for tensor in config.input})
    if both:
        raise RepositoryError(
            f"config.pbtxt of '{config.name}': input '{both[0]}' is also a control input or a state",
            hint="leave it out of `input`: Triton provides it",
        )
    names = [*tensors.controls, *(state.input_name for state in tensors.states)]
    names += [f"{state.output_name} (output)" for state in tensors.states]
    for name in names:
        if names.count(name) > 1:
            raise RepositoryError(f"config.pbtxt of '{config.name}': sequence_batching names '{name}' twice")


def _find(name: str, specs: Mapping[str, TensorSpec], kind: str, model: str) -> TensorSpec:
    if name not in specs:
        raise RepositoryError(
            f"config.pbtxt: {kind} '{name}' is not in the graph of '{model}'",
            hint=f"the graph has {', '.join(map(str, specs.values()))}",
        )
    return specs[name]


def _check(kind: str, spec: TensorSpec, dtype: DType, dims: tuple[int, ...], *, batched: bool) -> None:
    shape = spec.shape[1:] if batched else spec.shape
    fits = len(shape) == len(dims) and all(
        isinstance(size, str) or dim in (-1, size) for size, dim in zip(shape, dims, strict=True)
    )
    if spec.dtype is not dtype or not fits:
        without = " (without the batch)" if batched else ""
        raise RepositoryError(
            f"config.pbtxt: {kind} '{spec.name}' does not fit the graph: expected {spec}, "
            f"got {dtype} with dims {list(dims)}{without}",
            hint="correct sequence_batching, or export the graph with this type and shape",
        )
