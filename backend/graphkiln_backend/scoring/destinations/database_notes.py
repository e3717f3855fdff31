"""Notes and claims in a table of a database, as a store of files."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graphkiln_backend.scoring.destinations.database import Database

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
            if name.startswith(prefix):
                yield name

    def create(self, name: str, content: memoryview) -> bool:
        """An insert that a row which is there already makes void."""
        with self._database.transaction() as connection:
            row = [self._destination, name, bytes(content)]
            created = connection.execute(_INSERT + "ON CONFLICT DO NOTHING", row).rowcount
        return bool(created) or self.read(name) == bytes(content)

    def replace(self, name: str, content: memoryview | Path) -> None:
        """An insert or an update."""
        row = [self._destination, name, content.read_bytes() if isinstance(content, Path) else bytes(content)]
        update = "ON CONFLICT (destination, name) DO UPDATE SET content = excluded.content, written_at = now()"
        with self._database.transaction() as connection:
            connection.execute(_INSERT + update, row)

    def read(self, name: str) -> bytes | None:
        """The content of a row; a database in which nothing was prepared has none."""
        if not self._rows("SELECT true WHERE to_regclass('graphkiln_notes') IS NOT NULL AND %s::text IS NOT NULL"):
            return None
        found = self._rows("SELECT content FROM graphkiln_notes WHERE destination = %s AND name = %s", name)
        return bytes(found[0][0]) if found else None

    def fetch(self, name: str, path: Path) -> bool:
        """Copies the content of a row."""
        content = self.read(name)
        if content is not None:
            path.write_bytes(content)
        return content is not None

    def open(self, name: str) -> io.BytesIO:
        """The content of a row."""
        content = self.read(name)
        if content is None:
            raise FileNotFoundError(f"there is no {self.place(name)}")
        return io.BytesIO(content)

    def delete(self, name: str) -> None:
        """Deletes the row."""
        with self._database.transaction() as connection:
            query = "DELETE FROM graphkiln_notes WHERE destination = %s AND name = %s"
            connection.execute(query, [self._destination, name])

    def age_s(self, name: str) -> float | None:
        """By the clock of the database."""
        query = (
            "SELECT extract(epoch FROM now() - written_at) FROM graphkiln_notes WHERE destination = %s AND name = %s"
        )
        found = self._rows(query, name)
        return float(found[0][0]) if found else None

    def _rows(self, query: str, *arguments: str) -> list[Any]:
        with self._database.transaction() as connection:
            return connection.execute(query.encode(), [self._destination, *arguments]).fetchall()
