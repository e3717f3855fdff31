"""The server that the page shows: its client, its metrics and its model stores."""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from graphkiln.page.metrics import parse_metrics, placements, read_metrics, traffic
from graphkiln_backend.graph.decoding import encode
from graphkiln_backend.graph.errors import ClientError, ModelNotReady
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.graph.text import fault_in_served_name
from graphkiln_backend.repository.version import read_manifest
from graphkiln_backend.repository.version_folders import is_version
from graphkiln_client import AsyncClient, AsyncModel
from graphkiln_client.published import ServedVersion

_SHOWN = ("sha256", "digest", "verification", "weights")
_HIDDEN = {"..", "."}


class Stores:
    """Read the folders that a server serves from."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    def manifest(self, model: str, version: str) -> Manifest | None:
        """The manifest of a version; None where it has none, or is not in these stores.

        Raises:
            ManifestError: It is damaged.
        """
        folder = self._find(model, version)
        return read_manifest(folder) if folder else None

    def proof(self, model: str, version: str) -> dict[str, Any] | None:
        """The proof in a version's manifest, as plain data; None as above.

        Not the recipe nor the command: they name folders of the machine that converted the model.

        Raises:
            ManifestError: The manifest is damaged.
        """
        manifest = self.manifest(model, version)
        if manifest is None:
            return None
        facts: Mapping[str, Any] = encode(manifest)
        provenance = {key: facts["provenance"][key] for key in ("source", "versions", "metrics")}
        return {**{key: facts[key] for key in _SHOWN}, "provenance": provenance, **_conversion(manifest)}

    def golden(self, model: str, version: str) -> GoldenSamples | None:
        """The golden samples of a version; None where it has none.

        Raises:
            ManifestError: They are damaged.
        """
        folder, manifest = self._find(model, version), self.manifest(model, version)
        if folder is None or manifest is None or manifest.golden is None:
            return None
        return GoldenSamples.read(folder / manifest.golden.file)

    def _find(self, model: str, version: str) -> Path | None:
        """The folder of a version, whose name comes from a URL."""
        if fault_in_served_name(model) or model in _HIDDEN or not is_version(version):
            return None
        candidates = (store / model / version for store in self._folders)
        return next((folder for folder in candidates if folder.is_dir()), None)


def _conversion(manifest: Manifest) -> dict[str, Any]:
    made = manifest.conversion
    return {"notes": list(made.notes), "output_errors": dict(made.output_errors)} if made else {}


T = TypeVar("T")
_MOST_MODELS = 64  # whose metadata is kept; one more is requested anew
_KEPT_S = 10.0  # a version may be replaced under its number
_PORT = re.compile(r":\d+$")


@dataclass(kw_only=True)
class ShownServer:
    """One running server.

    Attributes:
        connect: Opens a client with an admin key, which may be empty.
        stores: The model stores that it serves from.
        url: Its public HTTP address.
        everywhere: True if it listens at every address of its machine.
        metrics_url: Its metrics, as this machine reaches them; empty where they are off.
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
        """URL of the server for a browser that reached the page at `host`, with its port or without it."""
        scheme, _, authority = self.url.partition("://")
        return f"{scheme}://{_PORT.sub('', host)}:{authority.rpartition(':')[2]}" if self.everywhere else self.url

    def model(self, name: str, version: str) -> AsyncModel:
        """A version, whose metadata are kept for some seconds."""
        model, until = self._models.pop((name, version), (None, 0.0))
        if model is None or until < self.now():
            model, until = self.client.model(name, version, images="tensor"), self.now() + _KEPT_S
        self._models[name, version] = model, until
        if len(self._models) > _MOST_MODELS:
            self._models.popitem(last=False)
        return model

    def forget(self, name: str, version: str = "") -> None:
        """Request everything of a model, or of one version, again: it was loaded or unloaded."""
        for key in [key for key in self._models if key[0] == name and version in ("", key[1])]:
            del self._models[key]

    async def served(self, name: str, version: str) -> ServedVersion:
        """A version as the server publishes it.

        Raises:
            ClientError: The request failed.
        """
        model = self.model(name, version)
        return ServedVersion.read(name, version, await model.metadata(), await model.config())

    async def traffic(self) -> list[dict[str, Any]]:
        """See `metrics.traffic`.

        Raises:
            ModelNotReady: The server publishes no metrics.
            ConnectionFailed: It does not answer.
        """
        return await self._of_metrics(lambda text: traffic(parse_metrics(text)))

    async def placements(self) -> Mapping[tuple[str, str], Mapping[str, Any]]:
        """See `metrics.placements`; empty where the metrics cannot be read."""
        with suppress(ClientError):
            return await self._of_metrics(lambda text: placements(parse_metrics(text)))
        return {}

    async def precision(self, name: str, version: str) -> str:
        """Precision of a version; empty where the metrics cannot be read."""
        return str((await self.placements()).get((name, version), {}).get("precision", ""))

    async def close(self) -> None:
        """Close its connections."""
        if self._client:
            await self._client.close()

    async def _of_metrics(self, read: Callable[[str], T]) -> T:
        """Read the metrics beside the event loop: a server of 1,000 models has megabytes of them."""
        if not self.metrics_url:
            raise ModelNotReady("the server publishes no metrics", hint="start it without --allow-metrics=false")
        return await asyncio.to_thread(lambda: read(read_metrics(self.metrics_url)))
