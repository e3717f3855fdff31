"""Notes and claims in a table of a database, as a store of files.

A value of a database has a gigabyte at most, and is held in memory as a whole, here and there: what is larger than a
piece stands in several rows, the second one called `NAME/000001`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from graphkiln_backend.graph.files import MIB
from graphkiln_backend.scoring.destinations.database import Database

_PIECE = 32 * MIB
_TABLE = """
CREATE TABLE IF NOT EXISTS graphkiln_notes (
    destination text NOT NULL,
    name text NOT NULL,
    content bytea NOT NULL,
    written_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (destination, name)
)
"""
_INSERT = "INSERT INTO graphkiln_notes (destination, name, content) VALUES (%s, %s, %s) "
_UPDATE = "ON CONFLICT (destination, name) DO UPDATE SET content = excluded.content, written_at = now()"
_READ = """
SELECT content FROM graphkiln_notes
WHERE destination = %(destination)s AND (name = %(name)s OR left(name, length(%(name)s) + 1) = %(name)s || '/')
ORDER BY name COLLATE "C"
"""
_DELETE = """
DELETE FROM graphkiln_notes
WHERE destination = %(destination)s AND (name = %(name)s OR left(name, length(%(name)s) + 1) = %(name)s || '/')
    AND NOT name = ANY(%(kept)s)
"""


class DatabaseNotes:
    """The notes of one destination.

    Args:
        database: Where the table `graphkiln_notes` is.
        destination: Tells this destination from the others in it.
        called: What people call it; empty for `destination`.
    """

    def __init__(self, database: Database, destination: str, *, called: str = "") -> None:
        self._database, self._destination, self._called = database, destination, called or destination

    def prepare(self) -> None:
        """Makes the table."""
        with self._database.making_tables() as connection:
            connection.execute(_TABLE)

    def place(self, name: str) -> str:
        """The database, the destination, and the name."""
        return f"{self._database}, {self._called}{f', note {name}' if name else ''}"

    def names(self, prefix: str = "") -> Iterator[str]:
        """All of them; they are few."""
        for (name,) in self._rows("SELECT name FROM graphkiln_notes WHERE destination = %s"):
            if name.startswith(prefix) and "/" not in name:
                yield name

    def create(self, name: str, content: memoryview) -> bool:
        """An insert that a row which is there already makes void."""
        with self._database.transaction() as connection:
            row = [self._destination, name, bytes(content)]
            created = connection.execute(_INSERT + "ON CONFLICT DO NOTHING", row).rowcount
        return bool(created) or self.read(name) == bytes(content)

    def replace(self, name: str, content: memoryview | Path) -> None:
        """Inserts or updates, all in one transaction; memory holds a piece."""
        kept: list[str] = []
        with self._database.transaction() as connection:
            for number, piece in enumerate(_pieces(content)):
                kept.append(f"{name}/{number:06}" if number else name)
                connection.execute(_INSERT + _UPDATE, [self._destination, kept[-1], piece])
            connection.execute(_DELETE, self._named(name) | {"kept": kept})

    def read(self, name: str) -> bytes | None:
        """The content; a database in which nothing was prepared has none."""
        with io.BytesIO() as content:
            return content.getvalue() if self._copy(name, content) else None

    def fetch(self, name: str, path: Path) -> bool:
        """Copies the content; memory holds a piece."""
        with path.open("wb") as file:
            found = self._copy(name, file)
        if not found:
            path.unlink()
        return found

    def open(self, name: str) -> io.BytesIO:
        """The content of a row."""
        content = self.read(name)
        if content is None:
            raise FileNotFoundError(f"there is no {self.place(name)}")
        return io.BytesIO(content)

    def delete(self, name: str) -> None:
        """Deletes its rows."""
        with self._database.transaction() as connection:
            connection.execute(_DELETE, self._named(name) | {"kept": []})

    def age_s(self, name: str) -> float | None:
        """By the clock of the database."""
        query = (
            "SELECT extract(epoch FROM now() - written_at) FROM graphkiln_notes WHERE destination = %s AND name = %s"
        )
        found = self._rows(query, name)
        return float(found[0][0]) if found else None

    def _copy(self, name: str, file: io.BytesIO | io.BufferedWriter) -> bool:
        """Writes the pieces of a note to a file; False where there is none."""
        with self._database.transaction() as connection:
            if connection.execute("SELECT to_regclass('graphkiln_notes')").fetchone() == (None,):
                return False
            with connection.cursor("pieces") as cursor:
                cursor.itersize = 1
                pieces = iter(cursor.execute(_READ, self._named(name), binary=True))
                first = next(pieces, None)
                for (content,) in chain([first] if first else [], pieces):
                    file.write(content)
        return first is not None

    def _named(self, name: str) -> dict[str, Any]:
        return {"destination": self._destination, "name": name}

    def _rows(self, query: str, *arguments: str) -> list[Any]:
        with self._database.transaction() as connection:
            return connection.execute(query.encode(), [self._destination, *arguments]).fetchall()


def _pieces(content: memoryview | Path) -> Iterator[bytes]:
    """A content in pieces: one at least, which may be empty."""
    with content.open("rb") if isinstance(content, Path) else io.BytesIO(content) as stream:
        yield stream.read(_PIECE)
        while piece := stream.read(_PIECE):
            yield piece
