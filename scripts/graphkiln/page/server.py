"""The server that the page shows, as its views use it: the client, the metrics, the stores."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from graphkiln.page.metrics import parse_metrics, placements, read_metrics, traffic
from graphkiln.page.stores import Stores
from graphkiln_backend.graph.contract import Contract
from graphkiln_backend.graph.errors import ClientError, ModelNotReady
from graphkiln_client import AsyncClient, AsyncModel
from graphkiln_client.metadata import published_contracts
from graphkiln_client.served_version import ServedVersion

_MOST_MODELS = 64
"""Whose metadata is kept; one more is requested anew."""


@dataclass(kw_only=True)
class ShownServer:
    """One running server.

    Attributes:
        connect: Opens a client; with an admin key, or with an empty one for what needs none.
        stores: What the server serves from.
        url: Where people reach the server over HTTP.
        metrics_url: Of its metrics, as this machine reaches them; empty where they are switched off.
    """

    connect: Callable[[str], AsyncClient]
    stores: Stores
    url: str
    metrics_url: str = ""
    _client: AsyncClient | None = None
    _models: OrderedDict[tuple[str, str], AsyncModel] = field(default_factory=OrderedDict)

    @property
    def client(self) -> AsyncClient:
        """A client without an admin key."""
        if self._client is None:
            self._client = self.connect("")
        return self._client

    def model(self, name: str, version: str) -> AsyncModel:
        """A version; what was read of it is kept for as long as it answers."""
        model = self._models.pop((name, version), None) or self.client.model(name, version, images="tensor")
        self._models[name, version] = model
        if len(self._models) > _MOST_MODELS:
            self._models.popitem(last=False)
        return model

    def forget(self, name: str) -> None:
        """Has everything of a model requested anew: it was loaded or unloaded."""
        for key in [key for key in self._models if key[0] == name]:
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
        return traffic(parse_metrics(await self._metrics()))

    async def placements(self) -> Mapping[tuple[str, str], Mapping[str, Any]]:
        """See `metrics.placements`; empty where nobody tells."""
        with suppress(ClientError):
            return placements(parse_metrics(await self._metrics()))
        return {}

    async def close(self) -> None:
        """Closes its connections."""
        if self._client:
            await self._client.close()

    async def _metrics(self) -> str:
        if not self.metrics_url:
            raise ModelNotReady("the server publishes no metrics", hint="start it without --allow-metrics=false")
        return await asyncio.to_thread(read_metrics, self.metrics_url)
