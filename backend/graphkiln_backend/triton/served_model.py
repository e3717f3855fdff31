"""Send requests to a model of a running tritonserver over HTTP: golden samples, and requests to rollout candidates.

Sources: KServe v2 protocol, "HTTP/REST" and "Binary tensor data extension".
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.graph.modules import LazyModule
from graphkiln_backend.graph.text import in_path, plain_reason
from graphkiln_backend.repository.config import ModelConfigProto
from graphkiln_backend.system.closing import Closeable

if TYPE_CHECKING:
    from http import client

    import numpy as np

    from graphkiln_backend.graph.dtypes import AnyArray
else:
    client, np = LazyModule("http.client"), LazyModule("numpy")

_HEADER = "Inference-Header-Content-Length"


class BusyError(ExecutionError):
    """The server accepts no more requests for a model for now; the model itself may be correct."""


class ServedModel(Closeable):
    """A model of a running server. Each thread keeps one connection; `close` ends requests in flight.

    Args:
        address: Host and port.
        headers: Headers for restricted endpoints.
        model: Name of the model.
        version: Version; empty for the one that the server chooses.
    """

    def __init__(self, address: tuple[str, int], headers: Mapping[str, str], model: str, version: str = "") -> None:
        self._address = address
        self._headers = headers
        self._path = f"/v2/models/{in_path(model)}{version and f'/versions/{version}'}"
        self._local = threading.local()
        self._connections: list[client.HTTPConnection] = []
        self._closed = False

    def close(self) -> None:
        """Close the connections of all threads."""
        self._closed = True
        for connection in self._connections:
            with suppress(OSError, AttributeError):  # not connected
                connection.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for a response
            connection.close()

    def infer(
        self, inputs: Mapping[str, AnyArray], outputs: Sequence[str], *, request_id: str, timeout_s: float
    ) -> dict[str, AnyArray]:
        """Run the model.

        Args:
            inputs: In the shapes that clients send.
            outputs: Names of the requested outputs.
            request_id: Id of the request in Triton's log and traces.
            timeout_s: Time limit for connecting, sending and the response; then the connection is closed.

        Raises:
            ExecutionError: The server responds with an error.
            OSError, HTTPException: It does not respond.
        """
        contents = {name: _encode(array) for name, array in inputs.items()}
        header = {
            "id": request_id,
            "inputs": [
                {
                    "name": name,
                    "datatype": datatype,
                    "shape": list(inputs[name].shape),
                    "parameters": {"binary_data_size": len(content)},
                }
                for name, (datatype, content) in contents.items()
            ],
            "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in outputs],
        }
        document = json.dumps(header).encode()
        body = [document, *(content for _, content in contents.values())]
        headers = {_HEADER: str(len(document))}
        status, length, answer = self.send("POST", "/infer", body, headers, timeout_s=timeout_s)
        if status != HTTPStatus.OK:
            kind = BusyError if status == HTTPStatus.SERVICE_UNAVAILABLE else ExecutionError
            raise kind(_error_in(answer, request_id))
        return dict(_decode(answer, length))

    def send(
        self,
        method: str,
        path: str,
        body: Sequence[bytes | memoryview] = (),
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float,
    ) -> tuple[int, int, bytes]:
        """Send any request of the model; return status, length of the JSON header, and body.

        Raises:
            OSError, HTTPException: The server does not respond.
        """
        deadline = time.monotonic() + timeout_s
        connection = self._connect(deadline)
        fields = {**(headers or {}), **self._headers, "Content-Length": str(sum(map(len, body)))}
        try:
            connection.request(method, f"{self._path}{path}", body, fields)  # parts are sent without joining them
            connection.sock.settimeout(_left_s(deadline))
            response = connection.getresponse()
            return response.status, int(response.headers.get(_HEADER, 0)), response.read()
        except AttributeError as error:  # `close` has taken the socket
            raise ConnectionAbortedError("the connection is closed") from error
        except (OSError, client.HTTPException):
            connection.close()
            raise

    def _connect(self, deadline: float) -> client.HTTPConnection:
        """Return the connection of this thread."""
        connection: client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            self._local.connection = connection = client.HTTPConnection(*self._address)
            self._connections.append(connection)
        if self._closed:
            raise ConnectionAbortedError("the connection is closed")
        if connection.sock is None:
            connection.timeout = _left_s(deadline)
            connection.connect()
        connection.sock.settimeout(_left_s(deadline))
        return connection


class Reshapes:
    """The shapes of a model's tensors for clients (outside) and for its graph (inside), where Triton converts them.

    Args:
        config: Configuration of the model.
    """

    def __init__(self, config: ModelConfigProto) -> None:
        batched = config.max_batch_size > 0
        self._reshapes = {
            each.name: _Reshape(tuple(each.dims), tuple(each.reshape.shape), batched)
            for each in (*config.input, *config.output)
            if each.HasField("reshape")
        }

    def outside(self, name: str, array: AnyArray) -> AnyArray:
        """Give a tensor the shape in which clients send it; Triton has no scalars."""
        reshape = self._reshapes.get(name)
        if reshape:
            return reshape.convert(array, reshape.inside, reshape.outside)
        return array if array.ndim else array.reshape(1)

    def inside(self, name: str, array: AnyArray) -> AnyArray:
        """Give a tensor the shape of the graph."""
        reshape = self._reshapes.get(name)
        return reshape.convert(array, reshape.outside, reshape.inside) if reshape else array


@dataclass(frozen=True, slots=True)
class _Reshape:
    """Dimensions of a tensor. Dimensions of -1 have the same order in both.

    Attributes:
        outside: For clients, without the batch.
        inside: For the graph, without the batch.
        batched: Whether a batch precedes them.
    """

    outside: tuple[int, ...]
    inside: tuple[int, ...]
    batched: bool

    def convert(self, array: AnyArray, source: Sequence[int], target: Sequence[int]) -> AnyArray:
        rows, shape = (array.shape[:1], array.shape[1:]) if self.batched else ((), array.shape)
        open_sizes = iter([size for size, dim in zip(shape, source, strict=False) if dim < 0])
        return array.reshape([*rows, *(next(open_sizes) if dim < 0 else dim for dim in target)])


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


def _encode(array: AnyArray) -> tuple[str, bytes | memoryview]:
    """Return the datatype of a tensor and its bytes, if possible as a view."""
    from graphkiln_backend.graph.dtypes import DType, join_text

    dtype = DType.from_numpy(array.dtype)
    if dtype is DType.BYTES:
        return dtype.value, join_text(array.ravel().tolist())
    return dtype.value, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def size_in_request(array: AnyArray) -> int:
    """Bytes of a tensor in a request."""
    if array.dtype != np.object_:
        return array.nbytes
    return 4 * array.size + sum(map(len, array.ravel().tolist()))  # a length before each text


def _decode(answer: bytes, length: int) -> Iterator[tuple[str, AnyArray]]:
    """Yield name and array of each output."""
    from graphkiln_backend.graph.dtypes import DType, split_text

    document = json.loads(answer[:length] if length else answer)
    position = length
    for row in document["outputs"]:
        size = row["parameters"]["binary_data_size"]
        content, position = memoryview(answer)[position : position + size], position + size
        dtype = DType(row["datatype"])
        if dtype is DType.BYTES:
            array: AnyArray = np.empty(row["shape"], np.object_)
            array.ravel()[:] = split_text(bytes(content))
        else:
            array = np.frombuffer(content, dtype.numpy).reshape(row["shape"])
        yield row["name"], array


def _error_in(answer: bytes, request_id: str) -> str:
    try:
        return plain_reason(str(json.loads(answer)["error"]).removeprefix(f"[request id: {request_id}] "))
    except (ValueError, KeyError, TypeError):
        return answer[:200].decode(errors="replace")
