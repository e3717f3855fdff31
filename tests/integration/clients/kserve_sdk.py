"""A user of KServe's Python SDK: tensors of every type by REST and gRPC, and health.

Usage: kserve_sdk.py HTTP_URL GRPC_HOST:PORT PICTURE

Prints as JSON, for each question, the response or the exception that the SDK raised. `types` and `FP16` are models that
return their inputs `NAME_in` as `NAME`; `digits.images` classifies encoded images.
"""

import asyncio
import json
import logging
import sys
from pathlib import Path

import numpy as np
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
from kserve.inference_client import RESTConfig
from kserve.protocol.infer_type import RequestedOutput
from tensors_of_every_type import ODD, SHARED

CASES = {
    **SHARED,
    "FP16, NaN and infinity": ("FP16", {"FP16": ODD.astype(np.float16)}),
}


def request(model, arrays, *, binary):
    inputs = [InferInput(f"{name}_in", list(array.shape), name) for name, array in arrays.items()]
    for tensor, array in zip(inputs, arrays.values(), strict=True):
        tensor.set_data_from_numpy(array, binary_data=binary)
    outputs = [RequestedOutput(name, {"binary_data": binary}) for name in arrays]
    return InferRequest(model, inputs, request_id="mine", request_outputs=outputs)


def compare(response, arrays):
    assert response.id == "mine", response.id
    assert len(response.outputs) == len(arrays), response.outputs
    for name, sent in arrays.items():
        received = response.get_output_by_name(name).as_numpy()
        assert received.dtype == sent.dtype, f"{name}: {received.dtype}"
        if sent.dtype == object:  # as text where values came as JSON
            received = np.vectorize(lambda each: each.encode() if isinstance(each, str) else each, "O")(received)
        np.testing.assert_array_equal(received, sent, name)
    return "same"


async def ask_rest(client, url, case, *, binary):
    model, arrays = CASES[case]
    return compare(await client.infer(url, request(model, arrays, binary=binary), model_name=model), arrays)


async def ask_grpc(client, case, *, binary):
    model, arrays = CASES[case]
    return compare(await client.infer(request(model, arrays, binary=binary)), arrays)


def picture_request(picture):
    image = InferInput("IMAGE", [1, 1], "BYTES")
    image.set_data_from_numpy(np.array([[picture]], object))
    return InferRequest("digits.images", [image])


def best(response):
    return int(response.get_output_by_name("OUTPUT_0").as_numpy().argmax())


async def classify_by_rest(client, url, picture):
    return best(await client.infer(url, picture_request(picture), model_name="digits.images"))


async def classify_by_grpc(client, picture):
    return best(await client.infer(picture_request(picture)))


async def outcome(question):
    try:
        return await question
    except Exception as error:
        return f"{type(error).__name__}: {error}"


async def main(url, grpc_address, picture):
    found, picture = {}, Path(picture).read_bytes()
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as rest, InferenceGRPCClient(grpc_address) as grpc:
        for case in CASES:
            for form, binary in (("values", False), ("binary", True)):
                found[f"REST {form}: {case}"] = await outcome(ask_rest(rest, url, case, binary=binary))
                found[f"gRPC {form}: {case}"] = await outcome(ask_grpc(grpc, case, binary=binary))
        found["REST picture"] = await outcome(classify_by_rest(rest, url, picture))
        found["gRPC picture"] = await outcome(classify_by_grpc(grpc, picture))
        found["REST live"] = await outcome(rest.is_server_live(url))
        found["REST ready"] = await outcome(rest.is_server_ready(url))
        found["REST model"] = await outcome(rest.is_model_ready(url, "types"))
        found["REST unknown model"] = await outcome(rest.is_model_ready(url, "unknown"))
        found["gRPC live"] = await outcome(grpc.is_server_live())
        found["gRPC ready"] = await outcome(grpc.is_server_ready())
        found["gRPC model"] = await outcome(grpc.is_model_ready("types"))
        found["gRPC unknown model"] = await outcome(grpc.is_model_ready("unknown"))
    json.dump(found, sys.stdout, indent=1)


logging.disable(logging.CRITICAL)  # the SDK also logs what it raises
asyncio.run(main(*sys.argv[1:]))
