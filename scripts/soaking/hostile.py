"""Requests that were seen to end this Triton, and others of their kind."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
from tritonclient.grpc import service_pb2

from graphkiln_client import Client
from soaking.fault import Fault, Field, Over
from soaking.guard import SHARED_MEMORY
from soaking.ledger import DEADLINE_S, NoAnswer, WrongAnswer
from soaking.process_faults import is_gone
from soaking.service import Service

_JSON = {"Content-Type": "application/json"}
_INFER = "/v2/models/scaled/infer"
_BOMB_BYTES = 256 << 20
_SETTLE_S = 0.5
"""After which a server that the request has killed is seen to be dead."""


class HostileRequest(Fault):
    """A request that must at worst fail alone, or end the server and nothing else."""

    heavy = True

    def __init__(self, name: str, send: Callable[[Service], None]) -> None:
        self.name = f"request: {name}"
        self._send = send

    def inject(self, field: Field) -> Over:
        with field.ledger.request("hostile"):
            self._send(field.service)
        time.sleep(_SETTLE_S)
        return lambda: bool(field.service.servers())


def post(service: Service, path: str, body: bytes, headers: dict[str, str] | None = None) -> int:
    """Sends a POST; returns the status.

    Raises:
        HTTPException: The response is an error, or broken off.
        NoAnswer: There was no response.
    """
    connection = service.reach.connect_http(DEADLINE_S)
    try:
        connection.request("POST", path, body, headers or _JSON)
        response = connection.getresponse()
        response.read()
    except TimeoutError as error:
        raise NoAnswer(f"{path} within {DEADLINE_S:.0f} s") from error
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        raise http.client.HTTPException(f"HTTP {response.status}")
    return response.status


def _shape(shape: list[int]) -> Callable[[Service], None]:
    tensor = {"name": "x", "datatype": "FP32", "shape": shape, "data": [1.0] * 128}
    body = json.dumps({"inputs": [tensor]}).encode()
    return lambda service: _ignore(post(service, _INFER, body))


def _nested(service: Service) -> None:
    post(service, _INFER, b"[" * 300_000)


def _nested_in_data(service: Service) -> None:
    data = b"[" * 200_000 + b"1" + b"]" * 200_000
    post(service, _INFER, b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,128],"data":' + data + b"}]}")


def _bomb(service: Service) -> None:
    post(service, _INFER, _compressed_zeros(), {**_JSON, "Content-Encoding": "gzip"})


@cache
def _compressed_zeros() -> bytes:
    return gzip.compress(bytes(_BOMB_BYTES), 6)


def _long_file_name(service: Service) -> None:
    body = json.dumps({"parameters": {"config": "{}", f"file:1/{'a' * 256}": "AAAA"}}).encode()
    post(service, "/v2/repository/models/scaled/load", body, {**_JSON, **service.admin_headers})


def _without_the_key(service: Service) -> None:
    """What changes the server, sent by somebody who does not know its key."""
    body = json.dumps({"key": "/x", "offset": 0, "byte_size": 1}).encode()
    for path in ("repository/models/scaled/load", "systemsharedmemory/region/x/register", "logging", "trace/setting"):
        try:
            post(service, f"/v2/{path}", body)
        except http.client.HTTPException as error:
            if str(error) not in ("HTTP 401", "HTTP 403"):
                raise
        else:
            raise WrongAnswer(f"{path} was done without the key")


def _truncated_region(service: Service) -> None:
    """Registers a region, cuts it off, and names it in a request."""
    name = f"graphkiln-soak-{os.getpid()}-{uuid.uuid4().hex}"
    path = SHARED_MEMORY / name
    path.write_bytes(bytes(1 << 20))
    try:
        body = json.dumps({"key": f"/{name}", "offset": 0, "byte_size": 1 << 20}).encode()
        post(service, f"/v2/systemsharedmemory/region/{name}/register", body, {**_JSON, **service.admin_headers})
        os.truncate(path, 0)
        parameters = {"shared_memory_region": name, "shared_memory_byte_size": 64 * 128 * 4}
        tensor = {"name": "x", "datatype": "FP32", "shape": [64, 128], "parameters": parameters}
        post(service, _INFER, json.dumps({"inputs": [tensor]}).encode())
    finally:
        path.unlink()


def _grpc_request(change: Callable[[Any], None]) -> Callable[[Service], None]:
    """A gRPC request for `scaled` that is changed before it is sent."""

    def send(service: Service) -> None:
        request = service_pb2.ModelInferRequest(model_name="scaled")
        tensor = request.inputs.add(name="x", datatype="FP32", shape=[1, 128])
        request.raw_input_contents.append(bytes(512))
        change(tensor)
        with triton_grpc.InferenceServerClient(**service.reach.triton_grpc()) as client:
            client._client_stub.ModelInfer(request, timeout=DEADLINE_S)  # noqa: SLF001 - the bare stub

    return send


def _huge_batch(tensor: Any) -> None:
    tensor.shape[:] = [2**32, 128]


def _overflowing_batch(tensor: Any) -> None:
    tensor.shape[:] = [2**57 + 1, 128]


def _half_a_request(service: Service) -> None:
    """Fifty connections that promise a body and hang up."""
    for _ in range(50):
        with service.reach.open_http(DEADLINE_S) as connection:
            connection.sendall(f"POST {_INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{{".encode())


def _noise(service: Service) -> None:
    """Bytes that are neither HTTP nor gRPC, on both ports."""
    for port in (service.reach.http_port, service.reach.grpc_port):
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
            connection.sendall(os.urandom(4096))


def _ignore(_: int) -> None:
    """Any answer will do."""


class EndlessBatch(Fault):
    """A request that its model would compute for ever."""

    name = "a batch that never ends"
    cause = "compute_limit"

    def inject(self, field: Field) -> Over:
        servers, reach = field.service.servers(), field.service.reach
        rounds = np.array([[2**62]])
        with (
            field.ledger.request("hostile"),
            Client(reach.http_url, timeout_s=DEADLINE_S, max_retries=0, **reach.security) as client,
        ):
            client.model("looped").infer({"rounds": rounds})
        return lambda: all(map(is_gone, servers)) and bool(field.service.servers())


def hostile_requests() -> list[Fault]:
    """One of each."""
    requests: dict[str, Callable[[Service], None]] = {
        "JSON shape 4294967296": _shape([4294967296]),
        "JSON shape 4294967297": _shape([4294967297]),
        "JSON shape [2^63-1, 16]": _shape([2**63 - 1, 16]),
        "JSON shape [-1, 128]": _shape([-1, 128]),
        "300 kB of [": _nested,
        "200000 lists around data": _nested_in_data,
        "256 MB of zeros in gzip": _bomb,
        "long file name in a load": _long_file_name,
        "admin requests without the key": _without_the_key,
        "truncated shared memory": _truncated_region,
        "gRPC batch 2^32": _grpc_request(_huge_batch),
        "gRPC batch 2^57 + 1": _grpc_request(_overflowing_batch),
        "half a request, 50 times": _half_a_request,
        "noise on both ports": _noise,
    }
    return [*(HostileRequest(name, send) for name, send in requests.items()), EndlessBatch()]
