"""How requests reach the server: our clients, Triton's own clients, and bare HTTP; over both protocols."""

from __future__ import annotations

import http.client
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_client import Client
from graphkiln_client.transports.endpoint import Security
from soaking.ledger import DEADLINE_S, NoAnswer
from soaking.models import Arrays, SoakModel
from soaking.reaching import Reach

_RECONNECT = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000)]
"""By itself, gRPC's library waits up to two minutes before it tries a server again that was away."""

Answer = tuple[dict[str, AnyArray], int | None]
"""Outputs by name, and the version that computed them where the client tells it."""


class Sender(ABC):
    """Sends requests of one kind. Used by one thread."""

    name: str

    @abstractmethod
    def ask(self, model: SoakModel, version: str, feeds: Arrays) -> Answer:
        """Sends one request and waits for its answer; any exception is an error that the user of such a client sees."""

    def close(self) -> None:  # noqa: B027 - not all keep one
        """Closes the connections."""


class OurClient(Sender):
    """graphkiln's blocking client."""

    def __init__(self, url: str, reach: Reach, *, retries: int) -> None:
        self.name = f"client {protocol(url)}{', retrying' if retries else ''}"
        self._client = Client(url, timeout_s=DEADLINE_S, max_retries=retries, **reach.security)

    def ask(self, model: SoakModel, version: str, feeds: Arrays) -> Answer:
        return self._client.model(model.name, version).infer(feeds), None

    def close(self) -> None:
        self._client.close()


class OurSharedMemory(Sender):
    """graphkiln's client with tensors in shared memory."""

    def __init__(self, url: str, reach: Reach, admin_key: str) -> None:
        self.name = f"shared memory {protocol(url)}"
        self._stack = ExitStack()
        security: Security = {**reach.security, "admin_key": admin_key}
        client = self._stack.enter_context(Client(url, timeout_s=DEADLINE_S, **security))
        self._shared = self._stack.enter_context(client.shared_memory())

    def ask(self, model: SoakModel, version: str, feeds: Arrays) -> Answer:
        return self._shared.model(model.name, version).infer(feeds), None

    def close(self) -> None:
        self._stack.close()


class TritonGrpc(Sender):
    """Triton's own gRPC client."""

    name = "tritonclient grpc"

    def __init__(self, reach: Reach) -> None:
        self._client = triton_grpc.InferenceServerClient(**reach.triton_grpc(), channel_args=_RECONNECT)

    def ask(self, model: SoakModel, version: str, feeds: Arrays) -> Answer:
        inputs = _triton_inputs(triton_grpc, model, feeds)
        result = self._client.infer(model.name, inputs, model_version=version, client_timeout=DEADLINE_S)
        response = result.get_response()
        return {each.name: result.as_numpy(each.name) for each in response.outputs}, int(response.model_version)

    def close(self) -> None:
        self._client.close()


class TritonHttp(Sender):
    """Triton's own HTTP client."""

    name = "tritonclient http"

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._client: Any = None

    def ask(self, model: SoakModel, version: str, feeds: Arrays) -> Answer:
        if self._client is None:  # in the thread that uses it: its sockets belong to the thread's event loop
            self._client = triton_http.InferenceServerClient(
                **self._reach.triton_http(), connection_timeout=DEADLINE_S, network_timeout=DEADLINE_S
            )
        result = self._client.infer(model.name, _triton_inputs(triton_http, model, feeds), model_version=version)
        response = result.get_response()
        names = [each["name"] for each in response["outputs"]]
        return {name: result.as_numpy(name) for name in names}, int(response["model_version"])


