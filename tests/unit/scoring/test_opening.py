"""Which source a request names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scoring_runs import destination_at

from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.scoring.destinations.folder import FolderStore
from graphkiln_backend.scoring.destinations.ledger import LedgeredDestination
from graphkiln_backend.scoring.destinations.object_store import ObjectStore
from graphkiln_backend.scoring.destinations.parquet import ParquetDestination
from graphkiln_backend.scoring.destinations.table import TableDestination
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.messages import ScoreRequest
from graphkiln_backend.scoring.plan import open_source

REQUEST = ScoreRequest(source="photos", model="m", destination="answers")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": "photos"}, "not a database"),
        ({"keep_columns": ("a", "id")}, "has its own column 'id'"),
        ({"keep_columns": ("a", "model")}, "has its own column 'model'"),
        ({"source": "postgres://host/db", "id_column": "id"}, "--query"),
    ],
)
def test_options_that_do_not_fit_the_source_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ScoringError, match=message):
        open_source(replace(REQUEST, **change))


@pytest.mark.parametrize(
    ("text", "kind"), [("/data/out", FolderStore), ("s3://b/out", ObjectStore), ("gs://b/out", ObjectStore)]
)
def test_stores_of_parquet_files(text: str, kind: type) -> None:
    opened = destination_at(text)
    assert isinstance(opened, ParquetDestination)
    assert isinstance(opened._store, kind)
    assert opened._store.place("a") == f"{text}/a"


def test_table_of_a_database() -> None:
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
def test_other_parameters_are_passed_to_libpq(text: str, address: str) -> None:
    opened = destination_at(text)
    assert isinstance(opened, TableDestination)
    assert opened._database._address == address


def test_ledger_of_an_object_store() -> None:
    opened = destination_at("s3://b/out", "postgresql://me@host/db")
    assert isinstance(opened, LedgeredDestination)


@pytest.mark.parametrize("text", ["hf://owner/repository", "ftp://host/out", "s3://"])
def test_unsupported_destination_is_refused(text: str) -> None:
    with pytest.raises(GraphkilnError, match="s3://BUCKET/PATH"):
        destination_at(text)
    assert not Path(text).exists()


def test_unknown_format_is_refused() -> None:
    with pytest.raises(ScoringError, match=r"csv.*parquet, delta"):
        destination_at("/data/out", format="csv")
    with pytest.raises(ScoringError, match="--out iceberg:CATALOG"):
        destination_at("s3://answers/2026", format="iceberg")


@pytest.mark.parametrize(
    ("text", "format_"), [("s3://b/out", "delta"), ("postgresql://h/db?table=t", ""), ("/data/out", "")]
)
def test_needless_ledger_is_refused(text: str, format_: str) -> None:
    with pytest.raises(ScoringError, match="leave out --ledger"):
        destination_at(text, "postgresql://h/db", format_)


@pytest.mark.parametrize("format_", ["parquet", "delta"])
def test_table_of_a_database_has_a_form_of_its_own(format_: str) -> None:
    with pytest.raises(ScoringError, match="leave out --format"):
        destination_at("postgresql://h/db?table=t", format=format_)


@pytest.mark.parametrize(
    ("text", "ledger"), [("postgresql://me:secret@h/db?table=t", "x"), ("ftp://me:secret@h/a", "")]
)
def test_error_does_not_show_the_password(text: str, ledger: str) -> None:
    with pytest.raises(ScoringError) as refused:
        destination_at(text, ledger)
    assert "secret" not in str(refused.value)
