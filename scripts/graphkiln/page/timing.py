"""Where the time of a request went inside the server, by its statistics: what was added while it was answered.

Triton counts a request after it has answered it, and counts all requests together. So the statistics are read until
they moved, and where other requests came in between, what is told is the mean, and of how many.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from graphkiln_client import AsyncModel

T = TypeVar("T")
_READINGS = 40
_PAUSE_S = 0.025
_PHASES = ("queue", "compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True, slots=True)
class Spent:
    """What a version's requests have taken so far.

    Attributes:
        counts: How many requests succeeded.
        phases_ns: Nanoseconds by phase, of all of them together.
    """

    counts: int
    phases_ns: Mapping[str, int]

    @classmethod
    def parse(cls, statistics: Mapping[str, Any]) -> Spent:
        """Reads a version's statistics; what is missing there is 0. Source: Triton's statistics extension."""
        phases = statistics.get("inference_stats", {})
        return cls(
            int(phases.get("success", {}).get("count", 0)),
            {name: int(phases.get(name, {}).get("ns", 0)) for name in _PHASES},
        )

    async def until_now(self, model: AsyncModel) -> dict[str, Any]:
        """What was added since, for each request.

        Returns:
            `queue_ms`, `compute_ms` and `requests`, the number that these are the mean of; empty where the server has
            not counted the request within a second.

        Raises:
            ClientError: The statistics cannot be read.
        """
        for _ in range(_READINGS):
            now = await read_spent(model)
            if now.counts > self.counts:
                return self._share(now)
            await asyncio.sleep(_PAUSE_S)
        return {}

    def _share(self, now: Spent) -> dict[str, Any]:
        requests = now.counts - self.counts
        each_ms = {name: (now.phases_ns[name] - self.phases_ns[name]) / requests / 1e6 for name in _PHASES}
        compute_ms = sum(each_ms.values()) - each_ms["queue"]
        return {"queue_ms": each_ms["queue"], "compute_ms": compute_ms, "requests": requests}


async def read_spent(model: AsyncModel) -> Spent:
    """What a version's requests have taken so far.

    Raises:
        ClientError: The statistics cannot be read.
    """
    return Spent.parse(await model.statistics())


async def timed(model: AsyncModel, ask: Callable[[], Awaitable[T]]) -> tuple[T, dict[str, Any]]:
    """Asks a model, and tells where the time went.

    Args:
        model: The model.
        ask: Sends one request to it.

    Returns:
        What it answered; `total_ms`, and what `Spent.until_now` tells.

    Raises:
        ClientError: The request failed.
    """
    spent = await read_spent(model)
    begun = time.perf_counter()
    answer = await ask()
    total_ms = (time.perf_counter() - begun) * 1e3
    return answer, {"total_ms": total_ms, **await spent.until_now(model)}
