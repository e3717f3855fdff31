"""A real PostgreSQL for the destinations that need one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from postgres_server import PostgresServer

    from graphkiln_backend.scoring.destinations.database import Database


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    from postgres_server import PostgresServer  # heavy, and needed by few

    with PostgresServer() as server:
        yield server


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[Database]:
    """A database without any table."""
    from graphkiln_backend.scoring.destinations.database import Database

    with postgres.connect() as connection:
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    opened = Database(postgres.address)
    yield opened
    opened.close()
