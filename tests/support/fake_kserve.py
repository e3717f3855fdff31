"""A server of the KServe v2 protocol that computes with a function; it reads and writes tensors by tritonclient."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import ml_dtypes
import numpy as np
from tritonclient.utils import (
    deserialize_bytes_tensor,
    np_to_triton_dtype,
    serialize_byte_tensor,
    triton_to_np_dtype,
)

from graphkiln_backend.server.flags import ListenAddress
from graphkiln_backend.system.closing import Closeable

Arrays = Mapping[str, np.ndarray]
_HEADER = "Inference-Header-Content-Length"


class FakeKserve(Closeable):
    """Serve the version 1 of every model.

    Args:
        compute: Outputs for inputs; a ValueError is answered with an error.
        config: Response to a request for the configuration; None answers that with an error.

    Attributes:
        asked: Name of the model and inputs of each request.
        headers: Headers of the last request.
        errors: Status and text to answer the next requests with.
        rows: The repository index.
        statistics: `last_inference` of the statistics, which may change.
        delay_s: Seconds before each answer.
        connections: Number of connections so far.
    """

    def __init__(self, compute: Callable[[Arrays], Arrays], config: Mapping[str, Any] | None = None) -> None:
        self.compute = compute
        self.config = config
        self.asked: list[tuple[str, Arrays]] = []
        self.headers: dict[str, str] = {}
        self.errors: list[tuple[int, str]] = []
        self.rows = [{"name": "m", "version": "1", "state": "READY"}]
        self.statistics: Callable[[], int] = lambda: 0
        self.delay_s = 0.0
        self.connections = 0
        handler = type("Handler", (_Handler,), {"fake": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def address(self) -> ListenAddress:
        return ListenAddress(protocol="HTTP", host="127.0.0.1", port=self._server.server_port)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet for each response
    fake: FakeKserve

    def setup(self) -> None:
        super().setup()
        self.fake.connections += 1

    def do_GET(self) -> None:
        if self.path.endswith("/stats"):
            self._answer(200, json.dumps({"model_stats": [{"last_inference": self.fake.statistics()}]}).encode())
        elif self.fake.config is None:
            self._answer(403, b'{"error": "restricted"}')
        else:
            self._answer(200, json.dumps(self.fake.config).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path == "/v2/repository/index":
            self._answer(200, json.dumps(self.fake.rows).encode())
            return
        time.sleep(self.fake.delay_s)
        self.fake.headers = dict(self.headers)
        length = int(self.headers[_HEADER])
        header = json.loads(body[:length])
        inputs = _inputs(header, body[length:])
        self.fake.asked.append((self.path.split("/")[3], inputs))
        if self.fake.errors:
            status, text = self.fake.errors.pop(0)
            self._answer(status, json.dumps({"error": text}).encode())
            return
        try:
            outputs = self.fake.compute(inputs)
        except ValueError as error:
            self._answer(500, json.dumps({"error": str(error)}).encode())
            return
        wanted = [row["name"] for row in header["outputs"]]
        rows, contents = _outputs({name: outputs[name] for name in wanted if name in outputs})
        served = {"model_name": self.path.split("/")[3], "model_version": "1", "id": header.get("id", "")}
        document = json.dumps({**served, "outputs": rows}).encode()
        self._answer(200, document + b"".join(contents), {_HEADER: str(len(document))})

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _inputs(header: Mapping[str, Any], content: bytes) -> Arrays:
    found, position = {}, 0
    for row in header["inputs"]:
        part = content[position : (position := position + row["parameters"]["binary_data_size"])]
        if row["datatype"] == "BYTES":
            array = deserialize_bytes_tensor(part)
        elif row["datatype"] == "BF16":
            array = (np.frombuffer(part, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(ml_dtypes.bfloat16)
        else:
            array = np.frombuffer(part, triton_to_np_dtype(row["datatype"]))
        found[row["name"]] = array.reshape(row["shape"])
    assert position == len(content)
    return found


def _outputs(arrays: Arrays) -> tuple[list[dict[str, Any]], list[bytes]]:
    rows, contents = [], []
    for name, array in arrays.items():
        datatype = "BF16" if array.dtype == ml_dtypes.bfloat16 else np_to_triton_dtype(array.dtype)
        if datatype == "BYTES":
            content = serialize_byte_tensor(array).item()
        elif datatype == "BF16":  # the upper halves of fp32
            content = (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
        else:
            content = array.tobytes()
        parameters = {"binary_data_size": len(content)}
        rows.append({"name": name, "datatype": datatype, "shape": list(array.shape), "parameters": parameters})
        contents.append(content)
    return rows, contents
