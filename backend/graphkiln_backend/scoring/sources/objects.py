"""Objects of S3, a compatible service or Google Cloud Storage: paged listing, reads that fail for a replaced object.

Listings may not fit into memory, and objects may be replaced while they are read. S3 and Google Cloud Storage support
paging and conditional reads; other services do not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, BinaryIO, cast

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.files import UnusableFile
from graphkiln_backend.scoring.errors import InputChanged, ScoringError, SourceUnavailable
from graphkiln_backend.scoring.sources.storage import OpenedFile, StoredFile, check_size
from graphkiln_backend.storage.address import RemoteAddress
from graphkiln_backend.storage.files import causes_of, open_file_system, translate

_PAGE = 1000
_REPLACED = {"PreconditionFailed", "412", "FileExpired", "FileExistsError"}
_EXPIRED = {"ExpiredToken", "RequestExpired", "InvalidAccessKeyId", "SignatureDoesNotMatch", "TokenRefreshRequired"}
_BLOCK = 4 << 20


class ObjectStorage:
    """The objects of a service by bucket and key. Thread-safe; connects when it is used.

    Args:
        address: An address of the service, whose credentials are used for all objects.

    Raises:
        RepositoryError: The service has no paged listing.
    """

    def __init__(self, address: RemoteAddress) -> None:
        if address.scheme not in _CLIENTS:
            raise RepositoryError(
                f"{address}: data sets of the kind {address.scheme}:// cannot be read", hint="copy it to s3:// or gs://"
            )
        self._address = address
        self._opened: _S3 | _Google | None = None

    def walk(self, folder: str) -> Iterator[StoredFile]:
        """Yield the objects below a prefix in the order of their keys, page by page."""
        bucket, _, prefix = f"{folder.rstrip('/')}/".partition("/")
        try:
            for found in self._client.list(bucket, prefix):
                path = found.path.removeprefix(prefix)
                if path and not path.endswith("/") and not any(part.startswith(".") for part in path.split("/")):
                    yield replace(found, path=path)
        except Exception as error:
            raise self._explain(error, folder) from error

    def find(self, path: str) -> StoredFile | None:
        """Look up an object."""
        if "/" not in path:
            return None
        try:
            return replace(self._client.describe(*_split(path)), path=path)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._explain(error, path) from error

    def read(self, path: str, stamp: str | None, part: tuple[int, int] | None = None) -> bytes:
        """Read an object with one request."""
        try:
            return self._client.read(*_split(path), stamp or "", part)
        except FileNotFoundError as error:
            if stamp is None:
                raise FileNotFoundError(f"no such object: {path}") from error
            raise InputChanged(f"{path} was deleted since it was planned") from error
        except UnusableFile:
            raise
        except Exception as error:
            raise self._explain(error, path) from error

    def open(self, path: str, stamp: str | None = None) -> BinaryIO:
        """Open a file with read-ahead that requests ranges, which fail once the object is replaced."""
        if stamp is not None and ((found := self.find(path)) is None or found.stamp != stamp):
            raise InputChanged(f"{path} has changed since it was planned" if found else f"{path} was deleted")
        try:
            opened = self._client.system.open(path, "rb", block_size=_BLOCK, cache_type="readahead")
        except FileNotFoundError as error:
            raise ScoringError(f"no such object: {path}") from error
        except Exception as error:
            raise self._explain(error, path) from error
        return cast("BinaryIO", OpenedFile(opened, lambda error: self._explain(error, path)))

    @property
    def _client(self) -> _S3 | _Google:
        if self._opened is None:
            self._opened = _CLIENTS[self._address.scheme](open_file_system(self._address))
        return self._opened

    def _explain(self, error: Exception, path: str) -> ScoringError:
        """Translate an error of the library."""
        if isinstance(error, ScoringError):
            return error
        named = replace(self._address, text=f"{self._address.scheme}://{path}")
        codes = {code for cause in causes_of(error) for code in error_codes(cause)}
        if codes & _REPLACED:
            return InputChanged(f"{named} has been replaced since it was listed")
        meaning = translate(error, named)
        kind = SourceUnavailable if meaning.passing or codes & _EXPIRED else ScoringError
        return kind(meaning.message, hint=meaning.hint)


class _S3:
    def __init__(self, system: Any) -> None:
        self.system = system

    def list(self, bucket: str, prefix: str) -> Iterator[StoredFile]:
        more: dict[str, str] = {}
        while True:
            page = self.system.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, MaxKeys=_PAGE, **more)
            for found in page.get("Contents", []):
                yield StoredFile(path=found["Key"], size=found["Size"], stamp=found["ETag"].strip('"'))
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def describe(self, bucket: str, key: str) -> StoredFile:
        found = self.system.call_s3("head_object", Bucket=bucket, Key=key)
        return StoredFile(path=key, size=found["ContentLength"], stamp=found["ETag"].strip('"'))

    def read(self, bucket: str, key: str, stamp: str, part: tuple[int, int] | None) -> bytes:
        options = {"IfMatch": f'"{stamp}"'} if stamp else {}
        if part:
            options["Range"] = _range(part)
        reading = asyncio.run_coroutine_threadsafe(self._read(bucket, key, options), self.system.loop)
        return reading.result()

    async def _read(self, bucket: str, key: str, options: dict[str, str]) -> bytes:
        # s3fs, whose event loop runs in a thread, has no conditional read of a whole object.
        response = await self.system._call_s3("get_object", Bucket=bucket, Key=key, **options)  # noqa: SLF001
        async with response["Body"] as body:
            check_size(response["ContentLength"])
            content: bytes = await body.read()
            return content


class _Google:
    def __init__(self, system: Any) -> None:
        self.system = system

    def list(self, bucket: str, prefix: str) -> Iterator[StoredFile]:
        more: dict[str, str] = {}
        while True:
            page = self.system.call("GET", "b/{}/o", bucket, prefix=prefix, maxResults=_PAGE, json_out=True, **more)
            yield from map(_google_object, page.get("items", []))
            if not page.get("nextPageToken"):
                return
            more = {"pageToken": page["nextPageToken"]}

    def describe(self, bucket: str, key: str) -> StoredFile:
        return _google_object(self.system.call("GET", "b/{}/o/{}", bucket, key, json_out=True))

    def read(self, bucket: str, key: str, stamp: str, part: tuple[int, int] | None) -> bytes:
        if part is None and not stamp:
            found = self.describe(bucket, key)
            check_size(found.size)
            stamp = found.stamp
        options: dict[str, Any] = {"ifGenerationMatch": stamp} if stamp else {}
        if part:
            options["headers"] = {"Range": _range(part)}
        _, content = self.system.call("GET", "b/{}/o/{}", bucket, key, alt="media", **options)
        return bytes(content)


_CLIENTS: dict[str, type[_S3 | _Google]] = {"s3": _S3, "gs": _Google}


def _google_object(found: Any) -> StoredFile:
    return StoredFile(path=found["name"], size=int(found["size"]), stamp=str(found["generation"]))


def _range(part: tuple[int, int]) -> str:
    offset, size = part
    return f"bytes={offset}-{offset + size - 1}"


def _split(path: str) -> tuple[str, str]:
    bucket, _, key = path.partition("/")
    return bucket, key


def error_codes(error: BaseException) -> Iterator[str]:
    """Class name and service codes of an error."""
    yield type(error).__name__
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        yield str(response.get("Error", {}).get("Code"))
    yield str(getattr(error, "code", ""))
