"""Inputs of a graph that Triton's sequence batcher provides, and outputs that become inputs of the next request.

A request of a sequence holds neither: Triton adds the control inputs (start, end, ready, correlation id), and the
states are kept by `triton.sequences`, because Triton's Python stub hands none back.

Source: Triton, `model_config.proto` (`ModelSequenceBatching`) and "Stateful Models".
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.signature import Signature, TensorSpec

_DEFAULT_IDLE_S = 1.0
"""Source: Triton core, `SEQUENCE_IDLE_DEFAULT_MICROSECONDS`."""
TEXT_ID_PARAMETER = "graphkiln_correlation_id_input"
"""Names the input that takes a correlation id as text, where Triton is not to provide it."""
_TYPE_OF_BOOLEAN = {
    "int32_false_true": DType.INT32,
    "fp32_false_true": DType.FP32,
    "bool_false_true": DType.BOOL,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceState:
    """An output of a request that is an input of the next request of its sequence.

    Attributes:
        input_name: What the next request is given.
        output_name: What this request computes.
        dtype: Element type of both.
        dims: Sizes without the batch; -1 where they vary.
        initialized: Whether config.pbtxt says what the first request is given; else zeros (empty strings).
    """

    input_name: str
    output_name: str
    dtype: DType
    dims: tuple[int, ...]
    initialized: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceTensors:
    """What `sequence_batching` says of a graph's tensors.

    Attributes:
        controls: Element type of each control input, by name.
        id_input: The control input that takes the correlation id, or empty.
        states: Kept from request to request.
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
        """What a request holds and is given: neither control inputs nor states.

        Args:
            signature: Of the graph.
            named_outputs: Outputs that are given although they are states.
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
        """Inputs that no request holds."""
        return frozenset((*self.controls, *(state.input_name for state in self.states)))


def read_sequence_tensors(config: Any) -> SequenceTensors | None:
    """What Triton's `ModelConfig` message says; None for a model without sequences.

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
    """Keeps Triton from providing a correlation id as text: its Python backend (24.10) refuses what it provides.

    The instance provides it itself.

    Args:
        config: Triton's `ModelConfig` message, complete; changed in place.
    """
    for tensor in config.sequence_batching.control_input if config.HasField("sequence_batching") else ():
        if any(map(_is_text, tensor.control)):
            config.parameters[TEXT_ID_PARAMETER].string_value = tensor.name
            config.sequence_batching.control_input.remove(tensor)
            return


def refuse_text_id(config: Any) -> None:
    """Refuses a correlation id as text where Triton provides it: it would fail every request.

    Raises:
        RepositoryError: The configuration requests it.
    """
    tensors = read_sequence_tensors(config)
    if tensors and TEXT_ID_PARAMETER not in config.parameters and tensors.controls.get(tensors.id_input) is DType.BYTES:
        raise RepositoryError(
            f"config.pbtxt of '{config.name}': Triton's Python backend takes no CONTROL_SEQUENCE_CORRID of TYPE_STRING",
            hint="serve the model with `graphkiln serve`, or use TYPE_UINT64",
        )


def _is_text(control: Any) -> bool:
    return bool(control.data_type) and DType.from_config(control.data_type) is DType.BYTES


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
    """Compares what a configuration says of sequences with the graph.

    Args:
        config: Triton's `ModelConfig` message, its `max_batch_size` completed.
        signature: Of the graph.

    Raises:
        RepositoryError: A tensor is not in the graph or does not fit, or something is requested that nobody offers.
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
    requested = {
        "iterative_sequence": getattr(batching, "iterative_sequence", False),
        "use_growable_memory": any(getattr(state, "use_growable_memory", False) for state in batching.state),
        "response_cache": config.response_cache.enable,
    }
    reasons = {
        "iterative_sequence": "a saved graph computes each request once and schedules none again",
        "use_growable_memory": "states are kept in the memory of the instance, not in CUDA's",
        "response_cache": "a cached response knows nothing of the sequence that asks",
    }
    for key, value in requested.items():
        if value:
            raise RepositoryError(
                f"config.pbtxt of '{config.name}' requests {key} for sequences, which is not offered: {reasons[key]}",
                hint=f"leave {key} out",
            )


def _refuse_duplicates(config: Any, tensors: SequenceTensors) -> None:
    """Refuses inputs that both the server and a request would provide, and states that would overwrite each other."""
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
