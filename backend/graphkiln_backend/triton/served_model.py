"""Ask a model of a running tritonserver over HTTP, with binary tensors: golden samples, and candidates of rollouts.

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
from typing import TYPE_CHECKING, Any

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
    client, np = LazyModule("http.client"), LazyModule("numpy")  # of the process that asks

_HEADER = "Inference-Header-Content-Length"


class BusyError(ExecutionError):
    """The server takes no more requests for a model, which says nothing about its versions."""


class ServedModel(Closeable):
    """A model of a running server. Each thread keeps one connection; `close` ends requests under way.

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
                connection.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for an answer
            connection.close()

    def infer(
        self, inputs: Mapping[str, AnyArray], outputs: Sequence[str], *, request_id: str, timeout_s: float
    ) -> dict[str, AnyArray]:
        """Send a request.

        Args:
            inputs: In the shapes that clients send.
            outputs: Names of the requested outputs.
            request_id: Its id, in Triton's log and traces.
            timeout_s: Time limit for connecting, sending and the answer; then the connection is closed.

        Raises:
            ExecutionError: The server answers with an error.
            OSError, HTTPException: It does not answer.
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
            OSError, HTTPException: The server does not answer.
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
        tensors = (*config.input, *config.output)
        self._reshapes = {each.name: _Reshape.of(each, config) for each in tensors if each.HasField("reshape")}

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
    """Dimensions of a tensor; -1 keeps its order in both.

    Attributes:
        outside: For clients, without the batch.
        inside: For the graph, without the batch.
        batched: Whether a batch precedes them.
    """

    outside: tuple[int, ...]
    inside: tuple[int, ...]
    batched: bool

    @classmethod
    def of(cls, tensor: Any, config: ModelConfigProto) -> _Reshape:
        """Read the dimensions of an input or output that has a `reshape`."""
        return cls(tuple(tensor.dims), tuple(tensor.reshape.shape), config.max_batch_size > 0)

    def convert(self, array: AnyArray, source: Sequence[int], target: Sequence[int]) -> AnyArray:
        """Change the dimensions from `source` to `target`."""
        rows, shape = (array.shape[:1], array.shape[1:]) if self.batched else ((), array.shape)
        open_sizes = iter([size for size, dim in zip(shape, source, strict=False) if dim < 0])
        return array.reshape([*rows, *(next(open_sizes) if dim < 0 else dim for dim in target)])


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


def _encode(array: AnyArray) -> tuple[str, bytes | memoryview]:
    """Return data type and bytes of a tensor, which are a view of it if possible."""
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
