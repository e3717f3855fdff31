"""Answers of a model version about an image, with the time that the request spent inside the server.

Triton counts a request after it has answered it, and counts all requests together. So its statistics are read until
they moved; where other requests came in between, times are the mean over so many of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from graphkiln.page.models import kind_of
from graphkiln.page.server import ShownServer
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.images.decoding import open_image
from graphkiln_client import AsyncModel
from graphkiln_client.published import ServedVersion

T = TypeVar("T")
_SHOWN_FEATURES = 64
_MOST_CLASSES = 1000
_READINGS = 40
_PAUSE_S = 0.025
_PHASES = ("queue", "compute_input", "compute_infer", "compute_output")
_CLASSIFICATION = "classification"
_Answer = dict[str, Any]
_Times = dict[str, Any]
_Rows = Sequence[Mapping[str, Any]]


async def answer_image(server: ShownServer, name: str, version: str, content: bytes, *, top_k: int) -> _Answer:
    """Ask a version about an image.

    Returns:
        `kind`; `classifications`, `detections`, `segments` or `vector`; `width` and `height` of the image; `times`. Of
        a classifier also `are_shares`: True if the scores are from 0 to 1. Logits of one plain output are requested
        again as probabilities.

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
    if kind == _CLASSIFICATION:
        answer, times = await _classify(served, model, image, top_k)
    else:
        answer, times = await timed(model, lambda: _ASK[kind](model, image))
    times = {**times, "decode_ms": decode_ms, "total_ms": decode_ms + times["total_ms"]}
    return {"kind": kind, "width": image.width, "height": image.height, "times": times, **answer}


async def _classify(served: ServedVersion, model: AsyncModel, image: Image.Image, top_k: int) -> tuple[_Answer, _Times]:
    """Request all classes, however few are shown: the best score of logits may well be below 1."""
    result, times = await timed(model, lambda: model.classify(image, top_k=_MOST_CLASSES))
    if served.ranking is None and _are_logits(result.to_dict()["classifications"]):
        result, times = await timed(model, lambda: model.classify(image, top_k=top_k, softmax=True))
    document = result.to_dict()
    rows = document["classifications"]
    shown = {"classifications": _best(rows, top_k), "are_shares": _are_shares(rows)}
    return {**shown, "request_id": document["request_id"]}, times


def _are_logits(rows: _Rows) -> bool:
    """True for scores of one output without positions that are no probabilities: a softmax is of these alone."""
    if any("output" in row or "position" in row for row in rows):
        return False
    return any(row["score"] is not None and not 0 <= row["score"] <= 1 for row in rows)


def _are_shares(rows: _Rows) -> bool:
    return all(row["score"] is not None and 0 <= row["score"] <= 1 for row in rows)


def _best(rows: _Rows, top_k: int) -> list[Mapping[str, Any]]:
    """The first rows of each output and position; these are together, best first."""
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


async def timed(model: AsyncModel, ask: Callable[[], Awaitable[T]]) -> tuple[T, _Times]:
    """Send a request to a model, and read from its statistics where the time went.

    Returns:
        The answer; `total_ms`, and if the server has counted the request within a second, `queue_ms`, `compute_ms` and
        `requests`, the number of requests of which these are the mean.

    Raises:
        ClientError: The request failed, or the statistics cannot be read.
    """
    before = await _spent(model)
    begun = time.perf_counter()
    answer = await ask()
    total_ms = (time.perf_counter() - begun) * 1e3
    for _ in range(_READINGS):
        now = await _spent(model)
        if requests := now["success"] - before["success"]:
            queue_ms, *compute_ms = [(now[phase] - before[phase]) / requests / 1e6 for phase in _PHASES]
            times = {"queue_ms": queue_ms, "compute_ms": sum(compute_ms), "requests": requests}
            return answer, {"total_ms": total_ms, **times}
        await asyncio.sleep(_PAUSE_S)
    return answer, {"total_ms": total_ms}


async def _spent(model: AsyncModel) -> dict[str, int]:
    """The number of requests that succeeded so far, and their nanoseconds by phase; 0 for what is missing.

    Source: Triton's statistics extension.
    """
    statistics = (await model.statistics()).get("inference_stats", {})
    spent = {phase: int(statistics.get(phase, {}).get("ns", 0)) for phase in _PHASES}
    return {"success": int(statistics.get("success", {}).get("count", 0)), **spent}
