"""Choice of the artifact cache: the user's folder, another one, or one that vanishes with the server."""

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
        folder: Its folder; None for one that vanishes.
        limit_bytes: Limit of its size.
    """

    folder: Path | None = None
    limit_bytes: int = DEFAULT_LIMIT_BYTES

    def open(self, vanishing: Path) -> ArtifactCache:
        """Open it for serving: artifacts are built even where the folder fails.

        Args:
            vanishing: Folder of a cache that vanishes; the caller removes it.
        """
        temporary = ArtifactCache(vanishing, limit_bytes=self.limit_bytes, lasting=False)
        if self.folder is None:
            return temporary
        if reason := find_cache_distrust(self.folder):  # changed since the server was started
            _log.warning("served without the artifact cache: %s", reason)
            return temporary
        return ArtifactCache(self.folder, limit_bytes=self.limit_bytes, spare=temporary)

    def open_to_fill(self) -> ArtifactCache:
        """Open it for filling: an artifact that cannot be kept there is an error.

        Raises:
            CacheError: It is not trusted or cannot be used, or there is none.
        """
        if self.folder is None:
            raise CacheError("there is no artifact cache to fill", hint="name its folder: --cache DIR")
        if reason := find_unusable(self.folder):
            raise CacheError(f"the artifact cache cannot be filled: {reason}", hint=_WAY_OUT)
        return ArtifactCache(self.folder, limit_bytes=self.limit_bytes)

    def remove_unfinished(self) -> None:
        """Remove what dead builds left in it, as far as possible."""
        if self.folder:
            ArtifactCache(self.folder).remove_unfinished()

    def checked(self) -> CacheSettings:
        """Return the same where the folder can be used; else log why not, and return a cache that vanishes."""
        reason = find_unusable(self.folder) if self.folder else None
        if reason is None:
            return self
        _log.warning("no artifact cache: %s; models are lowered again at each start (%s)", reason, _WAY_OUT)
        return replace(self, folder=None)


def find_unusable(folder: Path) -> str | None:
    """Find the reason why a folder is of no use as an artifact cache, or None. Make it when it is missing.

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
    """Find the reason why a folder must not be trusted as an artifact cache, or None."""
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
    """Return a folder below the user's cache folder, by default that of the artifact cache; not made here.

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
