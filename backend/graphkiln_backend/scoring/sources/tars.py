"""WebDataset tars: files with the same key (the name up to its first dot) form a row. A range is a chunk of rows.

Hidden files and devices are skipped; a link instead of an image is an error of its row.
Source: "The WebDataset Format", https://github.com/webdataset/webdataset.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import groupby
from typing import BinaryIO, NamedTuple

import pyarrow as pa

from graphkiln_backend.graph.errors import GraphkilnError, InvalidInput
from graphkiln_backend.images.formats import SUFFIXES
from graphkiln_backend.scoring.errors import InputChanged, ScoringError, SourceUnavailable
from graphkiln_backend.scoring.messages import InputRange, Row, Unit
from graphkiln_backend.scoring.row_hashes import RowHashes
from graphkiln_backend.scoring.sources.base import (
    Columns,
    as_id,
    checked_text,
    cut,
    decode_part,
    digest,
    encode_part,
    map_ahead,
    refuse_row,
)
from graphkiln_backend.scoring.sources.places import Place, locate
from graphkiln_backend.scoring.sources.storage import StoredFile, check_size

KIND = "tar"
_BLOCK = 512
_LINK_HINT = "tar --dereference --hard-dereference packs what links mean"
_DAMAGED_HINT = "the rows that it hides are not known: copy it again, or name the others by a pattern"
_SHOWN = 20
_LINK = -1  # instead of a size

# Files of a row by suffix: offset in the tar and size, or `_LINK` for a link.
Files = dict[str, tuple[int, int]]


class _Planned(NamedTuple):
    """A tar in the plan, with the ids of its rows and the suffixes of its files."""

    file: StoredFile
    ranges: list[InputRange]
    ids: list[str]
    endings: set[str]


class TarReader:
    """Rows of WebDataset tars. A row's id is `TAR/KEY`; its columns are the suffixes of its files.

    Args:
        columns: Suffix of the image, and suffixes of files copied as text.

    Raises:
        ScoringError: A column of ids is requested.
    """

    def __init__(self, columns: Columns) -> None:
        if columns.id:
            raise ScoringError("rows of a tar are named by their keys", hint="leave out --id-column")
        self._image = columns.image.lower().lstrip(".")
        self._kept = {name: name.lower().lstrip(".") for name in columns.kept}
        self._asked = {ending for ending in (self._image, *self._kept.values()) if ending}

    def ranges(self, place: Place, files: Iterator[StoredFile], rows: int) -> Iterator[InputRange]:
        """Yield content-defined chunks of rows, each from one tar; memory holds the headers of a few tars."""
        seen: list[StoredFile] = []
        endings: set[str] = set()
        with RowHashes() as seen_ids:
            for found in map_ahead(partial(self._plan, place, rows), files):
                seen.append(found.file)
                self._note(endings, found.endings)
                seen_ids.add(found.ids)
                yield from found.ranges
            if endings and (missing := sorted(self._asked - endings)):
                hint = f"there are {', '.join(sorted(endings)[:_SHOWN])}"
                raise ScoringError(f"no row of {place.text} has a file .{missing[0]}", hint=hint)
            seen_ids.refuse_repeated(partial(_all_ids, place, seen), "files of one key must follow each other in a tar")

    def rows(self, unit: Unit) -> Iterator[Row]:
        """Yield the rows of a range; each image is read separately."""
        name, stamp, members = decode_part(unit.part)
        place = locate(unit.path)
        for key, files in members:
            image = self._image or _find_image(files, f"{unit.path}: {key}")
            load = partial(_load, place, stamp, files.get(image), image, list(files))
            try:
                kept = {name: _read_text(place, stamp, files.get(ending)) for name, ending in self._kept.items()}
            except (InputChanged, SourceUnavailable):
                raise
            except (GraphkilnError, OSError) as error:  # other rows of the tar may be readable
                kept, load = dict.fromkeys(self._kept, pa.nulls(1, pa.string())), partial(refuse_row, str(error))
            yield Row(id=as_id(f"{name}/{key}"), load=load, kept=kept)

    def _plan(self, place: Place, rows: int, file: StoredFile) -> _Planned:
        path = place.below(file.path)
        endings: set[str] = set()
        members: list[tuple[str, Files]] = []
        for key, found in _read_rows(path, file):
            self._note(endings, found)
            image = self._image or _find_image(found, f"{path.text}: {key}")
            wanted = {image, *self._kept.values()} if image else found.keys()
            members.append((key, {ending: extent for ending, extent in found.items() if ending in wanted}))
        ranges = []
        for chunk in cut(members, rows, lambda row: row[0].encode("utf-8", "surrogateescape")):
            part = encode_part(KIND, (file.path, file.stamp, chunk))
            size = sum(max(size, 0) for _, files in chunk for _, size in files.values())
            ranges.append(
                InputRange(
                    path=checked_text(path.text), part=part, identity=digest(part), rows=len(chunk), size_bytes=size
                )
            )
        return _Planned(file, ranges, [f"{file.path}/{key}" for key, _ in members], endings)

    def _note(self, endings: set[str], found: Iterable[str]) -> None:
        """Record the requested suffixes, and some others for messages, because there may be as many as rows."""
        endings.update(each for each in found if each in self._asked or len(endings) < _SHOWN)


def _read_text(place: Place, stamp: str, extent: tuple[int, int] | None) -> pa.Array:
    content = _read_file(place, stamp, extent) if extent and extent[1] != _LINK else None
    text = None if content is None else content.decode("utf-8", "backslashreplace")
    return pa.array([text], pa.string())


def _load(place: Place, stamp: str, extent: tuple[int, int] | None, ending: str, there: list[str]) -> bytes:
    if extent is None:
        raise InvalidInput(f"the row has no file .{ending}" if ending else f"the row has no image, but {there}")
    if extent[1] == _LINK:
        raise InvalidInput(f"the row's .{ending} is a link in the tar, which holds no image: {_LINK_HINT}")
    return _read_file(place, stamp, extent)


def _read_file(place: Place, stamp: str, extent: tuple[int, int]) -> bytes:
    _, size = extent
    check_size(size)
    return place.storage.read(place.path, stamp, extent) if size else b""


def _find_image(files: Files, where: str) -> str:
    """Suffix of the only image of a row, or empty."""
    found = [ending for ending in files if f".{ending.rpartition('.')[2]}" in SUFFIXES]
    if len(found) > 1:
        raise ScoringError(f"{where} has several images", hint=f"--image-column says which: {', '.join(found)}")
    return found[0] if found else ""


def _read_rows(path: Place, file: StoredFile) -> Iterator[tuple[str, Files]]:
    """Yield the rows of a tar from its headers."""
    with path.storage.open(path.path, file.stamp) as raw:
        for key, members in groupby(_read_members(raw, path.text, file.size), key=lambda member: member[0]):
            files: Files = {}
            for _, ending, offset, size in members:
                if ending in files:
                    raise ScoringError(
                        f"{path.text}: {as_id(key)} has two files .{ending}, capitals aside",
                        hint="a row has one file of each ending: pack the tar anew",
                    )
                files[ending] = offset, size
            yield key, files


def _all_ids(place: Place, files: list[StoredFile]) -> Iterator[str]:
    for file in files:
        for key, _ in _read_rows(place.below(file.path), file):
            yield f"{file.path}/{key}"


def _read_members(raw: BinaryIO, name: str, size_bytes: int) -> Iterator[tuple[str, str, int, int]]:
    """Yield key, suffix, offset and size of each file of a tar."""
    try:
        with tarfile.open(fileobj=raw, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # which would grow with the tar
                if not _is_of_a_row(member):
                    continue
                if member.issparse():
                    raise ScoringError(f"{name}: {as_id(member.name)} has holes", hint="pack it without tar --sparse")
                if member.offset_data + member.size > size_bytes:
                    raise ScoringError(f"{name} is cut off within {as_id(member.name)}", hint=_DAMAGED_HINT)
                key, ending = _split_name(member.name)
                yield key, ending, member.offset_data, member.size if member.isreg() else _LINK
            _check_end(raw, archive.offset, name)
    except tarfile.TarError as error:
        raise ScoringError(f"{name} is no sound tar: {error}", hint=_DAMAGED_HINT) from error


def _check_end(raw: BinaryIO, offset: int, name: str) -> None:
    """Refuse a tar without end marker, because tarfile treats a damaged header as the end, and a concatenated tar."""
    raw.seek(offset)
    if raw.read(_BLOCK).strip(b"\0"):
        raise ScoringError(f"{name} is damaged near byte {offset}: no file begins there", hint=_DAMAGED_HINT)
    rest = next((block for block in iter(partial(raw.read, _BLOCK), b"") if block.strip(b"\0")), b"")
    try:
        member = tarfile.TarInfo.frombuf(rest, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return
    raise ScoringError(
        f"{name} goes on behind its end, with {as_id(member.name)}: it is several tars, one behind the other",
        hint="put them together by tar --concatenate, or name each by itself",
    )


def _is_of_a_row(member: tarfile.TarInfo) -> bool:
    """True for a file or a link."""
    name = member.name.rpartition("/")[2]
    is_link = (member.islnk() or member.issym()) and "." in name
    return (member.isreg() or is_link) and not name.startswith(".")


def _split_name(path: str) -> tuple[str, str]:
    """Split a name at its first dot into key and suffix; folders belong to the key."""
    folder, slash, name = path.removeprefix("./").rpartition("/")
    stem, _, ending = name.partition(".")
    return f"{folder}{slash}{stem}", ending.lower()
