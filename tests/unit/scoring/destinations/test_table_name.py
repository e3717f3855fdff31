"""A table's name has parts, which quotations keep together; what a server makes of it needs one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from graphkiln_backend.scoring.destinations.table import TableName, parse_table, resolve_table
from graphkiln_backend.scoring.errors import ScoringError

if TYPE_CHECKING:
    from graphkiln_backend.scoring.destinations.database import Database


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("answers", ("answers",)),
        ('"answers"', ("answers",)),
        ("Sales.Answers", ("Sales", "Answers")),
        ('"a.b"', ("a.b",)),
        ('sales."2024.q1 ""new"""', ("sales", '2024.q1 "new"')),
    ],
)
def test_parts(text: str, parts: tuple[str, ...]) -> None:
    assert parse_table(text) == parts


@pytest.mark.parametrize("text", ["", "a.b.c", "a b", "a;b", 'a"b', '"', '""', ".a", "a" * 64, '"a\0"'])
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(ScoringError, match=r"names no table.*\?table=NAME"):
        parse_table(text)


def test_names_that_are_told_apart_are_written_apart() -> None:
    names = [TableName("a", "b.c"), TableName("a.b", "c"), TableName("a", "b"), TableName("a", '"b"')]
    assert [str(name) for name in names] == ['a."b.c"', '"a.b".c', "a.b", 'a."""b"""']
    assert parse_table(str(names[0])) == ("a", "b.c")


@pytest.mark.slow
def test_a_table_has_one_name_whatever_a_user_writes(database: Database) -> None:
    def names(*texts: str) -> set[str]:
        with database.transaction() as connection:
            return {str(resolve_table(connection, parse_table(text))) for text in texts}

    assert names("t", '"t"', "public.t", 'public."t"') == {"public.t"}  # before it is made
    with database.transaction() as connection:
        connection.execute("CREATE SCHEMA app; CREATE TABLE app.t (); SET LOCAL search_path = nowhere, app, public")
        assert str(resolve_table(connection, ("t",))) == "app.t"
        assert str(resolve_table(connection, ("new",))) == "app.new"
        connection.execute("SET LOCAL search_path = nowhere")
        with pytest.raises(ScoringError, match="search_path"):
            resolve_table(connection, ("t",))
        connection.execute("DROP SCHEMA app CASCADE")
