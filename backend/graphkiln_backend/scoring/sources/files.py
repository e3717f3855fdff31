"""Files of a folder or pattern, or a single file: find their kind and reader."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import chain
from pathlib import PurePosixPath

from graphkiln_backend.images.formats import SUFFIXES
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.messages import InputRange, Row, Unit
from graphkiln_backend.scoring.sources import listing, parquet, tars
from graphkiln_backend.scoring.sources.base import (
    Columns,
    FileReader,
    as_id,
    checked_text,
    cut,
    decode_part,
    digest,
    encode_part,
)
from graphkiln_backend.scoring.sources.delta import LOG, find_delta
from graphkiln_backend.scoring.sources.places import PathPattern, Place, is_pattern, locate, split_pattern
from graphkiln_backend.scoring.sources.storage import StoredFile, check_size

KIND = "images"  # images in separate files
# Kinds detected in folders. Listings are not, because text files beside images are rarely listings.
_DATA = dict.fromkeys(SUFFIXES, KIND) | {".parquet": parquet.KIND, ".tar": tars.KIND}
_LISTINGS = dict.fromkeys(listing.SUFFIXES, listing.KIND) | dict.fromkeys(listing.CSV_SUFFIXES, listing.CSV_KIND)
_COMPRESSED = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")
_KNOWN = "images, .parquet, .tar, and listings: .txt, .csv, .tsv"
_PATTERN_HINT = "select files with a pattern, such as FOLDER/**/*.jpg"
_ICEBERG_LOG = re.compile(r"(.*/)?metadata/(v\d+|\d{5}-[0-9a-f-]{36})\.metadata\.json")
_log = logging.getLogger("graphkiln.scoring")


class FileSource:
    """Files of one kind, on this machine or in a bucket.

    Args:
        text: A folder, a pattern, or a file.
        columns: Columns to read.
    """

    def __init__(self, text: str, columns: Columns) -> None:
        self._text, self._columns = text, columns

    def ranges(self, rows: int) -> Iterator[InputRange]:
        """Yield the ranges of the files; the first file determines their kind."""
        place, files = _find(self._text)
        first = next(files, None)
        if first is None:
            raise ScoringError(f"{self._text} has no files that can be scored", hint=_hint_of_nothing(self._text))
        kind = _kind_of(first.path, listings=True)
        found = self._reader(kind).ranges(place, _of_one_kind(kind, chain([first], files), self._text), rows)
        yield from _some(found, self._text)

    def rows(self, unit: Unit) -> Iterator[Row]:
        """Yield the rows from the reader of their kind."""
        return self._reader_of(unit).rows(unit)

    def _reader_of(self, unit: Unit) -> FileReader:
        return self._reader(unit.part.partition(" ")[0])

    def _reader(self, kind: str) -> FileReader:
        return _READERS[kind](self._columns)


def _some(ranges: Iterator[InputRange], text: str) -> Iterator[InputRange]:
    is_empty = True
    for found in ranges:
        is_empty = False
        yield found
    if is_empty:
        raise ScoringError(f"{text} has no rows", hint="its files are empty")


def _hint_of_nothing(text: str) -> str:
    if is_pattern(text) and text.lower().endswith(tuple(_LISTINGS)):
        return "a listing must be given by its path, one per run"
    return f"supported are {_KNOWN}"


def _find(text: str) -> tuple[Place, Iterator[StoredFile]]:
    """Find the folder and the files named by the text."""
    place = locate(text)
    if file := place.storage.find(place.path):
        above, _, name = place.text.rpartition("/")
        if not _kind_of(name, listings=True):
            raise ScoringError(f"{text} has an unsupported format", hint=f"supported are {_KNOWN}")
        folder = Place(place.storage, place.path.removesuffix(f"/{name}") or "/", above or "/")
        return folder, iter([StoredFile(path=name, size=file.size, stamp=file.stamp)])
    if table := find_delta(text):
        return table.place, table.files()
    listed = place.storage.walk(place.path)
    first = next(listed, None)
    if first is not None:
        return place, _known(_of_no_table(chain([first], listed), text), text)
    if is_pattern(place.path):
        return _match(place)
    raise ScoringError(f"no such file, and no folder with files: {text}", hint="check the path")


def _match(place: Place) -> tuple[Place, Iterator[StoredFile]]:
    path, below = split_pattern(place.path)
    folder = Place(place.storage, path, place.text.removesuffix(below).rstrip("/") or "/")
    pattern = PathPattern(below)
    return folder, _known((file for file in folder.storage.walk(path) if pattern.matches(file.path)), place.text)


def _of_no_table(files: Iterator[StoredFile], text: str) -> Iterator[StoredFile]:
    """Yield the same files.

    Raises:
        ScoringError: They belong to a table with a log.
    """
    for file in files:
        if table := _table_of(file.path):
            raise ScoringError(
                f"{text} is a table of {table} ({file.path}), so some of its files may be obsolete",
                hint=f"export its rows as Parquet, or read all files with '{text}/**/*.parquet'",
            )
        yield file


def _table_of(path: str) -> str:
    """Name the table format of a log file; empty for other files."""
    if LOG in path.split("/"):
        return "Delta Lake"
    return "Iceberg" if _ICEBERG_LOG.fullmatch(path) else ""


def _known(files: Iterator[StoredFile], text: str) -> Iterator[StoredFile]:
    """Yield files of a known kind; the number of others is logged."""
    left, example = 0, ""
    for file in files:
        if _kind_of(file.path):
            yield file
        elif not _is_note(file.path):
            left, example = left + 1, example or file.path
    if left:
        _warn_skipped(text, left, example)


@cache
def _warn_skipped(text: str, count: int, example: str) -> None:
    """Log skipped files once, even if a source is listed repeatedly."""
    _log.warning("%s: skipped %d file%s of other formats, such as %s", text, count, "" if count == 1 else "s", example)


def _kind_of(path: str, *, listings: bool = False) -> str:
    """Kind of a file by its suffix; empty for skipped files."""
    name = PurePosixPath(path).name.lower()
    if name.endswith(_COMPRESSED):
        raise ScoringError(
            f"{path} is a compressed archive, which does not allow random access to its images",
            hint=f"decompress it to a .tar; if it is not an input, {_PATTERN_HINT}",
        )
    if name.endswith(".parquet") and _is_note(path):
        return ""
    kinds = _DATA | _LISTINGS if listings else _DATA
    return kinds.get(PurePosixPath(name).suffix, "")


def _is_note(path: str) -> bool:
    """True for metadata of the program that wrote the files."""
    return any(name.startswith("_") and "=" not in name for name in path.split("/"))


def _of_one_kind(kind: str, files: Iterator[StoredFile], text: str) -> Iterator[StoredFile]:
    for file in files:
        other = _kind_of(file.path, listings=True)
        if other != kind:
            raise ScoringError(f"{text} mixes {kind} and {other}, such as {file.path}", hint=_PATTERN_HINT)
        yield file


class ImageReader:
    """Images in separate files: a range is a chunk of files. A row's id is its path below the folder.

    Args:
        columns: Must be empty.

    Raises:
        ScoringError: Columns are requested.
    """

    def __init__(self, columns: Columns) -> None:
        columns.refuse("image files")

    def ranges(self, place: Place, files: Iterator[StoredFile], rows: int) -> Iterator[InputRange]:
        """Yield content-defined chunks of paths: an added or removed file changes at most two chunks."""
        for chunk in cut(files, rows, lambda file: os.fsencode(file.path)):
            yield _range(place.text, chunk)

    def rows(self, unit: Unit) -> Iterator[Row]:
        """Yield the files of a chunk."""
        place = locate(unit.path)
        for file in _members(unit):
            path = place.below(file.path).path
            yield Row(id=as_id(file.path), load=partial(_load, place, path, file))


def _load(place: Place, path: str, file: StoredFile) -> bytes:
    check_size(file.size)  # for services that report errors only with the content
    return place.storage.read(path, file.stamp)


def _members(unit: Unit) -> Iterator[StoredFile]:
    for path, size, stamp in decode_part(unit.part):
        yield StoredFile(path=path, size=size, stamp=stamp)


def _range(folder: str, chunk: list[StoredFile]) -> InputRange:
    part = encode_part(KIND, [(file.path, file.size, file.stamp) for file in chunk])
    size = sum(file.size for file in chunk)
    return InputRange(path=checked_text(folder), part=part, identity=digest(part), rows=len(chunk), size_bytes=size)


_READERS: dict[str, Callable[[Columns], FileReader]] = {
    KIND: ImageReader,
    parquet.KIND: parquet.ParquetReader,
    tars.KIND: tars.TarReader,
    listing.KIND: listing.ListingReader,
    listing.CSV_KIND: listing.CsvReader,
}
