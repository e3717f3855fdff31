"""One process of the load generator, without a process: a server that is not there, and requests in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from graphkiln.bench import processes as load_worker
from graphkiln.bench.processes import Feeds, Target

SAMPLES: list[Feeds] = [{"X": np.full((1,), number)} for number in range(3)]


def test_requests_take_turns_in_all_threads() -> None:
    sent: list[int] = []
    requests: list[Callable[[], object]] = [lambda number=number: sent.append(number) for number in range(3)]
    send = load_worker.in_turn(requests)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: send(), range(300)))
    assert Counter(sent) == {0: 100, 1: 100, 2: 100}


def test_shared_memory_is_opened_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    class FakeClient:
        def __init__(self, **given: object) -> None:
            opened.append(given)

        def __enter__(self) -> FakeClient:
            return self

        def __exit__(self, *_: object) -> None:
            opened.append("closed")

        def shared_memory(self) -> nullcontext[FakeClient]:
            opened.append("shared")
            return nullcontext(self)

        def model(self, name: str, version: str) -> tuple[str, str]:
            return name, version

    monkeypatch.setattr("graphkiln_client.Client", FakeClient)
    with load_worker.ExitStack() as stack:
        for shared in (False, True):
            target = Target(client={"url": "u"}, model="m", version="3", shared_memory=shared)
            assert load_worker._open(stack, target) == ("m", "3")
    assert opened == [{"url": "u"}, {"url": "u"}, "shared", "closed", "closed"]
