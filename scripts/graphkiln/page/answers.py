"""What a version says about an image, and where the time went."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from PIL import Image

from graphkiln.page.models import kind_of
from graphkiln.page.server import ShownServer
from graphkiln.page.timing import timed
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.images.decoding import open_image
from graphkiln_client import AsyncModel
from graphkiln_client.served_version import ServedVersion

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
