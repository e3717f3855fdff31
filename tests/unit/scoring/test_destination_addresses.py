"""A text names a destination, or is refused with what could be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.scoring.destinations.folder import FolderStore
from graphkiln_backend.scoring.destinations.ledger import LedgeredDestination
from graphkiln_backend.scoring.destinations.object_store import ObjectStore
from graphkiln_backend.scoring.destinations.parquet import ParquetDestination
from graphkiln_backend.scoring.destinations.table import TableDestination
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.opening import destination_at


@pytest.mark.parametrize(
    ("text", "kind"), [("/data/out", FolderStore), ("s3://b/out", ObjectStore), ("gs://b/out", ObjectStore)]
)
def test_stores_of_parquet_files(text: str, kind: type) -> None:
    opened = destination_at(text)
    assert isinstance(opened, ParquetDestination)
    assert isinstance(opened._store, kind)
    assert opened._store.place("a") == f"{text}/a"


def test_a_table_of_a_database() -> None:
    opened = destination_at("postgresql://me@host:1/db?sslmode=require&table=results.answers")
    assert isinstance(opened, TableDestination)
    assert opened._parts == ("results", "answers")
    assert opened._database._address == "postgresql://me@host:1/db?sslmode=require"
    for text in ("postgresql://me@host/db", "postgresql://me@host/db?table=a;b"):
        with pytest.raises(ScoringError, match=r"names no table.*\?table=NAME"):
            destination_at(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("postgresql:///db?host=/run/postgresql&table=t", "postgresql:///db?host=%2Frun%2Fpostgresql"),
        ("postgres://h/db?options=-c%20search_path%3Dapp&table=t", "postgres://h/db?options=-c%20search_path%3Dapp"),
        ("postgresql://h/db?table=t", "postgresql://h/db"),
    ],
)
def test_the_rest_of_the_address_is_for_libpq(text: str, address: str) -> None:
    opened = destination_at(text)
    assert isinstance(opened, TableDestination)
    assert opened._database._address == address


def test_a_ledger_beside_an_object_store() -> None:
    opened = destination_at("s3://b/out", "postgresql://me@host/db")
    assert isinstance(opened, LedgeredDestination)


@pytest.mark.parametrize("text", ["hf://owner/repository", "ftp://host/out", "s3://"])
def test_what_cannot_be_written(text: str) -> None:
    with pytest.raises(GraphkilnError, match="s3://BUCKET/PATH"):
        destination_at(text)
    assert not Path(text).exists()


@pytest.mark.parametrize("format_", ["", "delta"])
def test_a_destination_is_not_called_a_model_store(format_: str) -> None:
    with pytest.raises(ScoringError, match=r"'ftp://host/out' cannot hold results"):
        destination_at("ftp://host/out", format=format_)


def test_a_format_that_there_is_not_is_told_with_those_that_are() -> None:
    with pytest.raises(ScoringError, match=r"--format csv is not known \(one of parquet, delta"):
        destination_at("/data/out", format="csv")


@pytest.mark.parametrize(
    ("text", "format_"), [("s3://b/out", "delta"), ("postgresql://h/db?table=t", ""), ("/data/out", "")]
)
def test_a_ledger_that_nobody_would_read_is_refused(text: str, format_: str) -> None:
    with pytest.raises(ScoringError, match="leave out --ledger"):
        destination_at(text, "postgresql://h/db", format_)


@pytest.mark.parametrize("format_", ["parquet", "delta"])
def test_a_table_of_a_database_has_a_form_of_its_own(format_: str) -> None:
    with pytest.raises(ScoringError, match=rf"not {format_} \(leave out --format\)"):
        destination_at("postgresql://h/db?table=t", format=format_)


@pytest.mark.parametrize(
    ("text", "ledger"), [("postgresql://me:secret@h/db?table=t", "x"), ("ftp://me:secret@h/a", "")]
)
def test_passwords_are_not_repeated(text: str, ledger: str) -> None:
    with pytest.raises(ScoringError) as refused:
        destination_at(text, ledger)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("text", ["s3://b/out/", "s3://b/out//", "gs://b/out/"])
def test_slashes_at_the_end_are_of_no_account(text: str) -> None:
    opened = destination_at(text)
    assert isinstance(opened, ParquetDestination)
    assert opened._store.place("a") == f"{text.rstrip('/')}/a"
