"""The server that the page shows, as its views use it: the client, the metrics, the stores."""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from graphkiln.page.metrics import parse_metrics, placements, read_metrics, traffic
from graphkiln.page.stores import Stores
from graphkiln_backend.graph.contract import Contract
from graphkiln_backend.graph.errors import ClientError, ModelNotReady
from graphkiln_client import AsyncClient, AsyncModel
from graphkiln_client.metadata import published_contracts
from graphkiln_client.served_version import ServedVersion

T = TypeVar("T")
_MOST_MODELS = 64
"""Whose metadata is kept; one more is requested anew."""
_KEPT_S = 10.0
"""A version may be replaced in its place, by whomever."""
_PORT = re.compile(r":\d+$")


@dataclass(kw_only=True)
class ShownServer:
    """One running server.

    Attributes:
        connect: Opens a client; with an admin key, or with an empty one for what needs none.
        stores: What the server serves from.
        url: Where people reach the server over HTTP.
        everywhere: Whether that is at every address of its machine.
        metrics_url: Of its metrics, as this machine reaches them; empty where they are switched off.
        now: A clock, in seconds.
    """

    connect: Callable[[str], AsyncClient]
    stores: Stores
    url: str
    everywhere: bool = False
    metrics_url: str = ""
    now: Callable[[], float] = time.monotonic
    _client: AsyncClient | None = None
    _models: OrderedDict[tuple[str, str], tuple[AsyncModel, float]] = field(default_factory=OrderedDict)

    @property
    def client(self) -> AsyncClient:
        """A client without an admin key."""
        if self._client is None:
            self._client = self.connect("")
        return self._client

    def url_for(self, host: str) -> str:
        """The server as somebody reaches it who reached the page.

        Args:
            host: What he called the page, with its port or without it: `192.0.2.1:8003`.
        """
        scheme, _, authority = self.url.partition("://")
        return f"{scheme}://{_PORT.sub('', host)}:{authority.rpartition(':')[2]}" if self.everywhere else self.url

    def model(self, name: str, version: str) -> AsyncModel:
        """A version; what was read of it is kept for some seconds."""
        model, until = self._models.pop((name, version), (None, 0.0))
        if model is None or until < self.now():
            model, until = self.client.model(name, version, images="tensor"), self.now() + _KEPT_S
        self._models[name, version] = model, until
        if len(self._models) > _MOST_MODELS:
            self._models.popitem(last=False)
        return model

    def forget(self, name: str, version: str = "") -> None:
        """Has everything of a model, or of one version, requested anew: it was loaded or unloaded."""
        for key in [key for key in self._models if key[0] == name and version in ("", key[1])]:
            del self._models[key]

    async def served(self, name: str, version: str) -> ServedVersion:
        """What the server publishes about a version.

        Raises:
            ClientError: The request failed.
        """
        model = self.model(name, version)
        metadata, config = await model.metadata(), await model.config()
        contracts = published_contracts(name, config)
        contract = contracts.find(version) or Contract() if contracts else None
        return ServedVersion(
            model=name, version=version, is_pinned=True, metadata=metadata, config=config, contract=contract
        )

    async def traffic(self) -> list[dict[str, Any]]:
        """See `metrics.traffic`.

        Raises:
            ModelNotReady: The server publishes no metrics.
            ConnectionFailed: It does not answer.
        """
        return await self._of_metrics(lambda text: traffic(parse_metrics(text)))

    async def placements(self) -> Mapping[tuple[str, str], Mapping[str, Any]]:
        """See `metrics.placements`; empty where nobody tells."""
        with suppress(ClientError):
            return await self._of_metrics(lambda text: placements(parse_metrics(text)))
        return {}

    async def precision(self, name: str, version: str) -> str:
        """What a version computes in; empty where nobody tells."""
        return str((await self.placements()).get((name, version), {}).get("precision", ""))

    async def close(self) -> None:
        """Closes its connections."""
        if self._client:
            await self._client.close()

    async def _of_metrics(self, read: Callable[[str], T]) -> T:
        """What is read of the metrics, beside the event loop: a server of 1,000 models has megabytes of them."""
        if not self.metrics_url:
            raise ModelNotReady("the server publishes no metrics", hint="start it without --allow-metrics=false")
        return await asyncio.to_thread(lambda: read(read_metrics(self.metrics_url)))
