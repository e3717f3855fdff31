"""The image's health check: is the server in this container ready, with or without TLS?

Certificates are not verified, because nothing is sent. A server that asks for a client's certificate says no more than
that it lives.
"""

from __future__ import annotations

import http.client
import ssl
import sys

_HOST, _PORT = "127.0.0.1", 8000
_TIMEOUT_S = 4.0


def is_healthy(host: str = _HOST, port: int = _PORT) -> bool:
    """Whether the server is ready; whether it lives, where it asks for a certificate."""
    try:
        return _is_ready(http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S))
    except (OSError, http.client.HTTPException):
        return _is_ready_with_tls(host, port)


def _is_ready_with_tls(host: str, port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_S, context=context)
    try:
        connection.connect()
    except OSError:
        return False
    try:
        return _is_ready(connection)
    except (ConnectionError, ssl.SSLError):  # closed after the handshake: it wants a certificate
        return True
    except (OSError, http.client.HTTPException):
        return False


def _is_ready(connection: http.client.HTTPConnection) -> bool:
    try:
        connection.request("GET", "/v2/health/ready", headers={"Connection": "close"})
        return connection.getresponse().status == http.HTTPStatus.OK
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(0 if is_healthy() else 1)
