"""Ragged batches and sequences: parsed from a configuration and checked against the graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.repository.batch_tensors import (
    TEXT_ID_PARAMETER,
    BatchInput,
    BatchInputKind,
    BatchOutput,
    BatchTensors,
    SequenceState,
    SequenceTensors,
    check_batch_tensors,
    check_sequence_tensors,
    read_batch_tensors,
    read_sequence_tensors,
    refuse_text_id,
    withhold_text_id,
)
from graphkiln_backend.repository.config import guard_batch


def spec(name: str, *shape: int | str, dtype: DType = DType.FP32) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


RAGGED = 'input { name: "x" dims: [-1] allow_ragged_batch: true }'
COUNT = 'batch_input { kind: BATCH_ELEMENT_COUNT target_name: "n" data_type: TYPE_FP32 source_input: "x" }'
SCATTER = """
    output { name: "y" dims: [-1] }
    batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "y" source_input: "x" }
"""
SIGNATURE = Signature(inputs=(spec("x", "total"), spec("n", "rows")), outputs=(spec("y", "total"),))


def config(*texts: str, max_batch_size: int = 8) -> pb.ModelConfig:
    return text_format.Parse(f'name: "m" max_batch_size: {max_batch_size} {" ".join(texts)}', pb.ModelConfig())


def check(written: pb.ModelConfig, signature: Signature = SIGNATURE) -> None:
    check_batch_tensors(written, signature, read_batch_tensors(written).of_graph(signature))


class TestReading:
    @pytest.mark.parametrize("kind", BatchInputKind)
    def test_all_kinds_of_batch_input(self, kind: BatchInputKind) -> None:
        tensors = read_batch_tensors(config(RAGGED, COUNT.replace("BATCH_ELEMENT_COUNT", kind), SCATTER))
        assert tensors == BatchTensors(
            ragged={"x": 2},
            inputs=(BatchInput(kind=kind, targets=("n",), dtype=DType.FP32, source="x"),),
            outputs={"y": BatchOutput(source="x", shape=(-1, -1))},
        )

    @pytest.mark.parametrize("dims", ["dims: [-1, 3]", "dims: [-1, 3] reshape { shape: [3, -1] }"])
    def test_guard_dimension_is_not_counted(self, dims: str) -> None:
        written = config(RAGGED.replace("dims: [-1]", dims))
        assert read_batch_tensors(written).ragged == {"x": 3}
        if "reshape" not in dims:
            guard_batch(written)
            assert read_batch_tensors(written).ragged == {"x": 3}

    def test_graph_with_rows_has_no_ragged_input(self) -> None:
        rows = Signature(inputs=(spec("x", "batch", "n"),), outputs=(spec("y", "batch", "n"),))
        assert not read_batch_tensors(config(RAGGED)).of_graph(rows)
        assert read_batch_tensors(config(RAGGED)).of_graph(SIGNATURE)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (COUNT.replace("TYPE_FP32", "TYPE_INT64"), "is of type INT64"),
            (COUNT.replace('source_input: "x"', ""), "needs one source_input"),
            (SCATTER.replace('source_input: "x"', ""), "needs one source_input"),
            (SCATTER.replace('name: "y" dims', 'name: "z" dims'), "'y' is not among the outputs"),
        ],
    )
    def test_unsupported_batch_tensors(self, text: str, message: str) -> None:
        with pytest.raises(RepositoryError, match=message):
            read_batch_tensors(config(RAGGED, text))


class TestChecks:
    @pytest.mark.parametrize(
        ("texts", "inputs", "message"),
        [
            ((RAGGED, COUNT), (spec("x", "total"),), "batch_input 'n' is not in the graph of 'm'"),
            ((RAGGED, COUNT), (spec("x", "total"), spec("n", "rows", 1)), "batch_input 'n' does not fit the graph"),
            ((RAGGED, COUNT), (spec("x", "total"), spec("n", 4)), "batch_input 'n' does not fit the graph"),
            ((RAGGED, COUNT), (spec("x", "total"), spec("n", "r", dtype=DType.INT32)), "does not fit the graph"),
            ((RAGGED, COUNT.replace("ELEMENT_COUNT", "ITEM_SHAPE")), SIGNATURE.inputs, "FP32 of 2 dimensions"),
            ((COUNT,), SIGNATURE.inputs, "source_input 'x' is not among the inputs"),
            ((RAGGED,), (spec("x", 12),), "ragged input 'x' does not fit the graph"),
        ],
    )
    def test_batch_tensors_that_do_not_fit_the_graph(
        self, texts: tuple[str, ...], inputs: tuple[TensorSpec, ...], message: str
    ) -> None:
        with pytest.raises(RepositoryError, match=message):
            check(config(*texts), Signature(inputs=inputs, outputs=SIGNATURE.outputs))

    def test_model_without_batching_is_refused(self) -> None:
        with pytest.raises(RepositoryError, match="max_batch_size is 0"):
            check(config(RAGGED, COUNT, max_batch_size=0))


# Control inputs and states of `sequence_batching`: read, held to the graph, and kept out of requests.


def scalar(name: str, dtype: DType = DType.FP32, *dims: int | str) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=("batch", *(dims or (1,))))


def control(name: str, kind: str, values: str) -> str:
    return f'control_input {{ name: "{name}" control {{ kind: CONTROL_SEQUENCE_{kind} {values} }} }}'


def sequence_config(text: str, max_batch_size: int = 8) -> pb.ModelConfig:
    return text_format.Parse(
        f'name: "m" max_batch_size: {max_batch_size} sequence_batching {{ {text} }}', pb.ModelConfig()
    )


START = control("START", "START", "int32_false_true: [0, 1]")
END = control("END", "END", "fp32_false_true: [0, 1]")
READY = control("READY", "READY", "bool_false_true: [false, true]")
CORRID = control("CORRID", "CORRID", "data_type: TYPE_UINT64")
TEXT_ID = control("CORRID", "CORRID", "data_type: TYPE_STRING")
STATE = 'state { input_name: "IN" output_name: "OUT" data_type: TYPE_FP32 dims: [4] }'
SEQUENCE_SIGNATURE = Signature(
    inputs=(
        scalar("INPUT"), scalar("START", DType.INT32),
        scalar("END"), scalar("READY", DType.BOOL), scalar("CORRID", DType.UINT64),
        scalar("IN", DType.FP32, 4),
    ),
    outputs=(scalar("OUTPUT"), scalar("OUT", DType.FP32, "n")),
)  # fmt: skip


class TestReadingSequences:
    def test_control_inputs_of_all_types(self) -> None:
        tensors = read_sequence_tensors(sequence_config(START + END + READY + CORRID))
        assert tensors is not None
        expected = {"START": DType.INT32, "END": DType.FP32, "READY": DType.BOOL, "CORRID": DType.UINT64}
        assert tensors.controls == expected
        assert tensors.id_input == "CORRID"

    @pytest.mark.parametrize("initial", [False, True])
    def test_states(self, initial: bool) -> None:
        text = STATE[:-1] + ("initial_state { zero_data: true } }" if initial else "}")
        tensors = read_sequence_tensors(sequence_config(text))
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
    def test_idle_time_and_number_of_sequences(self, text: str, batch: int, idle_s: float, slots: int) -> None:
        tensors = read_sequence_tensors(sequence_config(text, batch))
        assert tensors is not None
        assert (tensors.idle_s, tensors.slots, tensors.batched) == (idle_s, slots, batch > 0)


class TestRequests:
    TENSORS = read_sequence_tensors(sequence_config(START + END + READY + CORRID + STATE)) or SequenceTensors()

    def test_named_state_is_also_an_output(self) -> None:
        assert self.TENSORS.of_requests(SEQUENCE_SIGNATURE, {"OUT"}).outputs == SEQUENCE_SIGNATURE.outputs


class TestSequenceChecks:
    def test_shapes_without_batching(self) -> None:
        signature = Signature(
            inputs=(TensorSpec(name="START", dtype=DType.INT32, shape=(1,)),),
            outputs=(scalar("OUTPUT"),),
        )
        check_sequence_tensors(sequence_config(START, 0), signature)
        with pytest.raises(RepositoryError, match="does not fit the graph"):
            check_sequence_tensors(sequence_config(START, 8), signature)

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
        ],
    )
    def test_sequence_tensors_that_do_not_fit_the_graph(self, text: str, message: str) -> None:
        with pytest.raises(RepositoryError, match=message):
            check_sequence_tensors(sequence_config(text), SEQUENCE_SIGNATURE)

    @pytest.mark.parametrize("name", ["START", "IN"])
    def test_control_input_declared_as_input_is_refused(self, name: str) -> None:
        written = sequence_config(START + STATE)
        written.input.add(name=name)
        with pytest.raises(RepositoryError, match=f"input '{name}' is also a control input or a state"):
            check_sequence_tensors(written, SEQUENCE_SIGNATURE)


class TestDefaults:
    def test_optional_state_input(self) -> None:
        (state,) = (scalar for scalar in SEQUENCE_SIGNATURE.inputs if scalar.name == "IN")
        others = tuple(scalar for scalar in SEQUENCE_SIGNATURE.inputs if scalar is not state)
        signature = replace(SEQUENCE_SIGNATURE, inputs=others, optional_inputs=(state,))
        check_sequence_tensors(sequence_config(START + STATE), signature)
        tensors = read_sequence_tensors(sequence_config(START + STATE))
        assert tensors is not None
        assert tensors.of_requests(signature).optional_inputs == ()


class TestTextId:
    def test_text_id_is_withheld_from_triton(self) -> None:
        written = sequence_config(START + TEXT_ID)
        withhold_text_id(written)
        assert [tensor.name for tensor in written.sequence_batching.control_input] == ["START"]
        assert written.parameters[TEXT_ID_PARAMETER].string_value == "CORRID"
        tensors = read_sequence_tensors(written)
        assert tensors is not None
        assert tensors.controls == {"START": DType.INT32, "CORRID": DType.BYTES}
        assert tensors.id_input == "CORRID"
        refuse_text_id(written)

    def test_text_id_is_refused_without_withholding(self) -> None:
        with pytest.raises(RepositoryError, match="takes no CONTROL_SEQUENCE_CORRID of TYPE_STRING"):
            refuse_text_id(sequence_config(TEXT_ID))