class BareHttp(Sender):
    """`http.client` with one connection that is kept alive; tensors as JSON, or as binary data."""

    def __init__(self, reach: Reach, *, binary: bool) -> None:
        self.name = "http.client binary" if binary else "http.client JSON"
        self._reach = reach
        self._binary = binary
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, model: SoakModel, version: str, feeds: Arrays) -> Answer:
        body, headers = binary_request(model, feeds) if self._binary else json_request(model, feeds)
        path = f"/v2/models/{model.name}{'/versions/' + version if version else ''}/infer"
        response, content = self._send(path, body, headers)
        if response.status != http.HTTPStatus.OK:
            raise http.client.HTTPException(f"HTTP {response.status}")
        return read_response(response, content)

    def _send(self, path: str, body: bytes, headers: dict[str, str]) -> tuple[http.client.HTTPResponse, bytes]:
        if self._connection is None:
            self._connection = self._reach.connect_http(DEADLINE_S)
        try:
            self._connection.request("POST", path, body, headers)
            response = self._connection.getresponse()
            content = response.read()
        except TimeoutError as error:
            self.close()
            raise NoAnswer(f"within {DEADLINE_S:.0f} s") from error
        except BaseException:
            self.close()
            raise
        if response.will_close:
            self.close()
        return response, content

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def protocol(url: str) -> str:
    """`http` or `grpc`, with TLS or without."""
    return url.partition(":")[0].removesuffix("s")


def json_request(model: SoakModel, feeds: Arrays) -> tuple[bytes, dict[str, str]]:
    """A request with its tensors in JSON."""
    inputs = [{**_tensor(model, name, array), "data": _plain(array)} for name, array in feeds.items()]
    return json.dumps({"inputs": inputs}).encode(), {"Content-Type": "application/json"}


def binary_request(model: SoakModel, feeds: Arrays) -> tuple[bytes, dict[str, str]]:
    """A request with its tensors behind the JSON, and so the response. Source: Triton's binary tensor extension."""
    inputs, parts = [], []
    for name, array in feeds.items():
        parts.append(to_bytes(array))
        inputs.append({**_tensor(model, name, array), "parameters": {"binary_data_size": len(parts[-1])}})
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return header + b"".join(parts), {"Inference-Header-Content-Length": str(len(header))}


def to_bytes(array: AnyArray) -> bytes:
    """A tensor as Triton's protocol carries it: strings with their length in front."""
    if array.dtype.kind != "O":
        return array.tobytes()
    return b"".join(len(text).to_bytes(4, "little") + text for text in array.ravel())


def read_response(response: http.client.HTTPResponse, content: bytes) -> Answer:
    """The outputs of a response, in JSON or behind it."""
    length = int(response.headers.get("Inference-Header-Content-Length", len(content)))
    header, rest = json.loads(content[:length]), content[length:]
    outputs = {}
    for output in header["outputs"]:
        size = output.get("parameters", {}).get("binary_data_size")
        raw = output.get("data") if size is None else None
        if size is not None:
            raw, rest = rest[:size], rest[size:]
        outputs[output["name"]] = from_bytes(output["datatype"], output["shape"], raw)
    return outputs, int(header["model_version"])


def from_bytes(datatype: str, shape: list[int], raw: Any) -> AnyArray:
    """A tensor of a response: of bytes as `to_bytes` makes them, or of a list in JSON."""
    if datatype == "BYTES":
        texts = [text.encode() for text in raw] if isinstance(raw, list) else _split_texts(raw)
        return np.array(texts, dtype=object).reshape(shape)
    dtype = {"FP32": np.float32, "INT64": np.int64}[datatype]
    array: AnyArray = np.array(raw, dtype) if isinstance(raw, list) else np.frombuffer(raw, dtype)
    return array.reshape(shape)


def _split_texts(raw: bytes) -> list[bytes]:
    texts = []
    while raw:
        end = 4 + int.from_bytes(raw[:4], "little")
        texts.append(raw[4:end])
        raw = raw[end:]
    return texts


def _plain(array: AnyArray) -> Iterable[Any]:
    if array.dtype.kind == "O":
        return [text.decode() for text in array.ravel()]
    values: list[Any] = array.ravel().tolist()
    return values


def _tensor(model: SoakModel, name: str, array: AnyArray) -> dict[str, Any]:
    return {"name": name, "datatype": model.inputs[name][0], "shape": list(array.shape)}


def _triton_inputs(module: Any, model: SoakModel, feeds: Arrays) -> list[Any]:
    inputs = []
    for name, array in feeds.items():
        tensor = module.InferInput(name, list(array.shape), model.inputs[name][0])
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def close_quietly(sender: Sender) -> None:
    """Closes a sender whose server may be gone."""
    with suppress(Exception):
        sender.close()
