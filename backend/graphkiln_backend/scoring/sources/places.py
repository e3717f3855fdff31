"""Files by address: paths of a local or shared file system, objects of buckets, and patterns."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from graphkiln_backend.graph.text import redact
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.sources.objects import ObjectStorage
from graphkiln_backend.scoring.sources.storage import LocalStorage, Storage
from graphkiln_backend.storage.address import RemoteAddress

READABLE = "supported are paths, s3://, gs:// and file://"
_OTHER_SCHEME = re.compile(r"(?!s3://|gs://)[a-zA-Z][a-zA-Z0-9+.-]*://")
_WILDCARD = re.compile(r"[*?[]")
_ANY_FOLDERS = "**"


@dataclass(frozen=True, slots=True)
class Place:
    """A path and its storage.

    Attributes:
        path: Path in the storage.
        text: The user's notation.
    """

    storage: Storage
    path: str
    text: str

    def below(self, path: str) -> Place:
        """Append to the path."""
        return Place(self.storage, f"{self.path.rstrip('/')}/{path}", f"{self.text.rstrip('/')}/{path}")

    @property
    def folder(self) -> Place:
        """Folder of a file."""
        return Place(self.storage, self.path.rpartition("/")[0], self.text.rpartition("/")[0])


def locate(text: str) -> Place:
    """Locate a path, `file://` or a bucket's address.

    Raises:
        ScoringError: The address is of an unsupported kind.
        RepositoryError: The address of a bucket is incomplete.
    """
    text = text.removeprefix("file://")
    if _OTHER_SCHEME.match(text):
        raise ScoringError(f"'{redact(text)}' cannot be read", hint=READABLE)
    address = RemoteAddress.parse(text)
    if address is None:
        path = os.path.abspath(text)  # noqa: PTH100 - may contain wildcards
        return Place(LocalStorage(), path, path)
    # Up to the bucket, which credentials may depend on.
    bucket, _, rest = address.root.partition("/")
    service = address.text.removesuffix(f"/{rest}") if rest else address.text or bucket
    return Place(_bucket(address.scheme, tuple(address.options.items()), service), address.root, address.text)


@cache
def _bucket(scheme: str, options: tuple[tuple[str, str], ...], text: str) -> Storage:
    root = text.rpartition("/")[2]
    return ObjectStorage(RemoteAddress(scheme=scheme, root=root, options=dict(options), text=text))


def load_image(folder: Place, text: str) -> bytes:
    """Read an image by its path relative to a folder, or by its address.

    Raises:
        SourceUnavailable: A temporary I/O or network error.
        GraphkilnError: A permanent error.
        OSError: A permanent error.
    """
    place = locate(text) if text.startswith("/") or "://" in text else folder.below(text)
    return place.storage.read(place.path, None)


def is_pattern(path: str) -> bool:
    """True if a path has wildcards: `*`, `?`, `[a-z]` within a name, `**` for any folders."""
    return _WILDCARD.search(path) is not None


def split_pattern(path: str) -> tuple[str, str]:
    """Split a pattern into its fixed folder and the rest."""
    parts = path.split("/")
    first = next(index for index, part in enumerate(parts) if is_pattern(part))
    return "/".join(parts[:first]) or "/", "/".join(parts[first:])


class PathPattern:
    """A pattern for paths below a folder; a trailing `**` matches everything."""

    def __init__(self, pattern: str) -> None:
        parts = pattern.split("/")
        if parts[-1] == _ANY_FOLDERS:
            parts.append("*")
        self._parts = [None if part == _ANY_FOLDERS else re.compile(fnmatch.translate(part)) for part in parts]

    def matches(self, path: str) -> bool:
        """Return True if a path matches."""
        return _match(path.split("/"), self._parts)


def _match(names: Sequence[str], parts: Sequence[re.Pattern[str] | None]) -> bool:
    if not parts or not names:
        return not parts and not names
    first, *rest = parts
    if first is None:
        return any(_match(names[skipped:], rest) for skipped in range(len(names)))
    return first.match(names[0]) is not None and _match(names[1:], rest)
