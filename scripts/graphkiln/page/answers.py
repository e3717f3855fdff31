"""Requests from the page: images and tensors, with the time that the request spent in the server.

Triton updates its statistics after it has responded, and counts all requests together. They are therefore read until
they change; if other requests were counted in between, the times are the mean of all of them.
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
from graphkiln.page.server import ShownServer, kind_of, read_published
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import InvalidInput, ProtocolError
from graphkiln_backend.graph.files import format_size
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.images.decoding import open_image
from graphkiln_backend.proof import policy
from graphkiln_client import AsyncModel
from graphkiln_client.published import ServedVersion
from graphkiln_client.transports.tensors import from_values

T = TypeVar("T")
_SHOWN_FEATURES = 64
_MAX_CLASSES = 1000
_READINGS = 40
_PAUSE_S = 0.025
_PHASES = ("queue", "compute_input", "compute_infer", "compute_output")
_CLASSIFICATION = "classification"
_Answer = dict[str, Any]
_Times = dict[str, Any]
_Rows = Sequence[Mapping[str, Any]]


async def answer_image(server: ShownServer, name: str, version: str, content: bytes, *, top_k: int) -> _Answer:
    """Run a version on an image.

    Logits of a single output without positions are requested again as probabilities.

    Returns:
        `kind`; `classifications`, `detections`, `segments` or `vector`; `width` and `height` of the image; `times`; for
        a classifier also `are_shares`: True if all scores are between 0 and 1.

    Raises:
        InvalidInput: The content is not an image, or the model takes no images.
        ClientError: The request failed.
    """
    if not 1 <= top_k <= _MAX_CLASSES:
        raise InvalidInput(f"top_k must be between 1 and {_MAX_CLASSES}, got {top_k}")
    model = server.model(name, version)
    served = await read_published(model)
    kind = kind_of(served)
    if kind not in _KINDS:
        raise InvalidInput(f"'{name}' takes no images: it has no preprocess spec")
    started = time.perf_counter()
    image = await asyncio.to_thread(open_image, content)
    decode_ms = (time.perf_counter() - started) * 1e3
    if kind == _CLASSIFICATION:
        answer, times = await _classify(served, model, image, top_k)
    else:
        answer, times = await timed(model, lambda: _METHODS[kind](model, image))
    times = {**times, "decode_ms": decode_ms, "total_ms": decode_ms + times["total_ms"]}
    return {"kind": kind, "width": image.width, "height": image.height, "times": times, **answer}


async def _classify(served: ServedVersion, model: AsyncModel, image: Image.Image, top_k: int) -> tuple[_Answer, _Times]:
    """Request all classes, because the best logits may be between 0 and 1."""
    result, times = await timed(model, lambda: model.classify(image, top_k=_MAX_CLASSES))
    if served.ranking is None and _are_logits(result.to_dict()["classifications"]):
        result, times = await timed(model, lambda: model.classify(image, top_k=top_k, softmax=True))
    document = result.to_dict()
    rows = document["classifications"]
    shown = {"classifications": _best(rows, top_k), "are_shares": _are_shares(rows)}
    return {**shown, "request_id": document["request_id"]}, times


def _are_logits(rows: _Rows) -> bool:
    """Check for scores outside 0 to 1 in a single output without positions, to which a softmax applies."""
    if any("output" in row or "position" in row for row in rows):
        return False
    return any(row["score"] is not None and not 0 <= row["score"] <= 1 for row in rows)


def _are_shares(rows: _Rows) -> bool:
    return all(row["score"] is not None and 0 <= row["score"] <= 1 for row in rows)


def _best(rows: _Rows, top_k: int) -> list[Mapping[str, Any]]:
    """Take the best rows of each output and position."""
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


_METHODS: Mapping[str, Callable[[AsyncModel, Image.Image], Awaitable[_Answer]]] = {
    "detection": _detect,
    "segmentation": _segment,
    "embedding": _embed,
}
_KINDS = {_CLASSIFICATION, *_METHODS}


async def timed(model: AsyncModel, request: Callable[[], Awaitable[T]]) -> tuple[T, _Times]:
    """Send a request to a model, and read the time spent in each phase from its statistics.

    Returns:
        The answer, and its times: `total_ms`, and if the server counts the request within a second, `queue_ms`,
        `compute_ms` and `requests`, the number of requests of which these are the mean.

    Raises:
        ClientError: The request failed, or the statistics cannot be read.
    """
    before = await _spent(model)
    started = time.perf_counter()
    answer = await request()
    total_ms = (time.perf_counter() - started) * 1e3
    for _ in range(_READINGS):
        now = await _spent(model)
        if requests := now["success"] - before["success"]:
            queue_ms, *compute_ms = [(now[phase] - before[phase]) / requests / 1e6 for phase in _PHASES]
            times = {"queue_ms": queue_ms, "compute_ms": sum(compute_ms), "requests": requests}
            return answer, {"total_ms": total_ms, **times}
        await asyncio.sleep(_PAUSE_S)
    return answer, {"total_ms": total_ms}


async def _spent(model: AsyncModel) -> dict[str, int]:
    """Read the number of successful requests, and their nanoseconds by phase; 0 if missing.

    Source: Triton's statistics extension.
    """
    statistics = (await model.statistics()).get("inference_stats", {})
    spent = {phase: int(statistics.get(phase, {}).get("ns", 0)) for phase in _PHASES}
    return {"success": int(statistics.get("success", {}).get("count", 0)), **spent}


# Larger golden tensors are not editable in the form.
EDITED = 20_000
_MAX_SAFE_INTEGER = 1 << 53  # larger integers are sent to JavaScript as text
_SHOWN = 1000  # elements of an output
_GOLDEN = "golden"
_Arrays = Mapping[str, AnyArray]


async def golden_sample(server: ShownServer, name: str, version: str) -> dict[str, Any]:
    """Return the first golden sample of a version for the form.

    Returns:
        `datatype`, `shape` and `data` by input name. `data` is None for a tensor that cannot be edited because it is
        too large or contains NaN or infinity. Empty for a version without golden samples.

    Raises:
        ManifestError: The samples are damaged.
    """
    golden = await asyncio.to_thread(server.stores.golden, name, version)
    return {input_: _form_row(array) for input_, array in golden.feeds[0].items()} if golden else {}


async def answer_tensors(server: ShownServer, name: str, version: str, document: Any) -> dict[str, Any]:
    """Run a version on tensors.

    Args:
        server: The server.
        name: Model name.
        version: Model version.
        document: `datatype`, `shape` and `data` by input name, with `data` as a flat list, or None for zeros; or
            `golden: true` for the golden sample.

    Returns:
        `times`, and `outputs` by name: `datatype`, `shape`, the first elements as `data`, and `least`, `most` and
        `mean` of numbers. If all inputs are golden also `golden_error`, the relative L2 error beside the saved graph's
        outputs, and `golden_limit` and `golden_agrees`, which are None for an unknown precision.

    Raises:
        InvalidInput: The document is malformed, or the tensors do not fit the model.
        ClientError: The request failed.
    """
    if not isinstance(document, dict) or not all(isinstance(row, dict) for row in document.values()):
        raise InvalidInput("expected a JSON object of tensors by name")
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
        raise InvalidInput(f"input '{name}': the shape must be a list of non-negative numbers, got {str(shape)[:80]}")
    try:
        datatype = str(row.get("datatype"))
        return _zeros(name, datatype, shape) if data is None else _values(name, datatype, shape, data)
    except ProtocolError as error:
        raise InvalidInput(f"input '{name}': {error.message.replace('the response has', 'it has')}") from error


def _values(name: str, datatype: str, shape: Sequence[int], data: Any) -> AnyArray:
    """Convert typed values to a tensor; raise an error for numbers that the datatype rounds to infinity."""
    with np.errstate(over="ignore"):
        array = from_values(data, datatype, tuple(shape))
    if not _is_finite(array):
        raise InvalidInput(f"input '{name}': a value is out of the range of {datatype}")
    return array


def _zeros(name: str, datatype: str, shape: Sequence[int]) -> AnyArray:
    """Create zeros or empty strings, at most as many as fit into a request."""
    like = from_values([], datatype, (0, *shape))
    if math.prod(shape) * like.itemsize > BODY_LIMIT:
        raise InvalidInput(f"input '{name}': {list(shape)} is larger than {format_size(BODY_LIMIT)}")
    return np.full(shape, b"" if like.dtype == np.object_ else 0, like.dtype)


def _expected(inputs: _Arrays, golden: GoldenSamples | None) -> _Arrays:
    """Return the golden outputs if the inputs are golden; otherwise an empty mapping."""
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
    """Compare an output with the golden output."""
    if expected is None or expected.shape != numbers.shape:
        return {}
    reference = expected.astype(np.float64)
    same = (numbers == reference) | (np.isnan(numbers) & np.isnan(reference))
    apart = float(np.linalg.norm(np.subtract(numbers, reference, where=~same, out=np.zeros_like(numbers))))
    error = apart / (float(np.linalg.norm(reference[np.isfinite(reference)])) or 1.0)
    return {"golden_error": error, "golden_limit": limit, "golden_agrees": None if limit is None else error <= limit}


def _limit(precision: str) -> float | None:
    """Return the allowed relative L2 error of a precision; None for an unknown precision."""
    rows = {**policy.BY_PRECISION, Precision.FP32: policy.OTHER_ENGINE}
    row = next((row for known, row in rows.items() if known.value == precision), None)
    return row.relative_l2 if row else None


def _form_row(array: AnyArray) -> dict[str, Any]:
    """Describe a golden tensor for the form; without data if it cannot be edited."""
    return _row(array, EDITED if _is_finite(array) else -1)


def _is_finite(array: AnyArray) -> bool:
    """Check that a tensor contains neither NaN nor infinity."""
    return not DType.from_numpy(array.dtype).is_float or bool(np.isfinite(array.astype(np.float64)).all())


def _row(array: AnyArray, most: int) -> dict[str, Any]:
    datatype = DType.from_numpy(array.dtype)
    data = None if array.size > most else [_plain(value) for value in array.reshape(-1).tolist()]
    return {"datatype": datatype.value, "shape": list(array.shape), "data": data}


def _plain(value: Any) -> Any:
    """Convert an element to JSON."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, int) and abs(value) > _MAX_SAFE_INTEGER:
        return str(value)
    return value if isinstance(value, str | bool | int) else float(value)
