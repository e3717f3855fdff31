"""What a version says about an image, and where the time went."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
from PIL import Image

from graphkiln.page.models import kind_of
from graphkiln.page.server import ShownServer
from graphkiln.page.timing import read_spent
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.images.decoding import open_image
from graphkiln_client import AsyncModel

_SHOWN_FEATURES = 64
_MOST_CLASSES = 1000


async def answer_image(
    server: ShownServer, name: str, version: str, content: bytes, *, top_k: int, softmax: bool
) -> dict[str, Any]:
    """What a version says about an image.

    Args:
        server: The server.
        name: Model name.
        version: Its version.
        content: The encoded image.
        top_k: How many classes, of a classifier.
        softmax: Whether its scores become probabilities.

    Returns:
        `kind`; `classifications`, `detections`, `segments` or `vector`; `width` and `height` of the image; `times`.

    Raises:
        InvalidInput: It is no image, or the model takes none.
        ClientError: The request failed.
    """
    if not 1 <= top_k <= _MOST_CLASSES:
        raise InvalidInput(f"top_k must be from 1 to {_MOST_CLASSES}, got {top_k}")
    kind = kind_of(await server.served(name, version))
    if kind not in _ASK:
        raise InvalidInput(f"'{name}' takes no images: it does not say how they become its input")
    model = server.model(name, version)
    begun = time.perf_counter()
    image = await asyncio.to_thread(open_image, content)
    decoded_ms = _since(begun)
    spent = await read_spent(model)
    begun = time.perf_counter()
    answer = await _ASK[kind](model, image, {"top_k": top_k, "softmax": softmax})
    total_ms = _since(begun)
    times = {"decode_ms": decoded_ms, "total_ms": decoded_ms + total_ms, **await spent.until_now(model)}
    return {"kind": kind, "width": image.width, "height": image.height, "times": times, **answer}


Ask = Callable[[AsyncModel, Image.Image, Mapping[str, Any]], Awaitable[dict[str, Any]]]


async def _classify(model: AsyncModel, image: Image.Image, options: Mapping[str, Any]) -> dict[str, Any]:
    result = (await model.classify(image, **options)).to_dict()
    return {"classifications": result["classifications"], "request_id": result["request_id"]}


async def _detect(model: AsyncModel, image: Image.Image, _: Mapping[str, Any]) -> dict[str, Any]:
    found = await model.detect(image)
    return {"detections": await asyncio.to_thread(lambda: [detection.to_dict() for detection in found])}


async def _segment(model: AsyncModel, image: Image.Image, _: Mapping[str, Any]) -> dict[str, Any]:
    return await asyncio.to_thread((await model.segment(image)).to_dict)


async def _embed(model: AsyncModel, image: Image.Image, _: Mapping[str, Any]) -> dict[str, Any]:
    vector = await model.embed(image)
    shown = [float(value) for value in vector[:_SHOWN_FEATURES]]
    return {"vector": shown, "features": len(vector), "norm": float(np.linalg.norm(vector.astype(np.float64)))}


_ASK: Mapping[str, Ask] = {
    "classification": _classify,
    "detection": _detect,
    "segmentation": _segment,
    "embedding": _embed,
}


def _since(begun: float) -> float:
    return (time.perf_counter() - begun) * 1e3
