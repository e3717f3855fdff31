"""Protocol of each peer: readiness probe, request, and response."""

import base64
import http.client
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

Label = tuple[str, float]
MODEL = "resnet50"
BOUNDARY = "peer-boundary"


class Request(NamedTuple):
    """A plain HTTP POST."""

    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Peer:
    """Protocol of one server."""

    name: str
    ready_path: str
    request: Callable[[bytes], Request]
    parse: Callable[[bytes], list[Label]]

    def is_ready(self, host: str, port: int) -> bool:
        """Probe the server once."""
        connection = http.client.HTTPConnection(host, port, timeout=5)
        try:
            connection.request("GET", self.ready_path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def raw_request(path: str) -> Callable[[bytes], Request]:
    """Make requests whose body is the JPEG itself."""
    return lambda jpeg: Request(path, {"Content-Type": "image/jpeg"}, jpeg)


def bentoml_request(jpeg: bytes) -> Request:
    """Send the JPEG as a list of one, in a multipart form as BentoML takes lists of images."""
    head = (
        f"--{BOUNDARY}\r\n"
        'Content-Disposition: form-data; name="images"; filename="image.jpg"\r\n'
        "Content-Type: image/jpeg\r\n\r\n"
    )
    headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    body = head.encode() + jpeg + f"\r\n--{BOUNDARY}--\r\n".encode()
    return Request("/classify", headers, body)


def v2_input(**more: object) -> bytes:
    """Describe one JPEG as the input of a V2 inference request."""
    jpeg = {"name": "jpeg", "shape": [1, 1], "datatype": "BYTES", **more}
    return json.dumps({"inputs": [jpeg]}).encode()


def mlserver_request(jpeg: bytes) -> Request:
    """Send the JPEG in base64: MLServer's REST side has no binary tensors."""
    text = base64.b64encode(jpeg).decode()
    body = v2_input(parameters={"content_type": "base64"}, data=[text])
    return Request(f"/v2/models/{MODEL}/infer", {"Content-Type": "application/json"}, body)


def pytriton_request(jpeg: bytes) -> Request:
    """Send the JPEG as a binary BYTES tensor behind the JSON header."""
    tensor = struct.pack("<I", len(jpeg)) + jpeg
    head = v2_input(parameters={"binary_data_size": len(tensor)})
    headers = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
    return Request(f"/v2/models/{MODEL}/infer", headers, head + tensor)


def parse_json(body: bytes) -> list[Label]:
    """Read a list of five [label, score] pairs."""
    return [(label, score) for label, score in json.loads(body)]


def parse_bentoml(body: bytes) -> list[Label]:
    """Read the first of a list of responses."""
    return [(label, score) for label, score in json.loads(body)[0]]


def parse_v2(body: bytes) -> list[Label]:
    """Read the V2 outputs `labels` and `scores`."""
    outputs = {output["name"]: output["data"] for output in json.loads(body)["outputs"]}
    return list(zip(outputs["labels"], outputs["scores"], strict=True))


V2_READY = f"/v2/models/{MODEL}/ready"
PEERS = {
    peer.name: peer
    for peer in (
        Peer("fastapi", "/health", raw_request("/classify"), parse_json),
        Peer("litserve", "/health", raw_request("/predict"), parse_json),
        Peer("bentoml", "/readyz", bentoml_request, parse_bentoml),
        Peer("mlserver", V2_READY, mlserver_request, parse_v2),
        Peer("pytriton", V2_READY, pytriton_request, parse_v2),
        Peer("rayserve", "/health", raw_request("/"), parse_json),
    )
}
