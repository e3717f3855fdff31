"""The application of the page: its paths, and its errors."""

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
from graphkiln.page.server import ShownServer, Stores, describe_version, list_models
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

STATIC = Path(__file__).parent / "static"  # the files of the page
_STATUS: dict[type[GraphkilnError], int] = {
    InvalidInput: 400,
    Unauthorized: 401,
    ModelNotFound: 404,
    Overloaded: 429,
    DeadlineExceeded: 504,
}
_BAD_GATEWAY = 502  # an error behind the page
_VERSION = "/api/models/{name}/{version:int}"


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
    """The handler of each path."""

    def __init__(self, server: ShownServer) -> None:
        self._server = server

    def routes(self) -> list[Route]:
        """The paths of the application, without its files."""
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
        """Colors and marks that the page has in common with the reports."""
        return FileResponse(LOOK)

    async def models(self, request: Request) -> Response:
        """Every version, where the server is, and how large a request may be."""
        rows = await list_models(self._server, _key(request))
        return _json({"models": rows, "url": _url(self._server, request), "most_bytes": BODY_LIMIT})

    async def version(self, request: Request) -> Response:
        """Everything about a version."""
        return _json(await describe_version(self._server, *_asked(request)))

    async def image(self, request: Request) -> Response:
        """An answer about the image in the body."""
        content = await read_body(request)
        top_k = _number(request, "top_k", 5)
        return _json(await answer_image(self._server, *_asked(request), content, top_k=top_k))

    async def golden(self, request: Request) -> Response:
        """The golden sample of a version."""
        return _json({"inputs": await golden_sample(self._server, *_asked(request))})

    async def tensors(self, request: Request) -> Response:
        """Outputs of a version for the tensors in the body."""
        document = await asyncio.to_thread(_parse, await read_body(request))
        return _json(await answer_tensors(self._server, *_asked(request), document))

    async def snippets(self, request: Request) -> Response:
        """Programs that send a request to a version."""
        sample = await golden_sample(self._server, *_asked(request))
        served = await self._server.served(*_asked(request))
        shapes = {name: row["shape"] for name, row in sample.items()}
        return _json({"snippets": snippets(_url(self._server, request), served, shapes)})

    async def metrics(self, _: Request) -> Response:
        """Counters of each version."""
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
            raise Unauthorized(f"to {verb} a model takes the server's admin key", hint="type it beside the models")
        async with self._server.connect(key) as client:
            await (client.load(name) if verb == "load" else client.unload(name))
        self._server.forget(name)
        return _json({})


def _asked(request: Request) -> tuple[str, str]:
    return request.path_params["name"], str(request.path_params["version"])


def _url(server: ShownServer, request: Request) -> str:
    return server.url_for(request.headers["host"])


def _key(request: Request) -> str:
    """The admin key that came with a request; the page itself has none."""
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
    """JSON as browsers read it: NaN and infinity are null."""
    return Response(json_text(document, compact=True), media_type="application/json")


async def _error_response(_: Request, error: Exception) -> Response:
    assert isinstance(error, GraphkilnError)  # noqa: S101 - as it is registered
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), _BAD_GATEWAY)
    hint = "type the server's admin key beside the models" if error.hint == HOW_TO_GIVE_IT else error.hint
    body = {"kind": type(error).__name__, "message": error.message, "hint": hint}
    return JSONResponse({"error": body}, status)


async def _http_response(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - as it is registered
    body = {"kind": "HTTP", "message": error.detail, "hint": ""}
    return JSONResponse({"error": body}, error.status_code, headers=error.headers)


# The process of the page: the application on a listener that its parent holds.
#
#     python -m graphkiln.page.app LISTENER DOCUMENT
#
# DOCUMENT is JSON, of `PageFacts`.

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
