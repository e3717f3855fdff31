"""The transports of KServe v2: HTTP and gRPC, blocking and in an event loop.

Each is imported when its endpoint is opened, because each brings a heavy library.
"""

from __future__ import annotations

from graphkiln_client.transports.base import Transport
from graphkiln_client.transports.endpoint import Compression, Endpoint

_HTTP = ("http", "https")


def open_blocking(endpoint: Endpoint, compression: Compression) -> Transport:
    """Open the transport whose calls block the calling thread.

    Raises:
        InvalidInput: The endpoint's CA file cannot be read.
    """
    if endpoint.scheme in _HTTP:
        from graphkiln_client.transports.http_blocking import HttpTransport

        return HttpTransport(endpoint, compression)
    from graphkiln_client.transports.grpc_transport import GrpcTransport

    return GrpcTransport(endpoint, compression)


def open_async(endpoint: Endpoint, compression: Compression) -> Transport:
    """Open the transport whose calls wait in an event loop.

    Raises:
        InvalidInput: The endpoint's CA file cannot be read.
    """
    if endpoint.scheme in _HTTP:
        from graphkiln_client.transports.http_async import AsyncHttpTransport

        return AsyncHttpTransport(endpoint, compression)
    from graphkiln_client.transports.grpc_transport import AsyncGrpcTransport

    return AsyncGrpcTransport(endpoint, compression)
