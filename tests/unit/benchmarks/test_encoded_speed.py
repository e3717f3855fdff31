"""Encoded images beside the client's own decoding and FastAPI: the rows, and what is compared."""

from __future__ import annotations

import numpy as np
import pytest
from encoded_speed import CLIENT, FASTAPI, SERVER, decode_plainly, rows_of
from inputs import synthetic_photograph
from measurement import Summary

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import load_sample


def summary(*rates: float) -> Summary:
    return Summary(per_second=rates[0], p50_ms=2.0, p99_ms=3.0, rates=rates)


def test_ratios_are_those_of_the_rounds() -> None:
    measured = {CLIENT: summary(10, 20), SERVER: summary(20, 30), FASTAPI: summary(5, 10)}
    client, server, fastapi = rows_of("m, 8 callers", measured, {CLIENT: 151.2, SERVER: 20, FASTAPI: 19.96})
    assert (client["ratio"], server["ratio"], fastapi["ratio"]) == (1, 1.75, 0.5)
    assert (client["to FastAPI"], server["to FastAPI"], fastapi["to FastAPI"]) == ("2.0", "3.5", "1.0")
    assert [row["kB an image"] for row in (client, server, fastapi)] == ["151.2", "20", "20.0"]


@pytest.mark.parametrize("size", [(500, 375), (300, 480)])
def test_plain_pillow_gives_the_same_pixels(size: tuple[int, int]) -> None:
    """So both decoders do the same work."""
    spec = Preprocess(resize=232, crop=(224, 224), layout="HWC", dtype=DType.UINT8)
    jpeg = synthetic_photograph(*size)
    np.testing.assert_array_equal(decode_plainly(jpeg), load_sample(jpeg, spec))
