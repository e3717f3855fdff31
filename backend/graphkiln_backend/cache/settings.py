"""Which artifact cache is used: the user's folder, another one, or one that vanishes with the server."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.cache.store import DEFAULT_LIMIT_BYTES, ArtifactCache


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSettings:
    """The artifact cache that is requested.

    Attributes:
        folder: Where it lies; None for one that vanishes.
        limit_bytes: How large it may grow.
    """

    folder: Path | None = None
    limit_bytes: int = DEFAULT_LIMIT_BYTES

    def open(self, vanishing: Path) -> ArtifactCache:
        """Opens it.

        Args:
            vanishing: Where one that vanishes lies; the caller removes it.
        """
        lasting = self.folder is not None
        return ArtifactCache(self.folder or vanishing, limit_bytes=self.limit_bytes, lasting=lasting)


def user_cache_folder(name: str = "graphkiln") -> Path:
    """The user's folder for caches of one purpose; not made here.

    Args:
        name: The folder below the user's cache folder; by default that of the artifact cache.

    Source: XDG Base Directory Specification, `XDG_CACHE_HOME`.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / name
