"""Delta Lake tables as sources."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from scored_inputs import files_source, plan, read_all

from graphkiln_backend.scoring.errors import ScoringError


def append(folder: Path, *numbers: int, **options: Any) -> None:
    columns = {"image": [b"%d" % number for number in numbers], "n": list(numbers)}
    columns["shop"] = [f"Käse & Co {number % 2}" for number in numbers]
    write_deltalake(folder, pa.table(columns), **{"mode": "append", **options})


def images(text: Path | str) -> list[bytes | None]:
    return sorted(row.content or b"" for row in read_all(files_source(text, id="n"), 100))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    append(tmp_path / "photos", 1, 2)
    append(tmp_path / "photos", 3)
    return tmp_path / "photos"


def test_newest_or_named_version_is_read(folder: Path) -> None:
    append(folder, 4, 5, mode="overwrite")
    assert len(list(folder.glob("*.parquet"))) == 3, "the older files are still there"
    assert images(folder) == [b"4", b"5"]
    assert images(f"{folder}@v1") == [b"1", b"2", b"3"]
    assert images(f"{folder}@v0") == [b"1", b"2"]
    assert images(f"{folder}/**/*.parquet") == [b"1", b"2", b"3", b"4", b"5"]


def test_appended_rows_are_new_units(folder: Path) -> None:
    before = {unit.id for unit in plan(files_source(folder))}
    append(folder, 4)
    after = {unit.id for unit in plan(files_source(folder))}
    assert before < after
    assert len(after - before) == 1
    DeltaTable(folder).optimize.compact()
    assert not before & {unit.id for unit in plan(files_source(folder))}
    assert {unit.id for unit in plan(files_source(f"{folder}@v1"))} == before, "by its version the run goes on"


def test_deleted_rows_are_not_read(folder: Path) -> None:
    DeltaTable(folder).delete("n = 2")
    assert images(folder) == [b"1", b"3"]


def test_partitioned_table(tmp_path: Path) -> None:
    append(tmp_path / "photos", 1, 2, 3, partition_by=["shop"])
    assert images(tmp_path / "photos") == [b"1", b"2", b"3"]
    with pytest.raises(ScoringError, match="has no column 'shop'"):
        plan(files_source(tmp_path / "photos", kept=("shop",)))


def test_folder_with_a_version_in_its_name(folder: Path) -> None:
    folder.rename(folder.with_name("photos@v7"))
    assert images(folder.with_name("photos@v7")) == [b"1", b"2", b"3"]
    with pytest.raises(ScoringError, match="no such file"):
        plan(files_source(f"{folder}@v1"))


def test_missing_versions_files_and_logs_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ScoringError, match=r"cannot be read at version 9: .*name a version"):
        plan(files_source(f"{folder}@v9"))
    gone = min(folder.glob("*.parquet"))
    gone.unlink()
    with pytest.raises(ScoringError, match=rf"version 1 of the Delta .*1 files that are gone, such as {gone.name}"):
        plan(files_source(folder))
    append(tmp_path / "empty", 1)
    DeltaTable(tmp_path / "empty").delete()
    with pytest.raises(ScoringError, match=r"version 1 of the Delta table .* has no rows"):
        plan(files_source(tmp_path / "empty"))
    (tmp_path / "odd" / "_delta_log").mkdir(parents=True)
    (tmp_path / "odd" / "_delta_log" / f"{0:020}.json").write_bytes(b"{}")
    with pytest.raises(ScoringError, match=r"the log of the Delta table .*/odd cannot be read: "):
        plan(files_source(tmp_path / "odd"))


DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def z85(content: bytes) -> str:
    """Source: ZeroMQ's RFC 32."""
    words = struct.unpack(f">{len(content) // 4}I", content)
    return "".join(DIGITS[word // 85**place % 85] for word in words for place in (4, 3, 2, 1, 0))


# Rows 3 and 4. Source: "RoaringFormatSpec", one container of numbers.
BITMAP = struct.pack("<IIHHI2H", 12346, 1, 0, 1, 16, 3, 4)
INLINE = struct.pack("<IQI", 1681511377, 1, 0) + BITMAP
# Source: the Delta transaction protocol, "Deletion Vectors".
MARKS = {"storageType": "i", "pathOrInlineDv": z85(INLINE), "sizeInBytes": len(INLINE), "cardinality": 2}


def write_log(
    folder: Path, features: list[str], configuration: dict[str, str], marks: dict[str, object] | None
) -> Path:
    """A table of thirty rows as Spark writes one, with features that deltalake does not write."""
    (folder / "_delta_log").mkdir(parents=True)
    pq.write_table(pa.table({"image": [b"%d" % number for number in range(30)]}), folder / "a.parquet")
    schema = {"type": "struct", "fields": [{"name": "image", "type": "binary", "nullable": True, "metadata": {}}]}
    size = (folder / "a.parquet").stat().st_size
    add: dict[str, object] = {"path": "a.parquet", "partitionValues": {}, "size": size, "modificationTime": 0}
    add |= {"dataChange": True, "stats": '{"numRecords": 30}'} | ({"deletionVector": marks} if marks else {})
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": features, "writerFeatures": features}
    metadata = {"id": "1", "format": {"provider": "parquet", "options": {}}, "schemaString": json.dumps(schema)}
    metadata |= {"partitionColumns": [], "configuration": configuration, "createdTime": 0}
    lines = [{"protocol": protocol}, {"metaData": metadata}, {"add": add}]
    (folder / "_delta_log" / f"{0:020}.json").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_deletion_vectors_are_refused(tmp_path: Path) -> None:
    marked = write_log(tmp_path / "marked", ["deletionVectors"], {"delta.enableDeletionVectors": "true"}, MARKS)
    with pytest.raises(ScoringError, match=r"rows that are deleted by marks .*REORG TABLE"):
        plan(files_source(marked))
    whole = write_log(tmp_path / "whole", ["deletionVectors"], {"delta.enableDeletionVectors": "true"}, None)
    assert sum(unit.rows for unit in plan(files_source(whole))) == 30


def test_mapped_columns_are_refused(tmp_path: Path) -> None:
    mapped = write_log(tmp_path / "mapped", ["columnMapping"], {"delta.columnMapping.mode": "name"}, None)
    with pytest.raises(ScoringError, match=r"columnMapping|cannot be read"):
        plan(files_source(mapped))


def test_unknown_reader_features_are_refused(tmp_path: Path) -> None:
    new = write_log(tmp_path / "new", ["rowsInReverse"], {}, None)
    with pytest.raises(ScoringError, match=r"rowsInReverse|cannot be read"):
        plan(files_source(new))
