"""Which artifact cache is used: the user's folder, another one, or one that vanishes with the server."""

from __future__ import annotations

import logging
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from graphkiln_backend.cache.store import DEFAULT_LIMIT_BYTES, ArtifactCache
from graphkiln_backend.cache.trust import find_distrust, make_private
from graphkiln_backend.graph.errors import CacheError

_log = logging.getLogger("graphkiln.cache")

_PROBE_BYTES = 1 << 16
_WAY_OUT = "choose another folder (--cache DIR), or do without (--cache off); in a pod, see docs/deploying.md"


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
        """Opens it for serving: whatever becomes of the folder, what is needed is built.

        Args:
            vanishing: Where one that vanishes lies; the caller removes it.
        """
        temporary = ArtifactCache(vanishing, limit_bytes=self.limit_bytes, lasting=False)
        if self.folder is None:
            return temporary
        if reason := find_cache_distrust(self.folder):  # changed since the server was started
            _log.warning("served without the artifact cache: %s", reason)
            return temporary
        return ArtifactCache(self.folder, limit_bytes=self.limit_bytes, spare=temporary)

    def open_to_fill(self) -> ArtifactCache:
        """Opens it for filling: what cannot be kept there is an error.

        Raises:
            CacheError: It is not trusted or cannot be used, or there is none.
        """
        if self.folder is None:
            raise CacheError("there is no artifact cache to fill", hint="name its folder: --cache DIR")
        if reason := find_unusable(self.folder):
            raise CacheError(f"the artifact cache cannot be filled: {reason}", hint=_WAY_OUT)
        return ArtifactCache(self.folder, limit_bytes=self.limit_bytes)

    def remove_unfinished(self) -> None:
        """Removes what dead builds left in it, as far as it can be."""
        if self.folder:
            ArtifactCache(self.folder).remove_unfinished()

    def checked(self) -> CacheSettings:
        """The same where its folder can be used; else those of a cache that vanishes, which is said."""
        reason = find_unusable(self.folder) if self.folder else None
        if reason is None:
            return self
        _log.warning("no artifact cache: %s; models are lowered again at each start (%s)", reason, _WAY_OUT)
        return replace(self, folder=None)


def find_unusable(folder: Path) -> str | None:
    """Why a folder is of no use as an artifact cache, or None. Makes it when it is missing.

    A folder that cannot be written is of use where it was filled ahead of time.
    """
    if reason := find_cache_distrust(folder):
        return reason
    try:
        make_private(folder)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_PROBE_BYTES))
    except OSError as error:
        return None if _holds_entries(folder) else f"{folder} cannot be written: {error.strerror or error}"
    return None


def find_cache_distrust(folder: Path) -> str | None:
    """Why a folder must not be trusted as an artifact cache, or None, with the fix."""
    reasons = (find_distrust(folder / name) for name in ("", "entries", "locks", "partial"))
    if reason := next(filter(None, reasons), None):
        return f"{folder} is not trusted, because {reason}: compiled models are code"
    return None


def _holds_entries(folder: Path) -> bool:
    try:
        return any((folder / "entries").iterdir())
    except OSError:
        return False


def user_cache_folder(name: str = "graphkiln") -> Path:
    """The user's folder for caches of one purpose; not made here.

    Args:
        name: The folder below the user's cache folder; by default that of the artifact cache.

    Raises:
        CacheError: The user has no home folder.

    Source: XDG Base Directory Specification, `XDG_CACHE_HOME`, where relative paths are invalid.
    """
    if (configured := Path(os.environ.get("XDG_CACHE_HOME", ""))).is_absolute():
        return configured / name
    try:
        return Path.home() / ".cache" / name
    except RuntimeError as error:
        raise CacheError(
            "this user has no home folder, where the cache would be",
            hint="set HOME or XDG_CACHE_HOME, or name a folder: --cache DIR",
        ) from error
