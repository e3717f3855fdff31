"""What a server knows about one model: requested once, and kept until it is known to have changed."""

from __future__ import annotations

from typing import Any

from graphkiln_backend.graph.errors import ProtocolError
from graphkiln_client.connection import Connection
from graphkiln_client.metadata import check_config, check_metadata


class ModelInfo:
    """A model's metadata, configuration and statistics. Task-safe.

    Args:
        connection: To the server.
        name: Model name.
        version: Version, or empty for the one that the server's version policy prefers.
    """

    def __init__(self, connection: Connection, name: str, version: str) -> None:
        self.name = name
        self.version = version
        self._connection = connection
        self._metadata: dict[str, Any] | None = None
        self._config: dict[str, Any] | None = None

    def forget(self) -> None:
        """Has metadata and configuration requested again: another version answers."""
        self._metadata = self._config = None

    async def metadata(self) -> dict[str, Any]:
        """The KServe v2 metadata.

        Raises:
            ClientError: The request failed.
        """
        metadata = self._metadata
        if metadata is None:
            call = self._connection.wire.model_metadata(self.name, self.version)
            self._metadata = metadata = check_metadata(await self._connection.call(call))
        return metadata

    async def config(self) -> dict[str, Any]:
        """The Triton configuration; empty where the server has no such extension.

        Raises:
            ClientError: The request failed.
        """
        config = self._config
        if config is None:
            supported = "model_configuration" in await self._connection.extensions()
            call = self._connection.wire.model_config(self.name, self.version)
            self._config = config = check_config(await self._connection.call(call)) if supported else {}
        return config

    async def statistics(self) -> dict[str, Any]:
        """The statistics of this version, or of the preferred one; requested each time.

        Raises:
            ClientError: The request failed.
        """
        call = self._connection.wire.model_statistics(self.name, self.version)
        versions = versions_in(await self._connection.call(call))
        if not versions:
            raise ProtocolError(f"the server's statistics of '{self.name}' are empty")
        return versions[-1]


def versions_in(statistics: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a response of the statistics extension, one for each version.

    Raises:
        ProtocolError: The response holds something else.
    """
    rows = statistics.get("model_stats", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ProtocolError("the server's statistics are not a list of versions", body=str(statistics)[:500])
    return rows
