"""The application: its paths, and how errors are told."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from graphkiln.page.models import describe_version, kind_of, list_models
from graphkiln.page.security import BODY_LIMIT, Guard, read_body
from graphkiln.page.server import ShownServer
from graphkiln.page.snippets import snippets
from graphkiln.page.tensors import answer_tensors, golden_sample
from graphkiln.page.timing import timed
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
from graphkiln_backend.images.decoding import open_image
from graphkiln_backend.system.admin_key import HOW_TO_GIVE_IT, HTTP_HEADER, check_key
from graphkiln_client import AsyncModel
from graphkiln_client.published import ServedVersion

# What a version says about an image, and where the time went.

_SHOWN_FEATURES = 64
_MOST_CLASSES = 1000
_CLASSIFICATION = "classification"
_Answer = dict[str, Any]
_Times = dict[str, Any]
_Rows = Sequence[Mapping[str, Any]]


async def answer_image(server: ShownServer, name: str, version: str, content: bytes, *, top_k: int) -> _Answer:
    """What a version says about an image.

    Args:
        server: The server.
        name: Model name.
        version: Its version.
        content: The encoded image.
        top_k: How many classes, of a classifier.

    Returns:
        `kind`; `classifications`, `detections`, `segments` or `vector`; `width` and `height` of the image; `times`. Of
        a classifier also `are_shares`: whether the scores are from 0 to 1. Those of one plain output that are not are
        asked for again as probabilities.

    Raises:
        InvalidInput: It is no image, or the model takes none.
        ClientError: The request failed.
    """
    if not 1 <= top_k <= _MOST_CLASSES:
        raise InvalidInput(f"top_k must be from 1 to {_MOST_CLASSES}, got {top_k}")
    served = await server.served(name, version)
    kind = kind_of(served)
    if kind not in _KINDS:
        raise InvalidInput(f"'{name}' takes no images: it does not say how they become its input")
    model = server.model(name, version)
    begun = time.perf_counter()
    image = await asyncio.to_thread(open_image, content)
    decode_ms = (time.perf_counter() - begun) * 1e3
    answer, times = await _ask(kind, served, model, image, top_k)
    times = {**times, "decode_ms": decode_ms, "total_ms": decode_ms + times["total_ms"]}
    return {"kind": kind, "width": image.width, "height": image.height, "times": times, **answer}


async def _ask(
    kind: str, served: ServedVersion, model: AsyncModel, image: Image.Image, top_k: int
) -> tuple[_Answer, _Times]:
    if kind == _CLASSIFICATION:
        return await _classify(served, model, image, top_k)
    return await timed(model, lambda: _ASK[kind](model, image))


async def _classify(served: ServedVersion, model: AsyncModel, image: Image.Image, top_k: int) -> tuple[_Answer, _Times]:
    """All classes are looked at, however few are shown: the best score of logits may well be below 1."""
    result, times = await timed(model, lambda: model.classify(image, top_k=_MOST_CLASSES))
    if served.ranking is None and _are_logits(result.to_dict()["classifications"]):
        result, times = await timed(model, lambda: model.classify(image, top_k=top_k, softmax=True))
    document = result.to_dict()
    rows = document["classifications"]
    shown = {"classifications": _best(rows, top_k), "are_shares": _are_shares(rows)}
    return {**shown, "request_id": document["request_id"]}, times


def _are_logits(rows: _Rows) -> bool:
    """Scores that are no probabilities, of one output without positions: only there one softmax means something."""
    if any("output" in row or "position" in row for row in rows):
        return False
    return any(score is not None and not 0 <= score <= 1 for score in _scores(rows))


def _are_shares(rows: _Rows) -> bool:
    return all(score is not None and 0 <= score <= 1 for score in _scores(rows))


def _scores(rows: _Rows) -> list[float | None]:
    return [row["score"] for row in rows]


def _best(rows: _Rows, top_k: int) -> list[Mapping[str, Any]]:
    """The first rows of each output and position; they lie together, best first."""
    groups = groupby(rows, key=lambda row: (row.get("output"), row.get("position")))
    return [row for _, group in groups for row in list(group)[:top_k]]


async def _detect(model: AsyncModel, image: Image.Image) -> _Answer:
    found = await model.detect(image)
    return {"detections": await asyncio.to_thread(lambda: [detection.to_dict() for detection in found])}


async def _segment(model: AsyncModel, image: Image.Image) -> _Answer:
    return await asyncio.to_thread((await model.segment(image)).to_dict)


async def _embed(model: AsyncModel, image: Image.Image) -> _Answer:
    vector = await model.embed(image)
    shown = [float(value) for value in vector[:_SHOWN_FEATURES]]
    return {"vector": shown, "features": len(vector), "norm": float(np.linalg.norm(vector.astype(np.float64)))}


_ASK: Mapping[str, Callable[[AsyncModel, Image.Image], Awaitable[_Answer]]] = {
    "detection": _detect,
    "segmentation": _segment,
    "embedding": _embed,
}
_KINDS = {_CLASSIFICATION, *_ASK}


STATIC = Path(__file__).parent / "static"  # the files of the page
_STATUS: dict[type[GraphkilnError], int] = {
    InvalidInput: 400,
    Unauthorized: 401,
    ModelNotFound: 404,
    Overloaded: 429,
    DeadlineExceeded: 504,
}
_BAD_GATEWAY = 502  # of what went wrong behind the page
_VERSION = "/api/models/{name}/{version:int}"


def build_app(server: ShownServer, names: Collection[str] = ()) -> Starlette:
    """The application.

    Args:
        server: What it shows.
        names: Host names, beside `localhost`, by which it may be called.
    """

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await server.close()

    return Starlette(
        routes=[*Views(server).routes(), Mount("/", StaticFiles(directory=STATIC, html=True))],
        lifespan=lifespan,
        middleware=[Middleware(Guard, names=names)],
        exception_handlers={GraphkilnError: _tell, HTTPException: _tell_http},
    )


class Views:
    """What each path answers.

    Args:
        server: What is shown.
    """

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
        """All about a version."""
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
        """What a version computes from the tensors in the body."""
        document = await asyncio.to_thread(_parse, await read_body(request))
        return _json(await answer_tensors(self._server, *_asked(request), document))

    async def snippets(self, request: Request) -> Response:
        """Programs that ask a version."""
        sample = await golden_sample(self._server, *_asked(request))
        served = await self._server.served(*_asked(request))
        shapes = {name: row["shape"] for name, row in sample.items()}
        return _json({"snippets": snippets(_url(self._server, request), served, shapes)})

    async def metrics(self, _: Request) -> Response:
        """What each version has done so far."""
        return _json({"versions": await self._server.traffic()})

    async def load(self, request: Request) -> Response:
        """Loads a model, with the admin key."""
        return await self._control(request, "load")

    async def unload(self, request: Request) -> Response:
        """Unloads a model, with the admin key."""
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
    """The admin key that came with a request; the page has none of its own."""
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


async def _tell(_: Request, error: Exception) -> Response:
    assert isinstance(error, GraphkilnError)  # noqa: S101 - as it is registered
    status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), _BAD_GATEWAY)
    hint = "type the server's admin key beside the models" if error.hint == HOW_TO_GIVE_IT else error.hint
    told = {"kind": type(error).__name__, "message": error.message, "hint": hint}
    return JSONResponse({"error": told}, status)


async def _tell_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - as it is registered
    told = {"kind": "HTTP", "message": error.detail, "hint": ""}
    return JSONResponse({"error": told}, error.status_code, headers=error.headers)
