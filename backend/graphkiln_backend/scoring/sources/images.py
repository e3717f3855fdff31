"""Image files: a range is a run of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial

from graphkiln_backend.scoring.errors import SourceUnavailable
from graphkiln_backend.scoring.rows import Row
from graphkiln_backend.scoring.sources.cuts import cut
from graphkiln_backend.scoring.sources.names import as_id, checked_text, decode_part, digest, encode_part
from graphkiln_backend.scoring.sources.places import Place, locate
from graphkiln_backend.scoring.sources.reader import Columns
from graphkiln_backend.scoring.sources.storage import StoredFile, check_size
from graphkiln_backend.scoring.units import InputRange, Unit

KIND = "images"


class ImageReader:
    """Images that are files of their own. A row's id is its path below the folder.

    Args:
        columns: None, as there are none.

    Raises:
        ScoringError: Columns are requested.
    """

    def __init__(self, columns: Columns) -> None:
        columns.refuse("image files")

    def ranges(self, place: Place, files: Iterator[StoredFile], rows: int) -> Iterator[InputRange]:
        """Runs that end where a path says so: a file that comes or goes changes the run that it is in."""
        for run in cut(files, rows, lambda file: os.fsencode(file.path)):
            yield _range(place.text, run)

    def rows(self, unit: Unit) -> Iterator[Row]:
        """The files of a run."""
        place = locate(unit.path)
        for file in _members(unit):
            path = place.below(file.path).path
            yield Row(id=as_id(file.path), load=partial(_load, place, path, file))

    def replan(self, unit: Unit) -> Iterator[InputRange]:
        """The run with its files as they are now, without those that are gone.

        Raises:
            SourceUnavailable: The folder holds nothing at all: its file system is gone rather than its files.
        """
        place = locate(unit.path)
        run = []
        for file in _members(unit):
            found = place.storage.find(place.below(file.path).path)
            if found or not file.stamp:  # what could not be found before is a row with an error
                run.append(StoredFile(path=file.path, size=found.size, stamp=found.stamp) if found else file)
        if run:
            yield _range(unit.path, run)
        elif next(place.storage.walk(place.path), None) is None:
            raise SourceUnavailable(f"{unit.path} holds no files any more", hint="is its file system mounted?")


def _load(place: Place, path: str, file: StoredFile) -> bytes:
    check_size(file.size)  # for services that say it only with the content
    return place.storage.read(path, file.stamp)


def _members(unit: Unit) -> Iterator[StoredFile]:
    for path, size, stamp in decode_part(unit.part):
        yield StoredFile(path=path, size=size, stamp=stamp)


def _range(folder: str, run: list[StoredFile]) -> InputRange:
    part = encode_part(KIND, [(file.path, file.size, file.stamp) for file in run])
    size = sum(file.size for file in run)
    return InputRange(path=checked_text(folder), part=part, identity=digest(part), rows=len(run), size_bytes=size)
