"""A real REST catalog, SeaweedFS, with its tables on its S3 server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import inline_fleet
import pyarrow as pa
import pytest
from iceberg_tables import configure
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import CommitStateUnknownException
from scoring_runs import REPOSITORY, destination_at
from seaweed_server import SeaweedServer

from graphkiln.scoring.running import score, verify
from graphkiln_backend.scoring.destinations.base import Result
from graphkiln_backend.scoring.destinations.iceberg import PROPERTY, IcebergDestination
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.messages import InputRange, Unit

pytestmark = [pytest.mark.wide, pytest.mark.filterwarnings("ignore::ResourceWarning")]
UNITS = [InputRange(path=f"p/{number}", part="", identity=str(number), rows=1).unit("model") for number in range(3)]


@pytest.fixture(scope="module")
def server() -> Iterator[SeaweedServer]:
    with SeaweedServer() as started:
        yield started


@pytest.fixture
def catalog(server: SeaweedServer, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Catalog:
    """The catalog, with a namespace for each test."""
    configure(server.variables, monkeypatch)
    opened = load_catalog("lake")
    assert isinstance(opened, RestCatalog)
    opened.create_namespace(namespace(request))
    return opened


def namespace(request: pytest.FixtureRequest) -> str:
    return str(request.node.name.removeprefix("test_"))[:30].strip("_")


def result(of: Unit) -> Result:
    table = pa.table({"id": [of.path], "error": pa.nulls(1, pa.string())})
    return Result(unit_id=of.id, configuration="model", table=table)


def staged(name: str, units: list[Unit]) -> IcebergDestination:
    made = destination_at(name)
    assert isinstance(made, IcebergDestination)
    made.declare(lambda: result(UNITS[0]).table.schema)
    made.prepare()
    for unit in units:
        made.commit(result(unit))
    return made


def test_table_is_scored_into_another(
    catalog: Catalog, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    inline_fleet.install(monkeypatch)
    space = namespace(request)
    content = (REPOSITORY / "docs" / "digits" / "seven.png").read_bytes()
    photos = catalog.create_table(f"{space}.photos", pa.schema([("id", pa.string()), ("image", pa.binary())]))
    photos.append(pa.table({"id": ["a", "b", "c"], "image": [content, content, b"none"]}))
    given: dict[str, Any] = {"model": REPOSITORY / "model_repository" / "digits", "id_column": "id"}
    for _ in range(2):
        record = score(f"iceberg:lake/{space}.photos", out=f"iceberg:lake/{space}.answers", **given)
        assert record.request["snapshot"] == str(photos.current_snapshot().snapshot_id)  # type: ignore[union-attr]
        table = catalog.load_table(f"{space}.answers")
        found = {row["id"]: row for row in table.scan().to_arrow().to_pylist()}
        assert found["a"]["labels"][0] == found["b"]["labels"][0] == "seven"
        assert found["c"]["error"]
        assert len(table.snapshots()) == 1
    assert verify(f"iceberg:lake/{space}.answers").ok


def test_writers_at_the_same_time(catalog: Catalog, request: pytest.FixtureRequest) -> None:
    name = f"{namespace(request)}.answers"
    destination = staged(f"iceberg:lake/{name}", UNITS)
    stop = threading.Event()
    foreign = 0

    def append() -> None:
        nonlocal foreign
        table = catalog.load_table(name)
        while not stop.is_set() and foreign < 20:
            table.append(pa.table({"id": ["foreign"], "error": pa.nulls(1, pa.string())}))
            foreign += 1

    writer = threading.Thread(target=append)
    writer.start()
    destination.publish((unit.id for unit in UNITS), lambda: None)
    stop.set()
    writer.join()
    table = catalog.load_table(name)
    ids = table.scan().to_arrow().column("id").to_pylist()
    assert sorted(ids) == sorted([unit.path for unit in UNITS] + ["foreign"] * foreign)
    assert len([each for each in table.snapshots() if each.summary and each.summary[PROPERTY]]) == 1


def test_response_of_the_catalog_is_lost(
    catalog: Catalog, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, sent = RestCatalog.commit_table, []

    def commit(self: RestCatalog, *arguments: Any) -> Any:
        done = original(self, *arguments)
        sent.append(1)
        if len(sent) == 1:
            raise CommitStateUnknownException("504 Gateway Timeout")
        return done

    name = f"{namespace(request)}.answers"
    destination = staged(f"iceberg:lake/{name}", UNITS)
    monkeypatch.setattr(RestCatalog, "commit_table", commit)
    destination.publish((unit.id for unit in UNITS), lambda: None)
    assert len(sent) == 1
    assert catalog.load_table(name).scan().to_arrow().num_rows == len(UNITS)


def test_wrong_credentials_and_missing_tables(
    catalog: Catalog, server: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert catalog.list_namespaces()
    destination = destination_at("iceberg:lake/nope.answers")
    destination.declare(lambda: result(UNITS[0]).table.schema)
    with pytest.raises(ScoringError, match=r"has no namespace nope .*pyiceberg --catalog lake create namespace nope"):
        destination.prepare()
    configure({**server.variables, "PYICEBERG_CATALOG__LAKE__CREDENTIAL": "seaweed-key:wrong"}, monkeypatch)
    with pytest.raises(ScoringError, match="refuses access"):
        destination_at("iceberg:lake/nope.answers").prepare()
