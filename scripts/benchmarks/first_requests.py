"""What the first request of each batch size costs beside later ones, of a server that has just become ready."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ClientError
from graphkiln_client import Client

_LATER = 5  # further requests of each size: their median is what the first one is compared with


def first_requests(url: str, model: str, largest: int) -> dict[int, float]:
    """Seconds of the first request of each batch size over the median of later ones.

    Each size is new to the server when it is asked: first come the first requests of all sizes, then the later ones.

    Args:
        url: Of a server that has answered no request of the model yet.
        model: The model; its first dimension is that of the batch.
        largest: Its largest batch.

    Raises:
        ClientError: A request failed.
    """
    with Client(url, timeout_s=120) as client:
        served = client.model(model)
        inputs = served.metadata["inputs"]
        with suppress(ClientError):  # refused by Triton: what this client does for the first time is not measured
            served.infer(feeds_of(inputs, largest + 1))
        sends = {size: served.repeatable(feeds_of(inputs, size)) for size in range(1, largest + 1)}
        first = {size: _seconds(send) for size, send in sends.items()}
        later = {size: [_seconds(send) for _ in range(_LATER)] for size, send in sends.items()}
    return {size: ratio_to_later(first[size], later[size]) for size in sends}


def feeds_of(inputs: Sequence[Mapping[str, Any]], size: int) -> dict[str, AnyArray]:
    """A request of zeros.

    Args:
        inputs: Of the model, as its metadata tells them: `name`, `datatype`, `shape`.
        size: Of the first dimension; every other one that varies is 1.
    """
    return {
        each["name"]: np.zeros([size, *(max(dim, 1) for dim in each["shape"][1:])], DType(each["datatype"]).numpy)
        for each in inputs
    }


def ratio_to_later(first_s: float, later_s: Sequence[float]) -> float:
    """How many times as long the first one took as the median of the later ones."""
    return first_s / statistics.median(later_s)


def _seconds(send: Callable[[], object]) -> float:
    begun = time.perf_counter()
    send()
    return time.perf_counter() - begun
