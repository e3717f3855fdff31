"""Files of each kind in a bucket of an S3 server: outages and replaced objects."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faulty_proxy import DENY, REFUSE, FaultyProxy
from object_store import CREDENTIALS, ObjectStore
from scored_inputs import files_source, ids_of, plan, read_all, read_unit, write_tar

from graphkiln_backend.scoring.errors import InputChanged, ScoringError, SourceUnavailable
from graphkiln_backend.scoring.sources.places import locate

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with pytest.MonkeyPatch.context() as patch, ObjectStore() as running:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield running


@pytest.fixture
def bucket(store: ObjectStore) -> Any:
    made = store.bucket("bucket")
    made.objects.delete()
    for key in ("photos/a/1.jpg", "photos/a/2.jpg", "photos/b.png", "photos/.hidden/c.jpg", "photos/a/", "other.jpg"):
        made.put_object(Key=key, Body=key.encode())
    return made


def address(store: ObjectStore, path: str) -> str:
    return f"s3://{store.address}/bucket/{path}"


@pytest.mark.usefixtures("bucket")
def test_images_below_a_prefix(store: ObjectStore) -> None:
    rows = read_all(files_source(address(store, "photos/")))
    assert [row.id for row in rows] == ["a/1.jpg", "a/2.jpg", "b.png"]
    assert [row.content for row in rows] == [f"photos/{row.id}".encode() for row in rows]
    assert ids_of(files_source(address(store, "photos/**/*.jpg"))) == ["a/1.jpg", "a/2.jpg"]
    assert ids_of(files_source(address(store, "other.jpg"))) == ["other.jpg"]
    with pytest.raises(ScoringError, match="no such file"):
        plan(files_source(address(store, "none")))


def test_replaced_object_fails_its_unit_and_is_planned_again(store: ObjectStore, bucket: Any) -> None:
    source = files_source(address(store, "photos"))
    (unit,) = plan(source, 10**9)
    bucket.put_object(Key="photos/b.png", Body=b"new")
    with pytest.raises(InputChanged, match="has been replaced"):
        read_unit(source, unit)
    bucket.delete_objects(Delete={"Objects": [{"Key": "photos/a/1.jpg"}]})
    with pytest.raises(InputChanged, match="was deleted"):
        read_unit(source, unit)
    (again,) = plan(source, 10**9)
    assert [row.content for row in read_unit(source, again)] == [b"photos/a/2.jpg", b"new"]


def test_listing_in_a_bucket(store: ObjectStore, bucket: Any) -> None:
    none = f"s3://{store.address}/no bucket is called so/a.jpg"
    lines = ["photos/b.png", address(store, "other.jpg"), "photos/none.jpg", address(store, "nothing/there.jpg"), none]
    bucket.put_object(Key="all.txt", Body="\n".join(lines).encode())
    source = files_source(address(store, "all.txt"))
    rows = read_all(source, 1)
    assert [row.content for row in rows] == [b"photos/b.png", b"other.jpg", None, None, None]
    assert "Invalid bucket name" in rows[4].error
    assert "no such object: bucket/photos/none.jpg" in rows[2].error
    (unit, *_) = plan(source, 10**9)
    bucket.put_object(Key="all.txt", Body=b"another.jpg")
    with pytest.raises(InputChanged):
        read_unit(source, unit)


def test_parquet(store: ObjectStore, bucket: Any) -> None:
    content = io.BytesIO()
    pq.write_table(pa.table({"image": [b"%d" % number for number in range(50)]}), content, row_group_size=20)
    for name in ("p/a.parquet", "p/b.parquet"):
        bucket.put_object(Key=name, Body=content.getvalue())
    source = files_source(address(store, "p"))
    rows = read_all(source, 10)
    assert [row.id for row in rows] == [f"{name}.parquet:{number}" for name in "ab" for number in range(50)]
    assert [row.content for row in rows] == [b"%d" % number for number in [*range(50)] * 2]
    unit = plan(source, 10)[0]
    bucket.put_object(Key="p/a.parquet", Body=content.getvalue() + b" ")
    with pytest.raises(InputChanged):
        read_unit(source, unit)


def test_tars(store: ObjectStore, bucket: Any, tmp_path: Any) -> None:
    write_tar(tmp_path / "s.tar", {"1.jpg": b"one", "1.cls": b"7", "2.jpg": b"two"})
    bucket.upload_file(str(tmp_path / "s.tar"), "t/s.tar")
    source = files_source(address(store, "t"), kept=("cls",))
    assert [(row.id, row.content, row.kept["cls"]) for row in read_all(source)] == [
        ("s.tar/1", b"one", "7"), ("s.tar/2", b"two", None),
    ]  # fmt: skip
    (unit,) = plan(source, 10**9)
    bucket.put_object(Key="t/s.tar", Body=b"new")
    with pytest.raises(InputChanged):
        read_unit(source, unit)


@pytest.mark.usefixtures("bucket")
def test_unavailable_store_is_an_outage(store: ObjectStore) -> None:
    source = files_source(address(store, "photos"))
    (unit,) = plan(source, 10**9)
    store.stop()
    try:
        with pytest.raises(SourceUnavailable, match="cannot be reached"):
            read_unit(source, unit)
        with pytest.raises(SourceUnavailable):
            plan(source)
    finally:
        store.start()
    assert [row.error for row in read_unit(source, unit)] == [""] * 3


def test_keys_with_special_characters(store: ObjectStore, bucket: Any) -> None:
    content = io.BytesIO()
    pq.write_table(pa.table({"image": [b"one"]}), content)
    names = ["#1.jpg", "%2F.jpg", "50% off.jpg", "a+b&c=d;e.jpg", "quote'\".jpg", "what?.jpg", "[1].jpg", "ü @v1.jpg"]
    for name in names:
        bucket.put_object(Key=f"odd/{name}", Body=name.encode())
        bucket.put_object(Key=f"tables/{name}.parquet", Body=content.getvalue())
    rows = read_all(files_source(address(store, "odd")))
    assert {row.id: row.content for row in rows} == {name: name.encode() for name in names}
    assert [row.content for row in read_all(files_source(address(store, "tables")))] == [b"one"] * len(names)
    bucket.put_object(Key="all.txt", Body="\n".join(f"odd/{name}" for name in names).encode())
    rows = read_all(files_source(address(store, "all.txt")))
    assert [row.content for row in rows] == [name.encode() for name in names]
    for name in names:
        assert ids_of(files_source(address(store, f"odd/{name}"))) == [name]


def test_store_that_becomes_unavailable_within_a_file_is_an_outage(
    store: ObjectStore, bucket: Any, tmp_path: Any
) -> None:
    content = io.BytesIO()
    pq.write_table(pa.table({"image": [bytes(4000)] * 6000}), content, compression="none", use_dictionary=False)
    bucket.put_object(Key="p/a.parquet", Body=content.getvalue())
    write_tar(tmp_path / "s.tar", {"1.jpg": bytes(9 << 20), "2.jpg": b"two"})
    bucket.upload_file(str(tmp_path / "s.tar"), "t/s.tar")
    parquet = files_source(address(store, "p"))
    rows = parquet.rows(plan(parquet, 10**9)[0])
    next(rows)
    with locate(address(store, "t/s.tar")).storage.open("bucket/t/s.tar") as tar:
        tar.read(512)
        store.stop()
        try:
            with pytest.raises(SourceUnavailable, match="cannot be reached"):
                list(rows)
            tar.seek(9 << 20)
            with pytest.raises(SourceUnavailable, match="cannot be reached"):
                tar.read(512)
        finally:
            store.start()
    assert len(read_unit(parquet, plan(parquet, 10**9)[0])) == 6000


@pytest.mark.usefixtures("bucket")
def test_object_replaced_while_it_is_read_is_noticed(store: ObjectStore, bucket: Any) -> None:
    content = io.BytesIO()
    pq.write_table(pa.table({"image": [bytes(4000)] * 6000}), content, compression="none", use_dictionary=False)
    bucket.put_object(Key="p/a.parquet", Body=content.getvalue())
    source = files_source(address(store, "p"))
    rows = source.rows(plan(source, 10**9)[0])
    next(rows)
    bucket.put_object(Key="p/a.parquet", Body=content.getvalue()[::-1])
    with pytest.raises(InputChanged):
        list(rows)


@pytest.mark.usefixtures("bucket")
def test_denied_object_is_a_row_error_and_a_busy_store_an_outage(store: ObjectStore) -> None:
    with FaultyProxy(store.address) as proxy:
        faults = {"b.png": DENY}
        proxy.fault = lambda method, path: (
            faults.get(path.split("?")[0].rpartition("/")[2]) if method == "GET" else None
        )
        source = files_source(f"s3://{proxy.address}/bucket/photos")
        (unit,) = plan(source, 10**9)
        rows = {row.id: row for row in read_unit(source, unit)}
        assert {name for name, row in rows.items() if row.error} == {"b.png"}
        assert "access is denied" in rows["b.png"].error
        faults["b.png"] = REFUSE
        with pytest.raises(SourceUnavailable, match=r"photos/b\.png"):
            read_unit(source, unit)
