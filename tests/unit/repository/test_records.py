"""Files of recorded requests: found, read, removed."""

from __future__ import annotations

import time
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from recorded import numbered, rows, write_record

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.repository import records
from graphkiln_backend.repository.records import Record, file_name, is_record, remove_leftovers, remove_old
from graphkiln_backend.system.locks import lock_shared


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Requests of the models `a` and `b`."""
    for model in ("a", "b"):
        write_record(tmp_path / "record", numbered(40), model=model)
    return tmp_path / "record"


def test_requests_of_a_model_by_each_path(record: Path) -> None:
    (file,) = (record / "a").iterdir()
    for path, model in ((record, "a"), (record / "a", ""), (record / "a", "other"), (file, "")):
        assert is_record(path)
        assert {row.model for row in rows(path, model)} == {"a"}
        assert Record.find(path, model).count() == 40


def test_the_only_model_needs_no_name(tmp_path: Path) -> None:
    write_record(tmp_path, numbered(1))
    assert rows(tmp_path, "renamed")[0].model == "m"


@pytest.mark.parametrize(("model", "words"), [("", "several models.*a, b"), ("aa", "none of 'aa'.*did you mean")])
def test_several_models(record: Path, model: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Record.find(record, model)


def test_chosen_positions(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(record, numbered(40), model="a")  # a second file
    monkeypatch.setattr(records, "_ROWS_AT_A_TIME", 7)
    found = Record.find(record, "a").requests([0, 8, 39, 40, 79])
    assert [row.request_id for row in found] == ["0", "8", "39", "0", "39"]


def test_row_groups_without_a_chosen_request_are_not_read(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_rows", lambda *_: pytest.fail("read"))
    assert list(Record.find(record, "a").requests([])) == []


def test_folder_without_records(tmp_path: Path) -> None:
    assert not is_record(tmp_path)
    with pytest.raises(InvalidInput, match=r"holds no recorded requests.*--record"):
        Record.find(tmp_path)


def test_file_that_is_no_record(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1]}), tmp_path / "other.parquet")
    assert not is_record(tmp_path), "such as that of a data set of images"
    with pytest.raises(InvalidInput, match=r"other.parquet is no record"):
        Record.find(tmp_path).count()


def test_damaged_files_are_named(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).random(10_000)  # stored as it is: only the checksum of the page shows the damage
    write_record(tmp_path, [({"x": noise}, {})])
    (file,) = (tmp_path / "m").iterdir()
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(InvalidInput, match=rf"{file.name} cannot be read"):
        rows(tmp_path)
    file.write_bytes(content[:-20])
    with pytest.raises(InvalidInput, match=rf"{file.name} cannot be read"):
        Record.find(tmp_path).count()


def test_file_that_is_removed_meanwhile_is_left_out(record: Path) -> None:
    write_record(record, numbered(1), model="a")
    found = Record.find(record / "a")
    found.files[0].unlink()
    assert found.count() == len(list(found.requests())) != 41


def test_other_readers(record: Path) -> None:
    table = pq.read_table(record)
    assert (table.num_rows, table.schema.field("time").type) == (80, pa.timestamp("ns", "UTC"))
    query = """SELECT count(*), min(inputs[1].name), max(octet_length(outputs[1].data)), max(outputs[1].shape)
        FROM read_parquet(?) WHERE time > now() - INTERVAL 1 HOUR AND model = 'a'"""
    assert duckdb.execute(query, [f"{record}/*/*.parquet"]).fetchall() == [(40, "x", 12, [1, 3])]


class TestRemoval:
    def add(self, folder: Path, age_s: float, chance: str = "0" * 8) -> Path:
        (folder / "m").mkdir(exist_ok=True)
        path = folder / "m" / file_name(time.time() - age_s, chance)
        path.write_bytes(bytes(100))
        return path

    def test_old_files(self, tmp_path: Path) -> None:
        files = [self.add(tmp_path, age) for age in (5000, 3700, 3500, 0)]
        remove_old(tmp_path, keep_s=3600, keep_bytes=10_000, now_s=time.time())
        assert [file.exists() for file in files] == [False, False, True, True]

    def test_oldest_files_of_all_models_beyond_a_size(self, tmp_path: Path) -> None:
        files = [self.add(tmp_path, age) for age in (400, 300, 200, 100)]
        (tmp_path / "other").mkdir()
        moved = files[1].rename(tmp_path / "other" / files[1].name)
        remove_old(tmp_path, keep_s=1e6, keep_bytes=250, now_s=time.time())
        assert [file.exists() for file in (files[0], moved, files[2], files[3])] == [False, False, True, True]

    def test_files_of_others_stay(self, tmp_path: Path) -> None:
        (tmp_path / "m").mkdir()
        others = [tmp_path / "m" / name for name in ("part-0.parquet", ".20200101T000000Z-00000000.parquet.x", "a")]
        others.append(tmp_path / file_name(0, "0" * 8))
        for other in others:
            other.write_bytes(bytes(1000))
        remove_old(tmp_path, keep_s=1, keep_bytes=1, now_s=time.time())
        remove_leftovers(tmp_path)
        assert all(other.exists() for other in others)

    def test_remains_of_a_dead_writer(self, tmp_path: Path) -> None:
        (tmp_path / "m").mkdir()
        dead, alive = (tmp_path / "m" / f".{number}.parquet.partial" for number in (1, 2))
        dead.write_bytes(b"")
        with alive.open("wb") as file:
            lock_shared(file)
            remove_leftovers(tmp_path)
            assert (dead.exists(), alive.exists()) == (False, True)


def test_text_and_bf16_come_back(tmp_path: Path) -> None:
    words = np.array([[b"a", b""], ["ü", b"\xff"]], np.object_)
    write_record(tmp_path, [({"words": words}, {"y": np.float32(2).reshape(())})])
    (row,) = rows(tmp_path)
    assert row.inputs is not None
    assert row.inputs["words"].tolist() == [[b"a", b""], ["ü".encode(), b"\xff"]]
    assert row.outputs["y"].shape == ()
