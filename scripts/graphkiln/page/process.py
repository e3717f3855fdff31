"""The process of the page: the application on a listener that its parent holds.

    python -m graphkiln.page.process LISTENER DOCUMENT

DOCUMENT is JSON, of `PageFacts`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from graphkiln.page.app import build_app
from graphkiln.page.launch import PageFacts
from graphkiln.page.listening_child import run_until_orphaned
from graphkiln.page.server import ShownServer, Stores
from graphkiln_client import AsyncClient

_MOST_CONNECTIONS = 256
_IDLE_S = 60
_RETRIES = 0  # a person who waits sees the error, and tries again
# Otherwise the client would find the key of a server of this user, and everyone who sees the page could use it.
_NO_KEY = "none"


def shown_server(facts: PageFacts) -> ShownServer:
    """The server that the facts name, asked without the admin key that this user could find."""
    return ShownServer(
        connect=lambda key: AsyncClient(facts.inner_url, max_retries=_RETRIES, admin_key=key or _NO_KEY),
        stores=Stores([Path(folder) for folder in facts.stores]),
        url=facts.url,
        metrics_url=facts.metrics_url,
        everywhere=facts.everywhere,
    )


def configure(facts: PageFacts) -> uvicorn.Config:
    """Configuration of the ASGI server."""
    certificate, key, authorities = facts.tls or ("", "", "")
    return uvicorn.Config(
        build_app(shown_server(facts), facts.names),
        log_level="warning",
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_keep_alive=_IDLE_S,
        server_header=False,
        ws="none",
        ssl_certfile=certificate or None,
        ssl_keyfile=key or None,
        ssl_ca_certs=authorities or None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if authorities else ssl.CERT_NONE,
    )


async def run(arguments: Sequence[str]) -> None:
    """Serve until the parent is gone."""
    descriptor, document = arguments
    server = uvicorn.Server(configure(PageFacts(**json.loads(document))))
    await run_until_orphaned(server.serve([socket.socket(fileno=int(descriptor))]))


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1:]))
