"""What a text names: a path of this machine, or one in a bucket."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import BinaryIO, cast

from graphkiln_backend.graph.text import redact
from graphkiln_backend.scoring.errors import InputChanged, ScoringError, SourceUnavailable
from graphkiln_backend.scoring.sources.local_storage import LocalStorage
from graphkiln_backend.scoring.sources.opened_file import OpenedFile
from graphkiln_backend.scoring.sources.storage import IMAGE_LIMIT, Storage, StoredFile
from graphkiln_backend.storage.address import RemoteAddress, RemoteStoreError
from graphkiln_backend.storage.objects import ObjectChanged, RemoteObjects

# Files in a bucket of S3 or Google Cloud Storage.


class ObjectStorage:
    """The objects of a service.

    Args:
        address: A bucket of it.

    Raises:
        RepositoryError: Its kind is not known.
    """

    def __init__(self, address: RemoteAddress) -> None:
        self._objects = RemoteObjects(address)

    def walk(self, folder: str) -> Iterator[StoredFile]:
        """The objects below a prefix, as the service lists them."""
        prefix = f"{folder.rstrip('/')}/"
        try:
            for found in self._objects.list(prefix):
                path = found.path.removeprefix(prefix)
                if path and not path.endswith("/") and not any(part.startswith(".") for part in path.split("/")):
                    yield StoredFile(path=path, size=found.size, stamp=found.stamp)
        except RemoteStoreError as error:
            raise _translate(error) from error

    def find(self, path: str) -> StoredFile | None:
        """An object."""
        try:
            found = self._objects.describe(path) if "/" in path else None
        except RemoteStoreError as error:
            raise _translate(error) from error
        return StoredFile(path=path, size=found.size, stamp=found.stamp) if found else None

    def read(self, path: str, stamp: str | None, part: tuple[int, int] | None = None) -> bytes:
        """One request."""
        try:
            return self._objects.read(path, IMAGE_LIMIT, stamp or "", part)
        except FileNotFoundError as error:
            if stamp is None:
                raise FileNotFoundError(f"there is no object {path}") from error
            raise InputChanged(f"{path} is gone since it was planned") from error
        except RemoteStoreError as error:
            if error.passing or isinstance(error, ObjectChanged):
                raise _translate(error) from error
            raise

    def open(self, path: str, stamp: str | None = None) -> BinaryIO:
        """A file that asks for ranges; the service refuses them once the object is replaced."""
        if stamp is not None and (found := self.find(path)) != StoredFile(
            path=path, size=found.size if found else 0, stamp=stamp
        ):
            raise InputChanged(f"{path} has changed since it was planned" if found else f"{path} is gone")
        try:
            opened = self._objects.open(path)
        except FileNotFoundError as error:
            raise ScoringError(f"there is no object {path}") from error
        except RemoteStoreError as error:
            raise _translate(error) from error
        return cast("BinaryIO", OpenedFile(opened, lambda error: _translate(self._objects.translate(error, path))))


def _translate(error: RemoteStoreError) -> ScoringError:
    if isinstance(error, ObjectChanged):
        return InputChanged(error.message)
    kind = SourceUnavailable if error.passing else ScoringError
    return kind(error.message, hint=error.hint)


READABLE = "paths, s3://, gs:// and file:// can"
_OTHER_SCHEME = re.compile(r"(?!s3://|gs://)[a-zA-Z][a-zA-Z0-9+.-]*://")


@dataclass(frozen=True, slots=True)
class Place:
    """A path, and where it lies.

    Attributes:
        storage: Where.
        path: As the storage names it.
        text: As a user names it.
    """

    storage: Storage
    path: str
    text: str

    def below(self, path: str) -> Place:
        """A path below this one."""
        return Place(self.storage, f"{self.path.rstrip('/')}/{path}", f"{self.text.rstrip('/')}/{path}")


def locate(text: str) -> Place:
    """What a text names: a path, `file://` or a bucket's address.

    Raises:
        ScoringError: It is an address of another kind.
        RepositoryError: It is a bucket's address, but incomplete.
    """
    text = text.removeprefix("file://")
    if _OTHER_SCHEME.match(text):
        raise ScoringError(f"'{redact(text)}' cannot be read", hint=READABLE)
    address = RemoteAddress.parse(text)
    if address is None:
        path = os.path.abspath(text)  # noqa: PTH100 - it may hold a pattern
        return Place(LocalStorage(), path, path)
    return Place(_remote(address.scheme, tuple(address.options.items()), _service(address)), address.root, address.text)


def _service(address: RemoteAddress) -> str:
    """The address down to its bucket: what credentials may depend on."""
    bucket, _, rest = address.root.partition("/")
    return address.text.removesuffix(f"/{rest}") if rest else address.text or bucket


@cache
def _remote(scheme: str, options: tuple[tuple[str, str], ...], text: str) -> Storage:
    bucket = text.rpartition("/")[2]
    return ObjectStorage(RemoteAddress(scheme=scheme, root=bucket, options=dict(options), text=text))
