"""The application of the page: routes, error responses, and the process that serves it.

    python -m graphkiln.page.app LISTENER DOCUMENT

LISTENER is the file descriptor of a listening socket, DOCUMENT the JSON of `PageFacts`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from graphkiln.page.answers import answer_image, answer_tensors, golden_sample
from graphkiln.page.launch import PageFacts
from graphkiln.page.listening_child import run_until_orphaned
from graphkiln.page.security import BODY_LIMIT, Guard, read_body
from graphkiln.page.server import ShownServer, Stores, describe_version, list_models, read_published
from graphkiln.page.snippets import snippets
from graphkiln.reporting import LOOK
from graphkiln.reporting.json_text import json_text
from graphkiln_backend.graph.errors import (
    DeadlineExceeded,
    GraphkilnError,
    InvalidInput,
    ModelNotFound,
    Overloaded,
    Unauthorized,
)
from graphkiln_backend.system.admin_key import HOW_TO_GIVE_IT, HTTP_HEADER, check_key
from graphkiln_client import AsyncClient

STATIC = Path(__file__).parent / "static"
_STATUS: dict[type[GraphkilnError], int] = {
    InvalidInput: 400,
    Unauthorized: 401,
    ModelNotFound: 404,
    Overloaded: 429,
    DeadlineExceeded: 504,
}
_BAD_GATEWAY = 502  # all other errors
_VERSION = "/api/models/{name}/{version:int}"
_MAX_CONNECTIONS = 256
_KEEP_ALIVE_S = 60
# Prevents the client from finding the key of this user's server, which every visitor of the page could then use.
_NO_KEY = "none"
_KEY_HINT = "enter the server's admin key next to the models"


def build_app(server: ShownServer, names: Collection[str] = ()) -> Starlette:
    """Build the application."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await server.close()

    return Starlette(
        routes=[*Views(server).routes(), Mount("/", StaticFiles(directory=STATIC, html=True))],
        lifespan=lifespan,
        middleware=[Middleware(Guard, names=names)],
        exception_handlers={GraphkilnError: _error_response, HTTPException: _http_response},
    )


class Views:
    """Route handlers."""

    def __init__(self, server: ShownServer) -> None:
        self._server = server

    def routes(self) -> list[Route]:
        """Return the routes, without the static files."""
        return [
            Route("/look.css", self.look),
            Route("/api/models", self.models),
            Route("/api/metrics", self.metrics),
            Route(_VERSION, self.version),
            Route(f"{_VERSION}/image", self.image, methods=["POST"]),
            Route(f"{_VERSION}/tensors", self.tensors, methods=["POST"]),
            Route(f"{_VERSION}/golden", self.golden),
            Route(f"{_VERSION}/snippets", self.snippets),
            Route("/api/models/{name}/load", self.load, methods=["POST"]),
            Route("/api/models/{name}/unload", self.unload, methods=["POST"]),
        ]

    async def look(self, _: Request) -> Response:
        """Return the style sheet shared with the reports."""
        return FileResponse(LOOK)

    async def models(self, request: Request) -> Response:
        """List all versions, the server's URL, and the maximum request size."""
        rows = await list_models(self._server, _key(request))
        return _json({"models": rows, "url": _url(self._server, request), "most_bytes": BODY_LIMIT})

    async def version(self, request: Request) -> Response:
        """Describe a version."""
        return _json(await describe_version(self._server, *_version_of(request)))

    async def image(self, request: Request) -> Response:
        """Run a version on the image in the body."""
        content = await read_body(request)
        top_k = _number(request, "top_k", 5)
        return _json(await answer_image(self._server, *_version_of(request), content, top_k=top_k))

    async def golden(self, request: Request) -> Response:
        """Return the golden sample of a version."""
        return _json({"inputs": await golden_sample(self._server, *_version_of(request))})

    async def tensors(self, request: Request) -> Response:
        """Run a version on the tensors in the body."""
        document = await asyncio.to_thread(_parse, await read_body(request))
        return _json(await answer_tensors(self._server, *_version_of(request), document))

    async def snippets(self, request: Request) -> Response:
        """Return programs that send a request to a version."""
        sample = await golden_sample(self._server, *_version_of(request))
        served = await read_published(self._server.model(*_version_of(request)))
        shapes = {name: row["shape"] for name, row in sample.items()}
        return _json({"snippets": snippets(_url(self._server, request), served, shapes)})

    async def metrics(self, _: Request) -> Response:
        """Return the counters of each version."""
        return _json({"versions": await self._server.traffic()})

    async def load(self, request: Request) -> Response:
        """Load a model, with the admin key."""
        return await self._control(request, "load")

    async def unload(self, request: Request) -> Response:
        """Unload a model, with the admin key."""
        return await self._control(request, "unload")

    async def _control(self, request: Request, verb: str) -> Response:
        name, key = request.path_params["name"], _key(request)
        if not key:
            raise Unauthorized(f"to {verb} a model, the server's admin key is needed", hint=_KEY_HINT)
        async with self._server.connect(key) as client:
            await (client.load(name) if verb == "load" else client.unload(name))
        return _json({})


def _version_of(request: Request) -> tuple[str, str]:
    return request.path_params["name"], str(request.path_params["version"])


def _url(server: ShownServer, request: Request) -> str:
    return server.url_for(request.headers["host"])


def _key(request: Request) -> str:
    """Return the admin key in a request, or an empty string."""
    key = request.headers.get(HTTP_HEADER, "")
    return check_key(key, "the page") if key else ""


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"the request is not JSON: {error}") from error


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise InvalidInput(f"{name} must be a number, got '{text[:40]}'")
    return int(text)


def _json(document: Any) -> Response:
    """Create a JSON response in which NaN and infinity are null."""
    return Response(json_text(document, compact=True), media_type="application/json")


async def _error_response(_: Request, error: Exception) -> Response:
    assert isinstance(error, GraphkilnError)  # noqa: S101 - registered for this type
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), _BAD_GATEWAY)
    hint = _KEY_HINT if error.hint == HOW_TO_GIVE_IT else error.hint
    body = {"kind": type(error).__name__, "message": error.message, "hint": hint}
    return JSONResponse({"error": body}, status)


async def _http_response(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for this type
    body = {"kind": "HTTP", "message": error.detail, "hint": ""}
    return JSONResponse({"error": body}, error.status_code, headers=error.headers)


def shown_server(facts: PageFacts) -> ShownServer:
    """Create the server's clients; they do not use an admin key found on this machine."""
    return ShownServer(
        connect=lambda key: AsyncClient(facts.inner_url, max_retries=0, admin_key=key or _NO_KEY),
        stores=Stores([Path(folder) for folder in facts.stores]),
        url=facts.url,
        metrics_url=facts.metrics_url,
        everywhere=facts.everywhere,
    )


def configure(facts: PageFacts) -> uvicorn.Config:
    """Configure the ASGI server."""
    certificate, key, authorities = facts.tls or ("", "", "")
    return uvicorn.Config(
        build_app(shown_server(facts), facts.names),
        log_level="warning",
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_keep_alive=_KEEP_ALIVE_S,
        server_header=False,
        ws="none",
        ssl_certfile=certificate or None,
        ssl_keyfile=key or None,
        ssl_ca_certs=authorities or None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if authorities else ssl.CERT_NONE,
    )


async def run(arguments: Sequence[str]) -> None:
    """Serve until the parent process ends."""
    descriptor, document = arguments
    server = uvicorn.Server(configure(PageFacts(**json.loads(document))))
    await run_until_orphaned(server.serve([socket.socket(fileno=int(descriptor))]))


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1:]))
