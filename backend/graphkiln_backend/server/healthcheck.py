"""The image's health check: the server in this container is live, at whatever address it listens.

It asks for the same as the liveness probe of deploy/kubernetes: while models load there is no response, and a model
that is not ready is no reason to end the others. Behind HAProxy, which the supervisor watches, tritonserver is asked.
"""

from __future__ import annotations

import http.client
import socket
import sys
from contextlib import closing

from graphkiln_backend.server.ports import served_addresses

_TIMEOUT_S = 4.0


def is_alive(protocol: str, host: str, port: int) -> bool:
    """True if a server says that it is live; with `grpc` as protocol, if it listens."""
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
    """The exit code: 0 where a server lives."""
    return 0 if any(is_alive(*address) for address in served_addresses()) else 1


if __name__ == "__main__":
    sys.exit(main())
