"""Health check of the image: exit with 0 if the server in this container is live.

Like the liveness probe of deploy/kubernetes, it fails while models load, and passes if a model is not ready. Behind
HAProxy, which the supervisor watches, tritonserver is checked.
"""

from __future__ import annotations

import http.client
import socket
import sys
from contextlib import closing

from graphkiln_backend.server.ports import served_addresses

_TIMEOUT_S = 4.0


def is_alive(protocol: str, host: str, port: int) -> bool:
    """True if a server is live over HTTP; for `grpc`, if it listens."""
    try:
        if protocol == "grpc":
            with socket.create_connection((host, port), timeout=_TIMEOUT_S):
                return True
        with closing(http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)) as connection:
            connection.request("GET", "/v2/health/live", headers={"Connection": "close"})
            return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False


def main() -> int:
    """Return 0 if a server is live, else 1."""
    return 0 if any(is_alive(*address) for address in served_addresses()) else 1


if __name__ == "__main__":
    sys.exit(main())
