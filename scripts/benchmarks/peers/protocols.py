"""Protocol of each peer: readiness probe, request, and response."""

import http.client
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

Label = tuple[str, float]
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


def parse_json(body: bytes) -> list[Label]:
    """Read a list of five [label, score] pairs."""
    return [(label, score) for label, score in json.loads(body)]


def parse_bentoml(body: bytes) -> list[Label]:
    """Read the first of a list of responses."""
    return [(label, score) for label, score in json.loads(body)[0]]


PEERS = {
    peer.name: peer
    for peer in (
        Peer("fastapi", "/health", raw_request("/classify"), parse_json),
        Peer("litserve", "/health", raw_request("/predict"), parse_json),
        Peer("bentoml", "/readyz", bentoml_request, parse_bentoml),
        Peer("rayserve", "/health", raw_request("/"), parse_json),
    )
}
