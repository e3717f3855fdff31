"""A PostgreSQL database: connections that are used again, transactions, and what their errors mean."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import conninfo

from graphkiln_backend.scoring.errors import ScoringError, StoreError

_SESSION = {
    # What a dead node holds must be free soon: its unit is given to another worker.
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "idle_in_transaction_session_timeout": "10min",
    "lock_timeout": "2min",
}
_NETWORK = {"connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
# Classes of SQLSTATE that may be over without anybody's doing: connections, a standby that will be the server soon,
# transactions that took too long, deadlocks, resources, locks, shutdowns.
_PASSING = ("08", "25006", "25P03", "25P04", "40", "53", "55", "57")
_FULL, _DENIED = "53100", "42501"
# Of the advisory lock under which tables are made: IF NOT EXISTS alone does not protect from another creator.
_LOCK = 6_118_214_937_501


class Database:
    """A database; opens no connection before it is asked. Threads may use it at the same time.

    Args:
        address: `postgresql://USER@HOST:PORT/DATABASE`; a password comes from there, PGPASSWORD or ~/.pgpass.

    Raises:
        ScoringError: The address is none.
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
        """A transaction: committed at the end of the block, rolled back where it raises.

        Raises:
            StoreError: The database fails; whether a transaction was committed may be unknown then.
            ScoringError: The database refuses what it was told.
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
        """A transaction that may make tables: of all programs one at a time, until it ends.

        Raises:
            ScoringError: As of `transaction`.
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
        """Ours, and behind them the user's, which count then: a search_path says which table is meant."""
        own = self._options.get("options") or os.environ.get("PGOPTIONS", "")
        return " ".join([*(f"-c {name}={value}" for name, value in _SESSION.items()), str(own)]).rstrip()

    def _keep(self, connection: psycopg.Connection[Any]) -> None:
        if connection.broken or connection.closed:
            connection.close()
        else:
            self._idle.put(connection)

    def close(self) -> None:
        """Closes the connections that nobody uses."""
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
