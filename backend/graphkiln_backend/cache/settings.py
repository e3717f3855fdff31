"""Choice of the artifact cache: the user's folder, another one, or a temporary one."""

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
_HINT = "choose another folder (--cache DIR), or use no cache (--cache off); in a pod, see docs/deploying.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSettings:
    """Requested artifact cache.

    Attributes:
        folder: Folder of the cache, or None for a temporary one.
        limit_bytes: Limit of its size.
    """

    folder: Path | None = None
    limit_bytes: int = DEFAULT_LIMIT_BYTES

    def open(self, vanishing: Path) -> ArtifactCache:
        """Open the cache for serving; artifacts are built in a temporary cache if the folder fails.

        Args:
            vanishing: Folder of the temporary cache, removed by the caller.
        """
        temporary = ArtifactCache(vanishing, limit_bytes=self.limit_bytes, lasting=False)
        if self.folder is None:
            return temporary
        if reason := find_cache_distrust(self.folder):  # changed since the server was started
            _log.warning("served without the artifact cache: %s", reason)
            return temporary
        return ArtifactCache(self.folder, limit_bytes=self.limit_bytes, spare=temporary)

    def open_to_fill(self) -> ArtifactCache:
        """Open the cache for filling; an artifact that cannot be written is an error.

        Raises:
            CacheError: The folder is not trusted, cannot be used, or is not set.
        """
        if self.folder is None:
            raise CacheError("there is no artifact cache to fill", hint="name its folder: --cache DIR")
        if reason := find_unusable(self.folder):
            raise CacheError(f"the artifact cache cannot be filled: {reason}", hint=_HINT)
        return ArtifactCache(self.folder, limit_bytes=self.limit_bytes)

    def remove_unfinished(self) -> None:
        """Remove the remains of dead builds, as far as possible."""
        if self.folder:
            ArtifactCache(self.folder).remove_unfinished()

    def checked(self) -> CacheSettings:
        """Return these settings if the folder can be used; otherwise log the reason and use a temporary cache."""
        reason = find_unusable(self.folder) if self.folder else None
        if reason is None:
            return self
        _log.warning("no artifact cache: %s; models are lowered again at each start (%s)", reason, _HINT)
        return replace(self, folder=None)


def find_unusable(folder: Path) -> str | None:
    """Return the reason why a folder cannot be used as an artifact cache, or None. Create it if it is missing.

    A read-only folder can be used if it has entries.
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
    """Return the reason why a folder must not be trusted as an artifact cache, or None."""
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
    """Return a folder in the user's cache folder, by default that of the artifact cache.

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
            "this user has no home folder for the cache",
            hint="set HOME or XDG_CACHE_HOME, or name a folder: --cache DIR",
        ) from error
