"""Control inputs and states of `sequence_batching`: read, held to the graph, and kept out of requests."""

from __future__ import annotations

from dataclasses import replace

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.repository.sequence_tensors import (
    TEXT_ID_PARAMETER,
    SequenceState,
    SequenceTensors,
    check_sequence_tensors,
    read_sequence_tensors,
    refuse_text_id,
    withhold_text_id,
)


def spec(name: str, dtype: DType = DType.FP32, *dims: int | str) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=("batch", *(dims or (1,))))


def control(name: str, kind: str, values: str) -> str:
    return f'control_input {{ name: "{name}" control {{ kind: CONTROL_SEQUENCE_{kind} {values} }} }}'


def config(text: str, max_batch_size: int = 8) -> pb.ModelConfig:
    return text_format.Parse(
        f'name: "m" max_batch_size: {max_batch_size} sequence_batching {{ {text} }}', pb.ModelConfig()
    )


START = control("START", "START", "int32_false_true: [0, 1]")
END = control("END", "END", "fp32_false_true: [0, 1]")
READY = control("READY", "READY", "bool_false_true: [false, true]")
CORRID = control("CORRID", "CORRID", "data_type: TYPE_UINT64")
TEXT_ID = control("CORRID", "CORRID", "data_type: TYPE_STRING")
STATE = 'state { input_name: "IN" output_name: "OUT" data_type: TYPE_FP32 dims: [4] }'
SIGNATURE = Signature(
    inputs=(
        spec("INPUT"), spec("START", DType.INT32), spec("END"), spec("READY", DType.BOOL), spec("CORRID", DType.UINT64),
        spec("IN", DType.FP32, 4),
    ),
    outputs=(spec("OUTPUT"), spec("OUT", DType.FP32, "n")),
)  # fmt: skip


class TestReading:
    def test_a_model_without_sequences_has_none(self) -> None:
        assert read_sequence_tensors(pb.ModelConfig()) is None

    def test_controls_of_every_type(self) -> None:
        tensors = read_sequence_tensors(config(START + END + READY + CORRID))
        assert tensors is not None
        expected = {"START": DType.INT32, "END": DType.FP32, "READY": DType.BOOL, "CORRID": DType.UINT64}
        assert tensors.controls == expected
        assert tensors.id_input == "CORRID"

    @pytest.mark.parametrize("initial", [False, True])
    def test_states(self, initial: bool) -> None:
        text = STATE[:-1] + ("initial_state { zero_data: true } }" if initial else "}")
        tensors = read_sequence_tensors(config(text))
        assert tensors is not None
        assert tensors.states == (
            SequenceState(input_name="IN", output_name="OUT", dtype=DType.FP32, dims=(4,), initialized=initial),
        )

    @pytest.mark.parametrize(
        ("text", "batch", "idle_s", "slots"),
        [
            ("", 8, 1.0, 8),
            ("direct {}", 0, 1.0, 1),
            ("max_sequence_idle_microseconds: 2500000 oldest { max_candidate_sequences: 100 }", 8, 2.5, 100),
        ],
    )
    def test_how_long_and_how_many(self, text: str, batch: int, idle_s: float, slots: int) -> None:
        tensors = read_sequence_tensors(config(text, batch))
        assert tensors is not None
        assert (tensors.idle_s, tensors.slots, tensors.batched) == (idle_s, slots, batch > 0)


class TestRequests:
    TENSORS = read_sequence_tensors(config(START + END + READY + CORRID + STATE)) or SequenceTensors()

    def test_hold_neither_controls_nor_states(self) -> None:
        found = self.TENSORS.of_requests(SIGNATURE)
        assert [spec.name for spec in found.inputs] == ["INPUT"]
        assert [spec.name for spec in found.outputs] == ["OUTPUT"]

    def test_a_state_is_an_output_for_those_that_name_it(self) -> None:
        assert self.TENSORS.of_requests(SIGNATURE, {"OUT"}).outputs == SIGNATURE.outputs


class TestChecks:
    def test_what_fits_passes(self) -> None:
        check_sequence_tensors(config(START + END + READY + CORRID + STATE), SIGNATURE)
        check_sequence_tensors(pb.ModelConfig(), SIGNATURE)

    def test_without_a_batch_the_shapes_are_whole(self) -> None:
        signature = Signature(
            inputs=(TensorSpec(name="START", dtype=DType.INT32, shape=(1,)),), outputs=(spec("OUTPUT"),)
        )
        check_sequence_tensors(config(START, 0), signature)
        with pytest.raises(RepositoryError, match="does not fit the graph"):
            check_sequence_tensors(config(START, 8), signature)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (START.replace("int32", "fp32"), "control input 'START' does not fit the graph: expected START INT32"),
            (CORRID.replace("UINT64", "INT32"), "got INT32 with dims"),
            (control("GO", "READY", "int32_false_true: [0, 1]"), "control input 'GO' is not in the graph of 'm'"),
            (STATE.replace("[4]", "[5]"), r"state input 'IN' does not fit"),
            (STATE.replace("FP32", "INT64"), r"state input 'IN' does not fit"),
            (STATE.replace('"OUT"', '"NONE"'), "state output 'NONE' is not in the graph"),
            (STATE + STATE, "names 'IN' twice"),
            ("iterative_sequence: true", "requests iterative_sequence"),
            ("} response_cache { enable: true", "requests response_cache for sequences"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, text: str, message: str) -> None:
        with pytest.raises(RepositoryError, match=message):
            check_sequence_tensors(config(text), SIGNATURE)

    @pytest.mark.parametrize("name", ["START", "IN"])
    def test_an_input_that_requests_hold_too_is_refused(self, name: str) -> None:
        written = config(START + STATE)
        written.input.add(name=name)
        with pytest.raises(RepositoryError, match=f"input '{name}' is also a control input or a state"):
            check_sequence_tensors(written, SIGNATURE)


class TestDefaults:
    def test_a_state_for_which_the_graph_has_a_default_is_no_input_of_requests(self) -> None:
        (state,) = (spec for spec in SIGNATURE.inputs if spec.name == "IN")
        others = tuple(spec for spec in SIGNATURE.inputs if spec is not state)
        signature = replace(SIGNATURE, inputs=others, optional_inputs=(state,))
        check_sequence_tensors(config(START + STATE), signature)
        tensors = read_sequence_tensors(config(START + STATE))
        assert tensors is not None
        assert tensors.of_requests(signature).optional_inputs == ()


class TestTextId:
    def test_is_kept_from_triton_and_read_again(self) -> None:
        written = config(START + TEXT_ID)
        withhold_text_id(written)
        assert [tensor.name for tensor in written.sequence_batching.control_input] == ["START"]
        assert written.parameters[TEXT_ID_PARAMETER].string_value == "CORRID"
        tensors = read_sequence_tensors(written)
        assert tensors is not None
        assert tensors.controls == {"START": DType.INT32, "CORRID": DType.BYTES}
        assert tensors.id_input == "CORRID"
        refuse_text_id(written)

    @pytest.mark.parametrize("written", [config(START + CORRID), pb.ModelConfig()])
    def test_nothing_else_is(self, written: pb.ModelConfig) -> None:
        before = str(written)
        withhold_text_id(written)
        refuse_text_id(written)
        assert str(written) == before

    def test_is_refused_where_triton_would_provide_it(self) -> None:
        with pytest.raises(RepositoryError, match="takes no CONTROL_SEQUENCE_CORRID of TYPE_STRING"):
            refuse_text_id(config(TEXT_ID))
