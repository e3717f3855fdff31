"""Files of vectors: written whole or not at all, read as they were written, refused where they are something else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from graphkiln.cli import vector_file
from graphkiln.cli.vector_file import VectorWriter, open_vectors, replaced_file
from graphkiln.cli.vector_origin import Origin
from graphkiln_backend.graph.errors import InvalidInput, ManifestError, ProtocolError

ORIGIN = Origin(model="m", version="3", contract="ab", graph="cd")
VECTORS = np.random.default_rng(1).normal(size=(11, 5)).astype(np.float32)


def write(path: Path, vectors: Any = VECTORS) -> None:
    with replaced_file(path) as file, VectorWriter(file, ORIGIN) as writer:
        for number, vector in enumerate(vectors):
            writer.add(Path(f"{number}.png"), vector)


def write_table(path: Path, metadata: dict[str, str] | None = None, **columns: Any) -> None:
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), path)


def test_what_stands_in_the_file(tmp_path: Path) -> None:
    """As another reader of Parquet sees it."""
    write(tmp_path / "v.parquet")
    table = pq.read_table(tmp_path / "v.parquet")
    assert table.schema.field("vector").type == pa.list_(pa.float32(), 5)
    expected = {b"model": b"m", b"version": b"3", b"contract": b"ab", b"graph": b"cd"}
    assert table.schema.metadata == {b"graphkiln." + key: value for key, value in expected.items()}
    assert table.column("source").to_pylist() == [f"{number}.png" for number in range(11)]
    assert np.array_equal(np.array(table.column("vector").to_pylist(), np.float32), VECTORS)


def test_is_written_and_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_file, "_PIECE_BYTES", 4 * 4 * 5)  # four vectors
    write(tmp_path / "v.parquet")
    assert pq.ParquetFile(tmp_path / "v.parquet").num_row_groups == 3
    monkeypatch.setattr(vector_file, "_PIECE_BYTES", 3 * 4 * 5)
    with open_vectors(tmp_path / "v.parquet") as file:
        assert (file.origin, file.features) == (ORIGIN, 5)
        chunks = list(file.chunks())
    assert [len(sources) for sources, _ in chunks] == [len(vectors) for _, vectors in chunks]
    assert max(len(sources) for sources, _ in chunks) <= 3
    assert np.array_equal(np.concatenate([vectors for _, vectors in chunks]), VECTORS)


def test_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    with replaced_file(tmp_path / "v") as file, VectorWriter(file, ORIGIN) as writer:
        writer.add(Path(os.fsdecode(b"\xff.png")), VECTORS[0])
    assert pq.read_table(tmp_path / "v").column("source").to_pylist() == ["\\xff.png"]


@pytest.mark.parametrize("vectors", [[VECTORS[0], VECTORS[0, :4]], [VECTORS[0, :0]]])
def test_vectors_of_other_lengths(tmp_path: Path, vectors: Any) -> None:
    with pytest.raises(ProtocolError, match="features"):
        write(tmp_path / "v", vectors)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_after_an_error_or_ctrl_c_nothing_has_changed(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "v.parquet"
    path.write_bytes(b"old")

    def interrupted() -> Any:
        yield VECTORS[0]
        raise error

    with pytest.raises(error):
        write(path, interrupted())
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_readers_see_the_old_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "v.parquet"
    path.write_bytes(b"old")
    with replaced_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "v")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "v").is_file()


def test_where_no_file_can_be(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "v", tmp_path / ("n" * 300), Path("/dev/null")):
        with pytest.raises(InvalidInput, match="cannot write"), replaced_file(path):
            pass
    assert Path("/dev/null").is_char_device()


def test_files_of_something_else(tmp_path: Path) -> None:
    lists = pa.array(VECTORS.tolist(), pa.list_(pa.float32()))
    fixed = pa.array(VECTORS.tolist(), pa.list_(pa.float32(), 5))
    doubles = pa.array(VECTORS.tolist(), pa.list_(pa.float64(), 5))
    halves = pa.array([row.astype(np.float16) for row in VECTORS], pa.list_(pa.float16(), 5))
    names = [str(number) for number in range(11)]
    (tmp_path / "junk").write_bytes(b"no Parquet")
    (tmp_path / "empty").write_bytes(b"")
    write(tmp_path / "whole")
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:-20])
    write_table(tmp_path / "list", ORIGIN.to_metadata(), source=names, vector=lists)
    write_table(tmp_path / "double", ORIGIN.to_metadata(), source=names, vector=doubles)
    write_table(tmp_path / "half", ORIGIN.to_metadata(), source=names, vector=halves)
    write_table(tmp_path / "number", ORIGIN.to_metadata(), source=list(range(11)), vector=fixed)
    write_table(tmp_path / "other", ORIGIN.to_metadata(), answer=names)
    write_table(tmp_path / "nobody", None, source=names, vector=fixed)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    wrong = [each for each in sorted(tmp_path.iterdir()) if each.name != "whole"]
    for path in [*wrong, tmp_path / "none"]:
        with pytest.raises(ManifestError, match=str(path)), open_vectors(path):
            pass


def test_rows_that_are_not_whole(tmp_path: Path) -> None:
    rows = VECTORS.tolist()
    for name, source, vectors, said in (
        ("source", None, rows[0], "it has rows without"),
        ("vector", "a", None, ""),  # refused by Arrow's own reader where it makes lists of one length
        ("element", "a", [None, *rows[0][1:]], "it has rows without"),
    ):
        column = pa.array([rows[1], vectors], pa.list_(pa.float32(), 5))
        write_table(tmp_path / name, ORIGIN.to_metadata(), source=pa.array(["b", source], pa.string()), vector=column)
        with (
            open_vectors(tmp_path / name) as file,
            pytest.raises(ManifestError, match=f"{name}.*{said}"),
        ):
            list(file.chunks())


def test_damage_within_the_file_is_told_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "v"
    write(path)
    content = bytearray(path.read_bytes())
    content[4:200] = b"\xff" * 196
    path.write_bytes(content)
    with open_vectors(path) as file, pytest.raises(ManifestError, match=f"{path} cannot be read as Parquet"):
        list(file.chunks())


def test_errors_of_what_is_done_with_the_file_stay_as_they_are(tmp_path: Path) -> None:
    write(tmp_path / "v")
    with pytest.raises(BrokenPipeError), open_vectors(tmp_path / "v"):
        raise BrokenPipeError
