"""A client from nothing but Triton's .proto files and grpcio, as a Go or Java program would have one.

Usage: generated_stubs.py HOST:PORT
"""

import sys

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

with grpc.insecure_channel(sys.argv[1]) as channel:
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    metadata = stub.ModelMetadata(service_pb2.ModelMetadataRequest(name="digits"))
    (declared,) = metadata.inputs
    request = service_pb2.ModelInferRequest(model_name="digits", id="42")
    # Typed contents instead of raw bytes: the form that generated code suggests.
    tensor = request.inputs.add(name=declared.name, datatype=declared.datatype, shape=[1, 1, 32, 32])
    tensor.contents.fp32_contents.extend([0.0] * 1024)
    answer = stub.ModelInfer(request)
    assert answer.id == "42"
    print(answer.outputs[0].shape, len(answer.raw_output_contents[0]))
