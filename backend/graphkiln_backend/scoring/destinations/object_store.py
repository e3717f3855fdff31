"""A folder of an object store, `s3://` or `gs://`.

Objects appear atomically, and a conditional put (S3: If-None-Match, Google: ifGenerationMatch=0) is exclusive. Some
servers ignore the condition, so it is tested before the run. If the response to a put is lost, the object is read:
contents are unique.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from graphkiln_backend.scoring.errors import ScoringError, SourceUnavailable, StoreError
from graphkiln_backend.scoring.sources.objects import ObjectStorage, error_codes
from graphkiln_backend.scoring.sources.storage import OpenedFile
from graphkiln_backend.storage.address import RemoteAddress, RemoteStoreError
from graphkiln_backend.storage.files import causes_of, open_file_system, translate

# Some servers return the checksum of the whole object for a range. Pages of Parquet have checksums anyway.
_CHECKSUMS = {"response_checksum_validation": "when_required"}
_DAMAGED = {"ChecksumError", "IncompleteReadError"}
_REFUSED = {"PreconditionFailed", "412"}  # by a condition of a put
_BLOCK = 1 << 20  # read ahead
_LEDGER = "let a database decide which attempt of a unit counts: --ledger postgresql://USER@HOST/DATABASE"


class ObjectStore:
    """Objects below an address. Connects when it is used.

    Args:
        address: The folder.
        exclusive: Whether `create` must be exclusive; not needed with a ledger.
    """

    def __init__(self, address: RemoteAddress, *, exclusive: bool = True) -> None:
        self._address, self._exclusive = address, exclusive
        self._objects = ObjectStorage(address)
        self._system: Any = None

    def prepare(self) -> None:
        """Write and read a probe, and check that a second conditional put fails."""
        name = f".probe-{secrets.token_hex(8)}"
        first, second = (secrets.token_bytes(32) for _ in range(2))
        try:
            write = self.create if self._exclusive else self.replace
            write(name, memoryview(first))
            if self.read(name) != first:
                raise ScoringError(f"{self._address} does not return what was written to it")
            if self._exclusive and (self.create(name, memoryview(second)) or self.read(name) != first):
                raise ScoringError(
                    f"{self._address} ignores the condition that there be no object yet: two attempts of a unit would "
                    "overwrite each other",
                    hint=_LEDGER,
                )
        finally:
            self.delete(name)

    def place(self, name: str) -> str:
        """Address of a name."""
        return f"{self._address}/{name}"

    def names(self) -> Iterator[str]:
        """Yield the names page by page."""
        try:
            yield from (file.path for file in self._objects.walk(self._address.root) if "/" not in file.path)
        except ScoringError as error:
            passing = isinstance(error, SourceUnavailable)
            raise StoreError(error.message, hint=error.hint, passing=passing) from error

    def create(self, name: str, content: memoryview) -> bool:
        """Write with a conditional put. If an object exists, a lost response may have been its own: compare it."""
        try:
            self._write("pipe_file", self._path(name), bytes(content), mode="create")
        except FileExistsError:
            return self._size(name) == len(content) and self.read(name) == bytes(content)
        self._check_kept(name, len(content))
        return True

    def replace(self, name: str, content: memoryview | Path) -> None:
        """Write with a put, which may be repeated."""
        if isinstance(content, Path):
            size = content.stat().st_size
            self._write("put_file", str(content), self._path(name))
        else:
            size = len(content)
            self._write("pipe_file", self._path(name), bytes(content))
        self._check_kept(name, size)

    def read(self, name: str) -> bytes | None:
        """Read an object."""
        try:
            return bytes(self._call("cat_file", self._path(name)))
        except FileNotFoundError:
            return None

    def fetch(self, name: str, path: Path) -> bool:
        """Copy an object."""
        try:
            self._call("get_file", self._path(name), str(path))
        except FileNotFoundError:
            return False
        return True

    def open(self, name: str) -> BinaryIO:
        """Open an object for range requests."""
        opened = self._call("open", self._path(name), "rb", block_size=_BLOCK)
        return cast("BinaryIO", OpenedFile(opened, self._explain))

    def delete(self, name: str) -> None:
        """Remove an object."""
        try:
            self._call("rm_file", self._path(name))
        except FileNotFoundError:
            return

    def age_s(self, name: str) -> float | None:
        """Compare with an object written now: both times are those of the service."""
        clock = f".clock-{secrets.token_hex(8)}"
        self.replace(clock, memoryview(b"now"))
        try:
            now, then = (self._call("modified", self._path(each)) for each in (clock, name))
            return float((now - then).total_seconds())
        except FileNotFoundError:
            return None
        finally:
            self.delete(clock)

    def _path(self, name: str) -> str:
        return f"{self._address.root}/{name}"

    def _size(self, name: str) -> int | None:
        try:
            return int(self._call("info", self._path(name))["size"])
        except FileNotFoundError:
            return None

    def _check_kept(self, name: str, size: int) -> None:
        if (kept := self._size(name)) != size:
            raise StoreError(
                f"{self.place(name)}: the store confirmed {size} bytes, and has {kept or 'none'}",
                hint="have the store examined: what it confirms is not there",
            )

    def _opened(self) -> Any:
        if self._system is None:
            try:
                self._system = open_file_system(self._address)
            except (ImportError, RemoteStoreError) as error:
                raise self._explain(error) from error
            if self._address.scheme == "s3":
                self._system.config_kwargs |= _CHECKSUMS
        return self._system

    def _write(self, method: str, *arguments: Any, **options: Any) -> None:
        try:
            self._call(method, *arguments, **options)
        except FileNotFoundError as error:  # of the bucket
            raise self._explain(error) from error

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call the service and translate errors, except those about names.

        Raises:
            FileNotFoundError: The object does not exist.
            FileExistsError: The object exists.
            ScoringError: The content does not match its checksum.
            StoreError: Any other error.
        """
        system = self._opened()
        try:
            return getattr(system, method)(*arguments, **options)
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:
            # s3fs knows a refused condition by an element that not all servers write.
            if _REFUSED & {code for cause in causes_of(error) for code in error_codes(cause)}:
                raise FileExistsError(str(error)) from error
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> ScoringError:
        if type(error).__name__ in _DAMAGED:
            return ScoringError(f"{self._address} returns other bytes than it holds: {error}")
        meaning = translate(error, self._address)
        return StoreError(meaning.message, hint=meaning.hint, passing=meaning.passing)
