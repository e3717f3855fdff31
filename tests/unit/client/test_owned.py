"""Connections, request ids and regions belong to the process and the event loop that made them."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import forked_client
import numpy as np
import pytest
from echo_servers import echo_servers

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_client import AsyncClient
from graphkiln_client.remote_model import new_request_id
from graphkiln_client.transports.base import PROCESS, Owned

X = np.arange(4, dtype=np.float32)


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    with echo_servers() as urls:
        yield urls


def be_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process look like a forked child of the one before."""
    process = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: process)
    monkeypatch.setattr(PROCESS, "digits", lambda: "c" * 16)


@pytest.mark.parametrize(
    ("protocol", "kind", "unanswered"),
    [
        ("http", "blocking", ()),
        ("http", "async", ()),
        ("grpc", "blocking", ("unknown to Python", "busy")),
        ("grpc", "async", ("idle", "unknown to Python")),
    ],
)
def test_child_never_reads_answers_of_its_parent(
    urls: dict[str, str], protocol: str, kind: str, unanswered: tuple[str, ...]
) -> None:
    """A client over gRPC answers in a child that was forked between calls, and refuses at once in others."""
    command = [sys.executable, forked_client.__file__, urls[protocol], kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    lines = done.stdout.splitlines()
    assert lines.pop() == "afterwards answered answered"
    assert len(lines) >= 2, done.stderr
    for line in lines:
        refused = line.startswith(unanswered) if unanswered else False
        assert line.endswith("InvalidInput answered" if refused else "answered answered"), line


def test_child_draws_other_request_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    before = new_request_id()
    be_child(monkeypatch)
    assert new_request_id()[:16] != before[:16]
    assert new_request_id()[:16] == new_request_id()[:16]


class TestOwned:
    def test_child_neither_uses_nor_closes_those_of_its_parent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def main() -> None:
            owned = Owned(object, close, "m", in_loop=False)
            ours = await owned.open()
            assert owned.get() is ours
            with monkeypatch.context() as patch:
                be_child(patch)
                assert owned.get() is None
                childs = await owned.open()
                assert childs is not ours
                await owned.close()
                assert closed == [childs]
            await owned.close()
            assert closed == [childs, ours]
            with pytest.raises(InvalidInput, match="is closed"):
                await owned.open()

        closed: list[object] = []

        async def close(each: object) -> None:
            closed.append(each)

        asyncio.run(main())


@pytest.mark.parametrize("protocol", ["http", "grpc"])
class TestLoops:
    @pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
    def test_one_loop_after_the_other(self, urls: dict[str, str], protocol: str) -> None:
        client = AsyncClient(urls[protocol])
        for _ in range(3):
            assert (asyncio.run(infer(client)) == X).all()
        asyncio.run(client.close())
        with pytest.raises(InvalidInput, match="is closed"):
            asyncio.run(infer(client))
        gc.collect()  # closes the sockets of the first loops, which warn: the client was not closed there

    def test_loops_of_several_threads(self, urls: dict[str, str], protocol: str) -> None:
        answers: list[Any] = []

        async def use() -> None:
            answers.extend([await infer(client) for _ in range(5)])

        async def main() -> None:
            async with client:
                threads = [threading.Thread(target=asyncio.run, args=(use(),)) for _ in range(2)]
                for thread in threads:
                    thread.start()
                await use()
                for thread in threads:
                    await asyncio.to_thread(thread.join)

        client = AsyncClient(urls[protocol])
        asyncio.run(main())
        assert len(answers) == 15
        assert all((answer == X).all() for answer in answers)

    def test_closed_by_another_loop(self, urls: dict[str, str], protocol: str) -> None:
        async def main() -> None:
            client = AsyncClient(urls[protocol])
            await infer(client)
            await asyncio.to_thread(asyncio.run, client.close())
            await asyncio.sleep(0.1)  # the loop closes its connections itself
            with pytest.raises(InvalidInput, match="is closed"):
                await infer(client)

        asyncio.run(main())


async def infer(client: AsyncClient) -> Any:
    return (await client.model("m").infer({"X": X}, ["Y"]))["Y"]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_child_that_forgets_a_client_leaves_the_connections_of_its_parent(
    urls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing a socket in a child would remove it from the selector, which the parent waits on."""

    async def main() -> None:
        client = AsyncClient(urls["http"])
        await infer(client)
        (session,) = client._connection.transport._sessions._by_owner.values()  # type: ignore[attr-defined]
        ((protocol, _),) = next(iter(session.connector._conns.values()))
        with monkeypatch.context() as patch:
            be_child(patch)
            del client, session
            gc.collect()
            assert not protocol.transport.is_closing()
        protocol.transport.close()

    asyncio.run(main())
