"""Fixtures that run a test with both clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_client import AsyncClient, Client

X = {"X": np.arange(3, dtype=np.float32)}
Infer = Callable[..., dict[str, AnyArray]]


def infer_blocking(url: str, inputs: Mapping[str, AnyArray] = X, **options: Any) -> dict[str, AnyArray]:
    with Client(url, **options) as client:
        return client.model("m").infer(inputs)


def infer_async(url: str, inputs: Mapping[str, AnyArray] = X, **options: Any) -> dict[str, AnyArray]:
    async def infer() -> dict[str, AnyArray]:
        async with AsyncClient(url, **options) as client:
            return await client.model("m").infer(inputs)

    return asyncio.run(infer())


@pytest.fixture(params=[infer_blocking, infer_async], ids=["blocking", "async"])
def infer(request: pytest.FixtureRequest) -> Infer:
    """Run model `m` once with a new client."""
    chosen: Infer = request.param
    return chosen
