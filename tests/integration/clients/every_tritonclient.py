"""A user of all of tritonclient: tensors of every type over each transport, and in shared memory.

Usage: every_tritonclient.py HOST:HTTP_PORT HOST:GRPC_PORT ADMIN_KEY

Prints as JSON, for each question, "same" or the exception that the client raised. `types`, `FP16` and `BF16` are models
that return their inputs `NAME_in` as `NAME`.
"""

import asyncio
import json
import queue
import sys
import uuid
from contextlib import ExitStack

import ml_dtypes
import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tensors_of_every_type import SHARED
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor, shared_memory

CASES = {
    **SHARED,
    "BF16": ("BF16", {"BF16": np.array([[-3e38, 0.1, np.inf]], ml_dtypes.bfloat16)}),
}
ADMIN_KEY = "x-graphkiln-admin-key"
GRPC_ADMIN_KEY = f"triton-grpc-protocol-{ADMIN_KEY}"


def tensors(module, arrays, **binary):
    """Inputs and requested outputs; `binary_data` is a choice of HTTP."""
    inputs = [
        module.InferInput(f"{name}_in", array.shape, np_to_triton_dtype(array.dtype)) for name, array in arrays.items()
    ]
    for tensor, array in zip(inputs, arrays.values(), strict=True):
        tensor.set_data_from_numpy(array, **binary)
    return {"inputs": inputs, "outputs": [module.InferRequestedOutput(name, **binary) for name in arrays]}


def compare(result, arrays):
    for name, sent in arrays.items():
        same(result.as_numpy(name), sent, name)
    return "same"


def same(received, sent, name):
    assert received.dtype == sent.dtype, f"{name}: {received.dtype}"
    if sent.dtype == object:  # as text where values came as JSON
        received = np.array([each.encode() if isinstance(each, str) else each for each in received.ravel()], object)
        received = received.reshape(sent.shape)
    np.testing.assert_array_equal(received, sent, name)


def stream(client, model, arrays):
    answers = queue.SimpleQueue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    try:
        client.async_stream_infer(model, **tensors(tritonclient.grpc, arrays))
        result, error = answers.get(timeout=60)
    finally:
        client.stop_stream()
    if error:
        raise error
    return compare(result, arrays)


def shared(module, client, model, arrays, headers):
    """Inputs and outputs in one region."""
    packed = {name: serialize_byte_tensor(array) if array.dtype == object else array for name, array in arrays.items()}
    sizes = {name: len(each.item()) if each.dtype == object else each.nbytes for name, each in packed.items()}
    region, total = f"sdk-{uuid.uuid4().hex}", sum(sizes.values())
    offsets = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist(), strict=False))
    with ExitStack() as stack:
        handle = shared_memory.create_shared_memory_region(region, region, 2 * total, create_only=True)
        stack.callback(shared_memory.destroy_shared_memory_region, handle)
        client.register_system_shared_memory(region, region, 2 * total, headers=headers)
        stack.callback(client.unregister_system_shared_memory, region, headers=headers)
        inputs = [
            module.InferInput(f"{name}_in", array.shape, np_to_triton_dtype(array.dtype))
            for name, array in arrays.items()
        ]
        outputs = [module.InferRequestedOutput(name) for name in arrays]
        for (name, each), tensor, output in zip(packed.items(), inputs, outputs, strict=True):
            shared_memory.set_shared_memory_region(handle, [each], offset=offsets[name])
            tensor.set_shared_memory(region, sizes[name], offset=offsets[name])
            output.set_shared_memory(region, sizes[name], offset=total + offsets[name])
        client.infer(model, inputs, outputs=outputs)
        for name, sent in arrays.items():
            same(
                shared_memory.get_contents_as_numpy(handle, sent.dtype, sent.shape, total + offsets[name]).copy(),
                sent,
                name,
            )
    return "same"


def outcome(question, *arguments):
    try:
        return question(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


async def ask(client, module, model, arrays, **binary):
    try:
        return compare(await client.infer(model, **tensors(module, arrays, **binary)), arrays)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


async def ask_all(http_address, grpc_address):
    found = {}
    async with (
        tritonclient.http.aio.InferenceServerClient(http_address) as http,
        tritonclient.grpc.aio.InferenceServerClient(grpc_address) as grpc,
    ):
        for case, (model, arrays) in CASES.items():
            found[f"HTTP aio: {case}"] = await ask(http, tritonclient.http.aio, model, arrays, binary_data=True)
            found[f"HTTP aio, JSON: {case}"] = await ask(http, tritonclient.http.aio, model, arrays, binary_data=False)
            found[f"gRPC aio: {case}"] = await ask(grpc, tritonclient.grpc.aio, model, arrays)
    return found


def main(http_address, grpc_address, key):
    found = {}
    with (
        tritonclient.http.InferenceServerClient(http_address) as http,
        tritonclient.grpc.InferenceServerClient(grpc_address) as grpc,
    ):
        for case, (model, arrays) in CASES.items():
            for form, binary in (("HTTP", True), ("HTTP, JSON", False)):
                found[f"{form}: {case}"] = outcome(
                    lambda model=model, arrays=arrays, binary=binary: compare(
                        http.infer(model, **tensors(tritonclient.http, arrays, binary_data=binary)), arrays
                    )
                )
            found[f"gRPC: {case}"] = outcome(
                lambda model=model, arrays=arrays: compare(
                    grpc.infer(model, **tensors(tritonclient.grpc, arrays)), arrays
                )
            )
            found[f"gRPC stream: {case}"] = outcome(stream, grpc, model, arrays)
            if case == "empty":  # `serialize_byte_tensor` gives no bytes to place
                continue
            for form, module, client, header in (
                ("HTTP", tritonclient.http, http, ADMIN_KEY), ("gRPC", tritonclient.grpc, grpc, GRPC_ADMIN_KEY)
            ):  # fmt: skip
                found[f"{form} shared memory: {case}"] = outcome(shared, module, client, model, arrays, {header: key})
    json.dump({**found, **asyncio.run(ask_all(http_address, grpc_address))}, sys.stdout, indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
