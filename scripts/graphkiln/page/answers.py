"""Answers of a model version about an image, with the time that the request spent inside the server.

Triton counts a request after it has answered it, and counts all requests together. So its statistics are read until
they moved; where other requests came in between, times are the mean over so many of them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from graphkiln.page.security import BODY_LIMIT
from graphkiln.page.server import ShownServer, kind_of
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import InvalidInput, ProtocolError
from graphkiln_backend.graph.files import format_size
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.images.decoding import open_image
from graphkiln_backend.proof import policy
from graphkiln_client import AsyncModel
from graphkiln_client.remote_model import ServedVersion
from graphkiln_client.transports.tensors import from_values

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


# Tensors in a browser: the golden sample of a version as a form, and the outputs for a form.

# Most elements of a tensor that a form shows; a larger golden one is sent unchanged.
EDITED = 20_000
_EXACT = 1 << 53  # integers beyond it are no numbers of JavaScript: they travel as text
_SHOWN = 1000  # elements of an output
_GOLDEN = "golden"
_Arrays = Mapping[str, AnyArray]


async def golden_sample(server: ShownServer, name: str, version: str) -> dict[str, Any]:
    """The first golden sample of a version, for a form.

    Returns:
        By input name: `datatype`, `shape` and `data`, which is None for a tensor that is too large to be edited, or
        holds values that cannot be typed (NaN, infinity). Empty where the version has no golden samples.

    Raises:
        ManifestError: They are damaged.
    """
    golden = await asyncio.to_thread(server.stores.golden, name, version)
    return {input_: _form_row(array) for input_, array in golden.feeds[0].items()} if golden else {}


async def answer_tensors(server: ShownServer, name: str, version: str, document: Any) -> dict[str, Any]:
    """Run a version on tensors.

    Args:
        server: The server.
        name: Model name.
        version: Its version.
        document: By input name: `datatype`, `shape` and `data`, a flat list, or None for zeros; or `golden`, true for
            the golden one.

    Returns:
        `outputs` by name: `datatype`, `shape`, the first elements as `data`, `least`, `most` and `mean` of numbers, and
        where all inputs are the golden ones `golden_error`, relative L2 to what the saved graph computed, and with it
        `golden_limit` of the precision that serves and `golden_agrees`, None where that is not known. And `times`.

    Raises:
        InvalidInput: The tensors are not such, or not those of the model.
        ClientError: The request failed.
    """
    if not isinstance(document, dict) or not all(isinstance(row, dict) for row in document.values()):
        raise InvalidInput("the request is no JSON object of tensors by name")
    golden = await asyncio.to_thread(server.stores.golden, name, version)
    inputs = {input_: _read(input_, row, golden) for input_, row in document.items()}
    model = server.model(name, version)
    await model.metadata()
    outputs, times = await timed(model, lambda: model.infer(inputs))
    expected, limit = _expected(inputs, golden), _limit(await server.precision(name, version))
    described = {key: _described(array, expected.get(key), limit) for key, array in outputs.items()}
    return {"outputs": described, "times": times}


def _read(name: str, row: Mapping[str, Any], golden: GoldenSamples | None) -> AnyArray:
    if row.get(_GOLDEN):
        if golden is None or name not in golden.inputs:
            raise InvalidInput(f"there is no golden sample of '{name}'")
        return golden.feeds[0][name]
    shape, data = row.get("shape"), row.get("data")
    if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise InvalidInput(f"input '{name}': the shape must be a list of numbers from 0, got {str(shape)[:80]}")
    try:
        datatype = str(row.get("datatype"))
        return _zeros(name, datatype, shape) if data is None else _values(name, datatype, shape, data)
    except ProtocolError as error:
        raise InvalidInput(f"input '{name}': {error.message.replace('the response has', 'there is')}") from error


def _values(name: str, datatype: str, shape: Sequence[int], data: Any) -> AnyArray:
    """The typed values; refuse a number that its type rounds to infinity."""
    with np.errstate(over="ignore"):
        array = from_values(data, datatype, tuple(shape))
    if not _is_finite(array):
        raise InvalidInput(f"input '{name}': a value is out of the range of {datatype}")
    return array


def _zeros(name: str, datatype: str, shape: Sequence[int]) -> AnyArray:
    """Zeros, or empty texts, where nothing was typed; no more of them than a request could hold."""
    like = from_values([], datatype, (0, *shape))
    if math.prod(shape) * like.itemsize > BODY_LIMIT:
        raise InvalidInput(f"input '{name}': {list(shape)} is larger than {format_size(BODY_LIMIT)}")
    return np.full(shape, b"" if like.dtype == np.object_ else 0, like.dtype)


def _expected(inputs: _Arrays, golden: GoldenSamples | None) -> _Arrays:
    """The golden outputs if the inputs are the golden ones; else nothing."""
    if golden is None or set(inputs) != set(golden.inputs):
        return {}
    if not all(np.array_equal(inputs[name], array) for name, array in golden.feeds[0].items()):
        return {}
    return golden.graph_outputs if golden.whole else {key: array[:1] for key, array in golden.graph_outputs.items()}


def _described(array: AnyArray, expected: AnyArray | None, limit: float | None) -> dict[str, Any]:
    row = _row(array.reshape(-1)[:_SHOWN], _SHOWN)
    row["shape"] = list(array.shape)
    if array.size and array.dtype.kind not in "OSU":
        numbers = array.astype(np.float64)
        row |= {"least": float(numbers.min()), "most": float(numbers.max()), "mean": float(numbers.mean())}
        row |= _verdict(numbers, expected, limit)
    return row


def _verdict(numbers: Any, expected: AnyArray | None, limit: float | None) -> dict[str, Any]:
    """Distance of an output from the golden one, beside its limit."""
    if expected is None or expected.shape != numbers.shape:
        return {}
    reference = expected.astype(np.float64)
    same = (numbers == reference) | (np.isnan(numbers) & np.isnan(reference))
    apart = float(np.linalg.norm(np.subtract(numbers, reference, where=~same, out=np.zeros_like(numbers))))
    error = apart / (float(np.linalg.norm(reference[np.isfinite(reference)])) or 1.0)
    return {"golden_error": error, "golden_limit": limit, "golden_agrees": None if limit is None else error <= limit}


def _limit(precision: str) -> float | None:
    """Limit of a precision beside the saved graph's outputs, relative L2; None for an unknown precision."""
    rows = {**policy.BY_PRECISION, Precision.FP32: policy.OTHER_ENGINE}
    row = next((row for known, row in rows.items() if known.value == precision), None)
    return row.relative_l2 if row else None


def _form_row(array: AnyArray) -> dict[str, Any]:
    """A golden tensor for a form; without data where it could not be typed again."""
    return _row(array, EDITED if _is_finite(array) else -1)


def _is_finite(array: AnyArray) -> bool:
    """True if a tensor holds neither NaN nor infinity."""
    return not DType.from_numpy(array.dtype).is_float or bool(np.isfinite(array.astype(np.float64)).all())


def _row(array: AnyArray, most: int) -> dict[str, Any]:
    datatype = DType.from_numpy(array.dtype)
    data = None if array.size > most else [_plain(value) for value in array.reshape(-1).tolist()]
    return {"datatype": datatype.value, "shape": list(array.shape), "data": data}


def _plain(value: Any) -> Any:
    """As JSON has it: text, numbers, booleans."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, int) and abs(value) > _EXACT:
        return str(value)
    return value if isinstance(value, str | bool | int) else float(value)
