"""Traffic of all kinds at once, every answer compared with its reference."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

import numpy as np

from graphkiln_client import AsyncClient
from soaking.classifying import Classifying
from soaking.ledger import DEADLINE_S, Ledger, Ticket, WrongAnswer
from soaking.models import MODELS, Arrays, SoakModel, difference
from soaking.senders import (
    Answer,
    BareHttp,
    OurClient,
    OurSharedMemory,
    Sender,
    TritonGrpc,
    TritonHttp,
    close_quietly,
    protocol,
)
from soaking.service import Service

_PAUSE_S = 0.08
"""Mean pause of a sender between two requests: load enough to hit every fault, on two cores."""
_REFUSED_PAUSE_S = 0.4
"""After a refusal: nobody who hammers a server that is away helps it back."""
_TASKS = 3
_LARGE_SHARE = 0.05
_JOIN_S = 60.0


class Versions:
    """Which versions may answer. Thread-safe: sets are replaced, not changed."""

    def __init__(self) -> None:
        self._live = {model.name: frozenset(model.versions) for model in MODELS}
        self._ever = dict(self._live)

    def add(self, model: str, version: int) -> None:
        """From now on a version may answer."""
        self._ever[model] |= {version}

    def announce(self, model: str, version: int) -> None:
        """A version is live: it is asked for by its number, too."""
        self._live[model] |= {version}

    def withdraw(self, model: str, version: int) -> None:
        """A version is no longer asked for by its number."""
        self._live[model] -= {version}

    def to_ask(self, model: str, chance: random.Random) -> str:
        """A version for a request; most name none."""
        return str(chance.choice(sorted(self._live[model]))) if chance.random() < 0.4 else ""

    def check(self, model: SoakModel, version: str, feeds: Arrays, answer: Answer) -> None:
        """Compares an answer with the reference of the version that gave it.

        Raises:
            WrongAnswer: It is not what any version that may answer computes.
        """
        outputs, told = answer
        if version and told is not None and told != int(version):
            raise WrongAnswer(f"{model.name} version {told} answered in place of {version}")
        exact = version or told
        candidates = [int(exact)] if exact else sorted(self._ever[model.name])
        if told is not None and told not in self._ever[model.name]:
            raise WrongAnswer(f"{model.name} version {told} answered: it should not be live")
        differences = [difference(model.reference(candidate, feeds), outputs) for candidate in candidates]
        if all(differences):
            raise WrongAnswer(f"{model.name} version {exact or 'any'}: {differences[0]}")


class Traffic:
    """Senders, each in a thread, until it is stopped.

    Args:
        service: What they ask.
        ledger: Where they note what became of each request.
        seed: Of all random choices.
        senders: How many of them; None for all.
    """

    def __init__(self, service: Service, ledger: Ledger, seed: int, *, senders: int | None = None) -> None:
        self.versions = Versions()
        self._service = service
        self._ledger = ledger
        self._seed = seed
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=job, daemon=True) for job in self._jobs()[:senders]]

    def _jobs(self) -> list[Callable[[], None]]:
        reach, key = self._service.reach, self._service.admin_key
        make: list[Callable[[], Sender]] = [
            partial(OurClient, reach.http_url, reach, retries=0),
            partial(OurClient, reach.grpc_url, reach, retries=0),
            partial(OurClient, reach.http_url, reach, retries=4),
            partial(OurClient, reach.grpc_url, reach, retries=4),
            partial(OurSharedMemory, reach.http_url, reach, key),
            partial(OurSharedMemory, reach.grpc_url, reach, key),
            partial(TritonGrpc, reach),
            partial(TritonHttp, reach),
            partial(BareHttp, reach, binary=False),
            partial(BareHttp, reach, binary=True),
        ]
        jobs: list[Callable[[], None]] = [partial(self._send, each, n) for n, each in enumerate(make)]
        urls = (reach.http_url, reach.grpc_url)
        jobs += [partial(self._classify, url, 100 + n) for n, url in enumerate(urls)]
        return jobs + [partial(self._send_async, url, 200 + n) for n, url in enumerate(urls)]

    def start(self) -> None:
        """Starts all senders."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> int:
        """Waits until each sender has ended its last request; returns how many have not."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(_JOIN_S)
        self._ledger.give_up_on_overdue()
        return sum(thread.is_alive() for thread in self._threads)

    def _pause(self, chance: random.Random, last: Ticket) -> bool:
        """Waits between two requests; whether there is to be another."""
        return not self._stopping.wait(_pause_s(chance, last))

    def _request(self, chance: random.Random) -> tuple[SoakModel, str, Arrays]:
        model = chance.choice(MODELS)
        large = chance.random() < _LARGE_SHARE
        rows = model.largest_batch if large else chance.randint(1, min(6, model.largest_batch))
        feeds = model.feeds(np.random.default_rng(chance.getrandbits(32)), rows)
        return model, self.versions.to_ask(model.name, chance), feeds

    def _send(self, make: Callable[[], Sender], number: int) -> None:
        chance = random.Random(self._seed * 1000 + number)
        sender, last = make(), Ticket()
        while self._pause(chance, last):
            model, version, feeds = self._request(chance)
            with self._ledger.request(sender.name) as last:
                self.versions.check(model, version, feeds, sender.ask(model, version, feeds))
        close_quietly(sender)

    def _classify(self, url: str, number: int) -> None:
        chance = random.Random(self._seed * 1000 + number)
        last = Ticket()
        with Classifying(url, self._service.reach) as classifying:
            while self._pause(chance, last):
                with self._ledger.request(classifying.name) as last:
                    classifying.ask(chance)

    def _send_async(self, url: str, number: int) -> None:
        asyncio.run(self._send_in_loop(url, number))

    async def _send_in_loop(self, url: str, number: int) -> None:
        """Some tasks that share a client."""
        async with AsyncExitStack() as stack:
            security = self._service.reach.security
            client = await stack.enter_async_context(AsyncClient(url, timeout_s=DEADLINE_S, max_retries=0, **security))
            name = f"async client {protocol(url)}"
            await asyncio.gather(*(self._task(client, name, number * 10 + task) for task in range(_TASKS)))

    async def _task(self, client: AsyncClient, name: str, number: int) -> None:
        chance = random.Random(self._seed * 1000 + number)
        last = Ticket()
        while not self._stopping.is_set():
            await asyncio.sleep(_TASKS * _pause_s(chance, last))
            model, version, feeds = self._request(chance)
            with self._ledger.request(name) as last:
                answer = await client.model(model.name, version).infer(feeds)
                self.versions.check(model, version, feeds, (answer, None))


def _pause_s(chance: random.Random, last: Ticket) -> float:
    """Random seconds between two requests."""
    return chance.expovariate(1 / (_REFUSED_PAUSE_S if last.verdict == "refused" else _PAUSE_S))
