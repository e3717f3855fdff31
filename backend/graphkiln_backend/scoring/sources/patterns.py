"""Patterns of paths, as shells write them: `*`, `?`, `[a-z]` within a name, `**` for any folders."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

_MAGIC = re.compile(r"[*?[]")
_ANY_FOLDERS = "**"


def is_pattern(path: str) -> bool:
    """Whether a path holds anything that stands for other text."""
    return _MAGIC.search(path) is not None


def split_pattern(path: str) -> tuple[str, str]:
    """The folder that all matches lie below, and the pattern of what stands below it."""
    parts = path.split("/")
    first = next(index for index, part in enumerate(parts) if is_pattern(part))
    return "/".join(parts[:first]) or "/", "/".join(parts[first:])


class PathPattern:
    """Matches paths below a folder.

    Args:
        pattern: What stands below the folder; a last `**` means everything.
    """

    def __init__(self, pattern: str) -> None:
        parts = pattern.split("/")
        if parts[-1] == _ANY_FOLDERS:
            parts.append("*")
        self._parts = [None if part == _ANY_FOLDERS else re.compile(fnmatch.translate(part)) for part in parts]

    def matches(self, path: str) -> bool:
        """Whether a path is meant."""
        return _match(path.split("/"), self._parts)


def _match(names: Sequence[str], parts: Sequence[re.Pattern[str] | None]) -> bool:
    if not parts or not names:
        return not parts and not names
    first, *rest = parts
    if first is None:
        return any(_match(names[skipped:], rest) for skipped in range(len(names)))
    return first.match(names[0]) is not None and _match(names[1:], rest)
