"""Malformed requests over raw gRPC among good ones: each fails alone.

Inputs that end a server are not kept here; the guard against them is tested in `tests/unit/triton`.
"""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np
import pytest
import tritonclient.grpc.service_pb2 as pb
import zoo
from onnx import TensorProto
from running import Server, Serving
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

pytestmark = [pytest.mark.server, pytest.mark.wide]

ONE = "instance_group { count: 1 kind: KIND_CPU }"
BATCHES = f"max_batch_size: 8 {ONE} dynamic_batching {{ max_queue_delay_microseconds: 5000 preferred_batch_size: [8] }}"
PAIR = np.array([3, 4], np.float32).tobytes()
WORDS = b"\1\0\0\0a\1\0\0\0b"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hostile")
    store = folder / "store"
    zoo.add(store, "pair", zoo.identity(("batch", 2)), BATCHES)
    zoo.add(store, "varying", zoo.identity(("batch", "width")), BATCHES)
    zoo.add(store, "texts", zoo.identity(("batch", "width"), TensorProto.STRING), BATCHES)
    zoo.add(store, "halves", zoo.identity(("batch", "width"), TensorProto.BFLOAT16), BATCHES)
    zoo.add(store, "line", zoo.identity(("width",)), f'max_batch_size: 0 {ONE} input {{ name: "x" dims: [-1] }}')
    zoo.add(store, "words", zoo.identity(("batch", 2), TensorProto.STRING), BATCHES)
    zoo.add(store, "half", zoo.identity(("batch", 1, 1), TensorProto.BFLOAT16), BATCHES)
    zoo.add(store, "scalars", zoo.identity(("batch",)), BATCHES)
    with Serving(folder, "--model-store", store) as running:
        running.wait_ready()
        yield running


@pytest.fixture
def stub(server: Server) -> Iterator[GRPCInferenceServiceStub]:
    with grpc.insecure_channel(server.grpc_url.removeprefix("grpc://")) as channel:
        yield GRPCInferenceServiceStub(channel)


def request(model: str, datatype: str, shape: list[int], content: bytes) -> pb.ModelInferRequest:
    made = pb.ModelInferRequest(model_name=model, raw_input_contents=[content])
    made.inputs.add(name="x", datatype=datatype, shape=shape)
    return made


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        (request("pair", "FP32", [-1, 2], PAIR), request("pair", "FP32", [1, 2], PAIR)),
        (request("pair", "INT8", [1, 2], b"\0\0"), request("pair", "FP32", [1, 2], PAIR)),
        (request("pair", "FP32", [1, 2], PAIR * 3), request("pair", "FP32", [1, 2], PAIR)),
        (request("pair", "FP32", [9, 2], PAIR * 9), request("pair", "FP32", [1, 2], PAIR)),
    ],
)
def test_malformed_request_fails_alone(
    stub: GRPCInferenceServiceStub, bad: pb.ModelInferRequest, good: pb.ModelInferRequest
) -> None:
    calls = [(index % 3 == 0, stub.ModelInfer.future(good if index % 3 else bad, timeout=30)) for index in range(90)]
    for is_bad, call in calls:
        error = call.exception()
        if is_bad:
            assert error is not None
            assert error.code() in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL}, error
        else:
            assert error is None, error
            assert call.result().raw_output_contents == good.raw_input_contents


def test_guard_is_invisible_to_clients(stub: GRPCInferenceServiceStub) -> None:
    (tensor,) = stub.ModelMetadata(pb.ModelMetadataRequest(name="varying")).inputs
    assert list(tensor.shape) == [-1, -1]
