"""Files of vectors: written whole or not at all, read as they were written, refused where they are something else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import FakeClient

from graphkiln.cli import vector_file
from graphkiln.cli.vector_file import Origin, VectorWriter, identify, replaced_file
from graphkiln_backend.graph.contract import Contract, Contracts
from graphkiln_backend.graph.errors import InvalidInput, ProtocolError
from graphkiln_backend.graph.preprocess import Preprocess

ORIGIN = Origin(model="m", version="3", contract="ab", graph="cd")
VECTORS = np.random.default_rng(1).normal(size=(11, 5)).astype(np.float32)


def write(path: Path, vectors: Any = VECTORS) -> None:
    with replaced_file(path) as file, VectorWriter(file, ORIGIN) as writer:
        for number, vector in enumerate(vectors):
            writer.add(Path(f"{number}.png"), vector)


def test_what_stands_in_the_file(tmp_path: Path) -> None:
    """As another reader of Parquet sees it."""
    write(tmp_path / "v.parquet")
    table = pq.read_table(tmp_path / "v.parquet")
    assert table.schema.field("vector").type == pa.list_(pa.float32(), 5)
    expected = {b"model": b"m", b"version": b"3", b"contract": b"ab", b"graph": b"cd"}
    assert table.schema.metadata == {b"graphkiln." + key: value for key, value in expected.items()}
    assert table.column("source").to_pylist() == [f"{number}.png" for number in range(11)]
    assert np.array_equal(np.array(table.column("vector").to_pylist(), np.float32), VECTORS)


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


def test_rows_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_file, "_PIECE_BYTES", 4 * 4 * 5)  # four vectors
    write(tmp_path / "v.parquet")
    assert pq.ParquetFile(tmp_path / "v.parquet").num_row_groups == 3


def test_the_newest_version_is_pinned_with_its_contract() -> None:
    client, contract = FakeClient(), Contract(preprocess=Preprocess(resize=4, crop=(4, 4)))
    assert identify(cast(Any, client), "m", "")[1] == Origin(model="m", version="", contract="")  # not published
    client.fake_model.versions = ["9", "10"]
    published = Contracts.of({"9": Contract(), "10": contract}).to_json()
    client.fake_model.config = {"parameters": {"contracts": {"string_value": published}}}
    _, origin = identify(cast(Any, client), "m", "")
    assert origin == Origin(model="m", version="10", contract=contract.digest)
    assert client.models_opened[-1] == ("m", "10")
    assert identify(cast(Any, client), "m", "9")[1] == Origin(model="m", version="9", contract=Contract().digest)
