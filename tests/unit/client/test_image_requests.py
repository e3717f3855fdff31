"""Requests that are made of images: grouped by shape, asked again where another version answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fake_transport import FakeTransport

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ClientError, InvalidInput, ModelNotReady, ServerError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import Prepared
from graphkiln_client.connection import Connection
from graphkiln_client.image_requests import ImageRequests, batch_of
from graphkiln_client.inference import Inference
from graphkiln_client.metadata import ModelInfo
from graphkiln_client.runner import run
from graphkiln_client.served_version import ServedVersion, StaleVersion

RAW = Preprocess(dtype=DType.UINT8, layout="HWC")


@pytest.fixture
def transport() -> FakeTransport:
    return FakeTransport({"model_metadata": {"inputs": [], "outputs": []}, "model_config": {}})


@pytest.fixture
def requests(transport: FakeTransport) -> ImageRequests:
    connection = Connection(transport, 5.0, 0)
    info = ModelInfo(connection, "m", "")
    return ImageRequests(connection, info, Inference(connection, info, None), preprocess=RAW, fetch_urls=False)


def image(height: int, width: int) -> Any:
    return np.zeros((height, width, 3), np.uint8)


def test_images_of_one_shape_are_asked_about_together(requests: ImageRequests) -> None:
    asked = []

    async def ask(sources: Sequence[str], prepared: Sequence[Prepared]) -> list[tuple[int, int]]:
        asked.append(len(sources))
        return [(each.height, each.width) for each in prepared]

    async def answer() -> list[Any]:
        served = await requests.served_version()
        return await requests.answer([image(2, 3), image(4, 4), b"?", image(2, 3)], served, ask)

    first, second, damaged, last = run(answer())
    assert (first, second, last) == ((2, 3), (4, 4), (2, 3))
    assert isinstance(damaged, InvalidInput)
    assert asked == [2, 1]


def test_an_error_of_a_request_is_that_of_its_images(requests: ImageRequests) -> None:
    async def ask(sources: Sequence[str], prepared: Sequence[Prepared]) -> list[int]:
        if prepared[0].height == 4:
            raise ServerError("no")
        return [0 for _ in sources]

    async def answer() -> list[int | ClientError]:
        return await requests.answer([image(2, 3), image(4, 4)], await requests.served_version(), ask)

    good, bad = run(answer())
    assert good == 0
    assert isinstance(bad, ServerError)


def test_another_version_is_asked_again(requests: ImageRequests, transport: FakeTransport) -> None:
    seen: list[ServedVersion] = []

    async def ask(served: ServedVersion) -> str:
        seen.append(served)
        if len(seen) < 3:
            raise StaleVersion("2")
        return served.version

    assert run(requests.follow(ask)) == "2"
    assert len(transport.sent("model_metadata")) == 3


def test_versions_that_take_turns(requests: ImageRequests) -> None:
    async def ask(served: ServedVersion) -> str:
        raise StaleVersion(served.version + "1")

    with pytest.raises(ModelNotReady, match="another version each time"):
        run(requests.follow(ask))


def test_a_single_sample_is_not_copied() -> None:
    sample = image(2, 3)
    assert np.shares_memory(batch_of([sample]), sample)
    assert batch_of([sample, sample]).shape == (2, 2, 3, 3)
