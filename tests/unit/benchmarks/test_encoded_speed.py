"""The rows of encoded images beside FastAPI and the client's decoding, and the check of their answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from encoded_speed import CLIENT, FASTAPI, SERVER, check_same, rows_of
from measurement import Summary


def summary(*rates: float) -> Summary:
    return Summary(per_second=rates[0], p50_ms=2.0, p99_ms=3.0, rates=rates)


def test_ratios_are_to_fastapi_and_to_the_client_round_by_round() -> None:
    measured = {FASTAPI: summary(5, 10), CLIENT: summary(10, 20), SERVER: summary(20, 30)}
    fastapi, client, server = rows_of("fp32, 8 callers", measured)
    assert (fastapi["to FastAPI"], client["to FastAPI"], server["to FastAPI"]) == (1, 2, 3.5)
    assert (client["to client"], server["to client"]) == (1, 1.75)
    assert (server["set-up"], server["images/s"]) == (SERVER, 20)


def test_different_answers_end_the_benchmark() -> None:
    def answer(score: float) -> Any:
        return lambda _: SimpleNamespace(outputs={"scores": (score,)})

    check_same(answer(1), answer(1), [b""])
    with pytest.raises(SystemExit, match=r"decoded by the server: .*2.*; expected .*1"):
        check_same(answer(1), answer(2), [b""])
