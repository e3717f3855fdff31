"""Objects of a bucket for data sets: paged listing, and reads that fail if an object was replaced.

Listings may not fit into memory, and objects may be replaced while they are read. S3 and Google Cloud Storage support
paging and conditional reads; other services do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, cast

from fsspec.asyn import sync

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.files import UnusableFile, format_size
from graphkiln_backend.storage.address import RemoteAddress, RemoteStoreError
from graphkiln_backend.storage.files import causes_of, open_file_system, translate

_PAGE = 1000
_EXPIRED = {"ExpiredToken", "RequestExpired", "InvalidAccessKeyId", "SignatureDoesNotMatch", "TokenRefreshRequired"}
_BLOCK = 4 << 20


class ObjectChanged(RemoteStoreError):
    """An object was replaced since it was listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteObject:
    """A listed object.

    Attributes:
        path: Bucket and key, or the key below the listed prefix.
        size: Size in bytes.
        stamp: ETag on S3, generation on Google Cloud Storage.
    """

    path: str
    size: int
    stamp: str


class RemoteObjects:
    """The objects of a service. Thread-safe; connects when it is used.

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

    def list(self, path: str) -> Iterator[RemoteObject]:
        """Yield the objects with a key prefix in the order of their keys, page by page.

        Args:
            path: Bucket and prefix; ends with a slash for a folder.

        Raises:
            RemoteStoreError: The objects cannot be listed.
        """
        bucket, _, prefix = path.partition("/")
        try:
            for found in self._client.list(bucket, prefix):
                yield replace(found, path=f"{bucket}/{found.path}")
        except Exception as error:
            raise self.translate(error, path) from error

    def describe(self, path: str) -> RemoteObject | None:
        """Look up an object; return None if there is none.

        Raises:
            RemoteStoreError: The service does not answer.
        """
        try:
            return replace(self._client.describe(*_split(path)), path=path)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self.translate(error, path) from error

    def read(self, path: str, limit_bytes: int, stamp: str = "", part: tuple[int, int] | None = None) -> bytes:
        """Read an object.

        Args:
            path: Bucket and key.
            limit_bytes: Maximum size.
            stamp: Expected stamp; empty to accept any.
            part: Offset and size of the part to read; None for all.

        Raises:
            FileNotFoundError: There is no such object.
            ObjectChanged: The object was replaced.
            UnusableFile: The object is larger than the limit.
            RemoteStoreError: The object cannot be read.
        """
        try:
            return self._client.read(*_split(path), limit_bytes, stamp, part)
        except (FileNotFoundError, UnusableFile):
            raise
        except Exception as error:
            raise self.translate(error, path) from error

    def open(self, path: str) -> BinaryIO:
        """Open a seekable file with read-ahead; reads fail if the object is replaced.

        Raises:
            FileNotFoundError: There is no such object.
            RemoteStoreError: The object cannot be opened.
        """
        try:
            opened = self._client.system.open(path, "rb", block_size=_BLOCK, cache_type="readahead")
            return cast("BinaryIO", opened)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise self.translate(error, path) from error

    def translate(self, error: Exception, path: str) -> RemoteStoreError:
        """Translate an error of the service's library, such as one of a file returned by `open`."""
        named = replace(self._address, text=f"{self._address.scheme}://{path}")
        codes = {code for cause in causes_of(error) for code in _codes(cause)}
        if codes & {"PreconditionFailed", "412", "FileExpired", "FileExistsError"}:
            return ObjectChanged(f"{named} has been replaced since it was listed", passing=False)
        translated = translate(error, named)
        translated.passing |= bool(codes & _EXPIRED)
        return translated

    @property
    def _client(self) -> _S3 | _Google:
        if self._opened is None:
            self._opened = _CLIENTS[self._address.scheme](open_file_system(self._address))
        return self._opened


class _S3:
    def __init__(self, system: Any) -> None:
        self.system = system

    def list(self, bucket: str, prefix: str) -> Iterator[RemoteObject]:
        more: dict[str, str] = {}
        while True:
            page = self.system.call_s3("list_objects_v2", Bucket=bucket, Prefix=prefix, MaxKeys=_PAGE, **more)
            for found in page.get("Contents", []):
                yield RemoteObject(path=found["Key"], size=found["Size"], stamp=found["ETag"].strip('"'))
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def describe(self, bucket: str, key: str) -> RemoteObject:
        found = self.system.call_s3("head_object", Bucket=bucket, Key=key)
        return RemoteObject(path=key, size=found["ContentLength"], stamp=found["ETag"].strip('"'))

    def read(self, bucket: str, key: str, limit_bytes: int, stamp: str, part: tuple[int, int] | None) -> bytes:
        options = {"IfMatch": f'"{stamp}"'} if stamp else {}
        if part:
            options["Range"] = _range(part)
        content: bytes = sync(self.system.loop, self._read, bucket, key, limit_bytes, options)
        return content

    async def _read(self, bucket: str, key: str, limit_bytes: int, options: dict[str, str]) -> bytes:
        # s3fs has no conditional read of a whole object; this is its call with a condition.
        response = await self.system._call_s3("get_object", Bucket=bucket, Key=key, **options)  # noqa: SLF001
        async with response["Body"] as body:
            _check_size(response["ContentLength"], limit_bytes)
            content: bytes = await body.read()
            return content


class _Google:
    def __init__(self, system: Any) -> None:
        self.system = system

    def list(self, bucket: str, prefix: str) -> Iterator[RemoteObject]:
        more: dict[str, str] = {}
        while True:
            page = self.system.call("GET", "b/{}/o", bucket, prefix=prefix, maxResults=_PAGE, json_out=True, **more)
            for found in page.get("items", []):
                yield _google_object(found)
            if not page.get("nextPageToken"):
                return
            more = {"pageToken": page["nextPageToken"]}

    def describe(self, bucket: str, key: str) -> RemoteObject:
        return _google_object(self.system.call("GET", "b/{}/o/{}", bucket, key, json_out=True))

    def read(self, bucket: str, key: str, limit_bytes: int, stamp: str, part: tuple[int, int] | None) -> bytes:
        if part is None and not stamp:
            found = self.describe(bucket, key)
            _check_size(found.size, limit_bytes)
            stamp = found.stamp
        options: dict[str, Any] = {"ifGenerationMatch": stamp} if stamp else {}
        if part:
            options["headers"] = {"Range": _range(part)}
        _, content = self.system.call("GET", "b/{}/o/{}", bucket, key, alt="media", **options)
        return bytes(content)


_CLIENTS: dict[str, type[_S3 | _Google]] = {"s3": _S3, "gs": _Google}


def _google_object(found: Any) -> RemoteObject:
    return RemoteObject(path=found["name"], size=int(found["size"]), stamp=str(found["generation"]))


def _range(part: tuple[int, int]) -> str:
    offset, size = part
    return f"bytes={offset}-{offset + size - 1}"


def _check_size(size: int, limit_bytes: int) -> None:
    if size > limit_bytes:
        raise UnusableFile(f"it has {format_size(size)}, which is more than the {format_size(limit_bytes)} of an image")


def _split(path: str) -> tuple[str, str]:
    bucket, _, key = path.partition("/")
    return bucket, key


def _codes(error: BaseException) -> Iterator[str]:
    """Class name and service codes of an error."""
    yield type(error).__name__
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        yield str(response.get("Error", {}).get("Code"))
    yield str(getattr(error, "code", ""))
