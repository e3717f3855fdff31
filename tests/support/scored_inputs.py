"""Inputs to score, and units and rows of a source."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.scoring.errors import InputChanged, SourceUnavailable
from graphkiln_backend.scoring.messages import Unit
from graphkiln_backend.scoring.sources.base import Columns, Source
from graphkiln_backend.scoring.sources.files import FileSource

CONFIGURATION = "model"


@dataclass(frozen=True)
class Answerable:
    """A row as it was read: its content, or the error that it has instead."""

    id: str
    content: bytes | None
    error: str
    kept: Mapping[str, Any]


def files_source(text: Path | str, **columns: Any) -> FileSource:
    """Open a source of files."""
    return FileSource(str(text), Columns(**columns))


def plan(source: Source, rows: int = 3) -> list[Unit]:
    """Units of a source."""
    return [found.unit(CONFIGURATION) for found in source.ranges(rows)]


def read_unit(source: Source, unit: Unit) -> list[Answerable]:
    """Rows of a unit; their number must be the planned one."""
    rows = list(_read(source, unit))
    assert len(rows) == unit.rows
    return rows


def read_all(source: Source, rows: int = 3) -> list[Answerable]:
    """Rows of all units."""
    return [row for unit in plan(source, rows) for row in read_unit(source, unit)]


def ids_of(source: Source, rows: int = 3) -> list[str]:
    """Ids of all rows."""
    return [row.id for row in read_all(source, rows)]


def write_tar(path: Path, members: Mapping[str, bytes]) -> None:
    """Write a tar of files, in order."""
    with tarfile.open(path, "w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def _read(source: Source, unit: Unit) -> Iterator[Answerable]:
    for row in source.rows(unit):
        kept = {name: array.to_pylist()[0] for name, array in row.kept.items()}
        try:
            yield Answerable(row.id, row.load(), "", kept)
        except (InputChanged, SourceUnavailable):
            raise
        except (GraphkilnError, OSError) as error:
            yield Answerable(row.id, None, str(error), kept)
