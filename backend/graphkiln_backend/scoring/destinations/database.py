"""PostgreSQL databases: pooled connections, transactions, and translation of errors."""

from __future__ import annotations

import io
import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import psycopg
from psycopg import conninfo

from graphkiln_backend.graph.files import MIB
from graphkiln_backend.scoring.errors import ScoringError, StoreError

# Notes and the lock as files in a table of a database.
#
# A database value is limited to a gigabyte and held in memory on both sides, so large files are split into rows: the
# second one is named `NAME/000001`.

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
        database: Database of the table `graphkiln_notes`.
        destination: Key of this destination in the table.
        called: Name for messages; empty for `destination`.
    """

    def __init__(self, database: Database, destination: str, *, called: str = "") -> None:
        self._database, self._destination, self._called = database, destination, called or destination

    def prepare(self) -> None:
        """Create the table."""
        with self._database.making_tables() as connection:
            connection.execute(_TABLE)

    def place(self, name: str) -> str:
        """Database, destination and name."""
        return f"{self._database}, {self._called}{f', note {name}' if name else ''}"

    def create(self, name: str, content: memoryview) -> bool:
        """Insert unless the row exists."""
        with self._database.transaction() as connection:
            row = [self._destination, name, bytes(content)]
            created = connection.execute(_INSERT + "ON CONFLICT DO NOTHING", row).rowcount
        return bool(created) or self.read(name) == bytes(content)

    def replace(self, name: str, content: memoryview | Path) -> None:
        """Insert or update in one transaction; memory holds one piece."""
        kept: list[str] = []
        with self._database.transaction() as connection:
            for number, piece in enumerate(_pieces(content)):
                kept.append(f"{name}/{number:06}" if number else name)
                connection.execute(_INSERT + _UPDATE, [self._destination, kept[-1], piece])
            connection.execute(_DELETE, self._named(name) | {"kept": kept})

    def read(self, name: str) -> bytes | None:
        """Read the content; None in an unprepared database."""
        with io.BytesIO() as content:
            return content.getvalue() if self._copy(name, content) else None

    def fetch(self, name: str, path: Path) -> bool:
        """Copy the content; memory holds one piece."""
        with path.open("wb") as file:
            found = self._copy(name, file)
        if not found:
            path.unlink()
        return found

    def delete(self, name: str) -> None:
        """Delete the rows of a name."""
        with self._database.transaction() as connection:
            connection.execute(_DELETE, self._named(name) | {"kept": []})

    def age_s(self, name: str) -> float | None:
        """Age by the clock of the database."""
        query = (
            "SELECT extract(epoch FROM now() - written_at) FROM graphkiln_notes WHERE destination = %s AND name = %s"
        )
        with self._database.transaction() as connection:
            found = connection.execute(query, [self._destination, name]).fetchone()
        return float(found[0]) if found else None

    def _copy(self, name: str, file: io.BytesIO | io.BufferedWriter) -> bool:
        """Write the pieces of a note to a file; return False if there is none."""
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


def _pieces(content: memoryview | Path) -> Iterator[bytes]:
    """Split a content into at least one piece."""
    with content.open("rb") if isinstance(content, Path) else io.BytesIO(content) as stream:
        yield stream.read(_PIECE)
        while piece := stream.read(_PIECE):
            yield piece


_SESSION = {
    # Resources of a dead node must be released soon, because its unit is given to another worker.
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "idle_in_transaction_session_timeout": "10min",
    "lock_timeout": "2min",
}
_NETWORK = {"connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
# SQLSTATE classes of temporary errors: connections, failover, time limits, deadlocks, resources, locks, shutdowns.
_PASSING = ("08", "25006", "25P03", "25P04", "40", "53", "55", "57")
_FULL, _DENIED = "53100", "42501"
# Advisory lock for creating tables: IF NOT EXISTS does not protect against concurrent creation.
_LOCK = 6_118_214_937_501


class Database:
    """A database. Thread-safe; connects when it is used.

    Args:
        address: `postgresql://USER@HOST:PORT/DATABASE`; a password comes from there, PGPASSWORD or ~/.pgpass.

    Raises:
        ScoringError: The address is malformed.
    """

    def __init__(self, address: str) -> None:
        try:
            options = conninfo.conninfo_to_dict(address)
        except psycopg.ProgrammingError as error:
            raise ScoringError(
                f"this is no address of a database: {error}", hint="postgresql://USER@HOST:PORT/DATABASE"
            ) from error
        self._address, self._options = address, options
        self._idle: queue.SimpleQueue[psycopg.Connection[Any]] = queue.SimpleQueue()
        self._name = f"{options.get('host', 'localhost')}:{options.get('port', 5432)}/{options.get('dbname', '')}"

    def __str__(self) -> str:
        return f"postgresql://{self._name}"

    @contextmanager
    def transaction(self) -> Iterator[psycopg.Connection[Any]]:
        """Open a transaction: committed at the end of the block, rolled back by an exception.

        Raises:
            StoreError: The database fails; it may be unknown whether the transaction was committed.
                ScoringError: The database refuses the statement.
        """
        try:
            connection = self._connection()
            try:
                with connection.transaction():
                    yield connection
            finally:
                self._keep(connection)
        except psycopg.Error as error:
            raise self._explain(error) from error

    @contextmanager
    def making_tables(self) -> Iterator[psycopg.Connection[Any]]:
        """Open a transaction that may create tables, exclusive among all programs.

        Raises:
            ScoringError: As for `transaction`.
        """
        with self.transaction() as connection:
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
            yield connection

    def _connection(self) -> psycopg.Connection[Any]:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            network: dict[str, Any] = {name: value for name, value in _NETWORK.items() if name not in self._options}
            return psycopg.connect(self._address, autocommit=True, options=self._settings(), **network)

    def _settings(self) -> str:
        """Connection settings; those of the user take precedence, because a search_path selects tables."""
        own = self._options.get("options") or os.environ.get("PGOPTIONS", "")
        return " ".join([*(f"-c {name}={value}" for name, value in _SESSION.items()), str(own)]).rstrip()

    def _keep(self, connection: psycopg.Connection[Any]) -> None:
        if connection.broken or connection.closed:
            connection.close()
        else:
            self._idle.put(connection)

    def close(self) -> None:
        """Close the idle connections."""
        while not self._idle.empty():
            self._idle.get_nowait().close()

    def _explain(self, error: psycopg.Error) -> ScoringError:
        words = (str(error).strip() or type(error).__name__).splitlines()[0]
        state = error.sqlstate or ""
        if state == _FULL:
            return StoreError(f"{self}: its disk is full: {words}", hint="make room there; the same command goes on")
        if state == _DENIED:
            return StoreError(f"{self}: {words}", hint="grant this user what it needs: CREATE, SELECT, INSERT, DELETE")
        if state.startswith(_PASSING) or isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            return StoreError(f"{self}: {words}", hint="check the server and the network", passing=True)
        return ScoringError(f"{self} refuses it: {words}")
