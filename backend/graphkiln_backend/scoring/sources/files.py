"""Files of a folder or pattern, or a single file: find their kind and reader."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import PurePosixPath

from graphkiln_backend.images.formats import SUFFIXES
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.iceberg import FORM as ICEBERG_FORM
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
        text = self._text
        place, files = _find(text)
        first = next(files, None)
        if first is None:
            is_listing = is_pattern(text) and text.lower().endswith(tuple(_LISTINGS))
            hint = "a listing must be given by its path, one per run" if is_listing else f"supported are {_KNOWN}"
            raise ScoringError(f"{text} has no files that can be scored", hint=hint)
        kind = _kind_of(first.path, listings=True)

        def of_one_kind() -> Iterator[StoredFile]:
            for file in chain([first], files):
                if (other := _kind_of(file.path, listings=True)) != kind:
                    raise ScoringError(f"{text} mixes {kind} and {other}, such as {file.path}", hint=_PATTERN_HINT)
                yield file

        is_empty = True
        for found in _READERS[kind](self._columns).ranges(place, of_one_kind(), rows):
            is_empty = False
            yield found
        if is_empty:
            raise ScoringError(f"{text} has no rows", hint="its files are empty")

    def rows(self, unit: Unit) -> Iterator[Row]:
        """Yield the rows from the reader of their kind."""
        kind = unit.part.partition(" ")[0]
        return _READERS[kind](self._columns).rows(unit)


def _find(text: str) -> tuple[Place, Iterator[StoredFile]]:
    """Find the folder and the files named by the text."""
    place = locate(text)
    if file := place.storage.find(place.path):
        above, _, name = place.text.rpartition("/")
        if not _kind_of(name, listings=True):
            raise ScoringError(f"{text} has an unsupported format", hint=f"supported are {_KNOWN}")
        folder = Place(place.storage, place.path.removesuffix(f"/{name}") or "/", above or "/")
        return folder, iter([replace(file, path=name)])
    if table := find_delta(text):
        return table.place, table.files()
    listed = place.storage.walk(place.path)
    first = next(listed, None)
    if first is not None:
        return place, _known(_refuse_tables(chain([first], listed), text), text)
    if is_pattern(place.path):
        path, below = split_pattern(place.path)
        folder = Place(place.storage, path, place.text.removesuffix(below).rstrip("/") or "/")
        pattern = PathPattern(below)
        return folder, _known((file for file in folder.storage.walk(path) if pattern.matches(file.path)), place.text)
    raise ScoringError(f"no such file, and no folder with files: {text}", hint="check the path")


def _refuse_tables(files: Iterator[StoredFile], text: str) -> Iterator[StoredFile]:
    """Yield the same files.

    Raises:
        ScoringError: They belong to a table with a log.
    """
    for file in files:
        table = "Delta Lake" if LOG in file.path.split("/") else "Iceberg" if _ICEBERG_LOG.fullmatch(file.path) else ""
        if table:
            way = f"name it by its catalog, {ICEBERG_FORM}" if table == "Iceberg" else "export its rows as Parquet"
            raise ScoringError(
                f"{text} is a table of {table} ({file.path}), so some of its files may be obsolete",
                hint=f"{way}, or read all files with '{text}/**/*.parquet'",
            )
        yield file


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
            part = encode_part(KIND, [(file.path, file.size, file.stamp) for file in chunk])
            yield InputRange(
                path=checked_text(place.text),
                part=part,
                identity=digest(part),
                rows=len(chunk),
                size_bytes=sum(file.size for file in chunk),
            )

    def rows(self, unit: Unit) -> Iterator[Row]:
        """Yield the files of a chunk."""
        folder = locate(unit.path)
        for path, size, stamp in decode_part(unit.part):
            yield Row(id=as_id(path), load=partial(_load, folder.below(path), size, stamp))


def _load(place: Place, size: int, stamp: str) -> bytes:
    check_size(size)  # for services that report errors only with the content
    return place.storage.read(place.path, stamp)


_READERS: dict[str, Callable[[Columns], FileReader]] = {
    KIND: ImageReader,
    parquet.KIND: parquet.ParquetReader,
    tars.KIND: tars.TarReader,
    listing.KIND: listing.ListingReader,
    listing.CSV_KIND: listing.CsvReader,
}
