"""Ragged inputs, `batch_input` and `batch_output`: read, and held to the graph."""

from __future__ import annotations

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.repository.batch_guard import guard_batch
from graphkiln_backend.repository.batch_tensors import (
    BatchInput,
    BatchInputKind,
    BatchOutput,
    BatchTensors,
    check_batch_tensors,
    read_batch_tensors,
)


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
    def test_most_models_have_none(self) -> None:
        assert not read_batch_tensors(config('input { name: "x" dims: [3] }'))

    @pytest.mark.parametrize("kind", BatchInputKind)
    def test_every_kind(self, kind: BatchInputKind) -> None:
        tensors = read_batch_tensors(config(RAGGED, COUNT.replace("BATCH_ELEMENT_COUNT", kind), SCATTER))
        assert tensors == BatchTensors(
            ragged={"x": 2},
            inputs=(BatchInput(kind=kind, targets=("n",), dtype=DType.FP32, source="x"),),
            outputs={"y": BatchOutput(source="x", shape=(-1, -1))},
        )

    @pytest.mark.parametrize("dims", ["dims: [-1, 3]", "dims: [-1, 3] reshape { shape: [3, -1] }"])
    def test_the_guard_of_the_batch_is_no_dimension_of_a_request(self, dims: str) -> None:
        written = config(RAGGED.replace("dims: [-1]", dims))
        assert read_batch_tensors(written).ragged == {"x": 3}
        if "reshape" not in dims:
            guard_batch(written)
            assert read_batch_tensors(written).ragged == {"x": 3}

    def test_rows_of_unequal_lengths_are_no_ragged_input(self) -> None:
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
    def test_what_nobody_offers_is_refused(self, text: str, message: str) -> None:
        with pytest.raises(RepositoryError, match=message):
            read_batch_tensors(config(RAGGED, text))

    def test_requests_hold_rows(self) -> None:
        found = read_batch_tensors(config(RAGGED, COUNT, SCATTER)).of_requests(SIGNATURE)
        assert found.inputs == (spec("x", "x.0", "x.1"),)
        assert found.outputs == (spec("y", "y.0", "y.1"),)


class TestChecks:
    def test_what_fits_passes(self) -> None:
        check(config(RAGGED, COUNT, SCATTER))

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
    def test_what_does_not_fit_is_refused(
        self, texts: tuple[str, ...], inputs: tuple[TensorSpec, ...], message: str
    ) -> None:
        with pytest.raises(RepositoryError, match=message):
            check(config(*texts), Signature(inputs=inputs, outputs=SIGNATURE.outputs))

    def test_a_model_without_batches_is_refused(self) -> None:
        with pytest.raises(RepositoryError, match="max_batch_size is 0"):
            check(config(RAGGED, COUNT, max_batch_size=0))
