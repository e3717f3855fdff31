"""Which column is the image, and which can name rows."""

from __future__ import annotations

import pyarrow as pa
import pytest

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.sources.parquet_columns import ImageColumn, as_ids, find_image_column
from graphkiln_backend.scoring.sources.reader import Columns

STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def find(columns: dict[str, pa.DataType], image: str = "") -> ImageColumn:
    return find_image_column(pa.schema(list(columns.items())), Columns(image=image), "file")


def test_the_only_column_of_bytes_is_found() -> None:
    assert find({"n": pa.int64(), "jpg": pa.large_binary()}).name == "jpg"
    assert find({"n": pa.int64(), "image": STRUCT}) == ImageColumn(name="image", is_path=False, is_struct=True)


def test_a_named_column_may_hold_paths() -> None:
    assert find({"n": pa.int64(), "path": pa.string(), "jpg": pa.binary()}, "path").is_path


def test_what_is_not_clear_is_asked() -> None:
    for columns, message in (({"path": pa.string()}, "no column"), ({"a": pa.binary(), "b": STRUCT}, "2 columns")):
        with pytest.raises(ScoringError, match=f"{message} of image bytes.*--image-column"):
            find(columns)
    with pytest.raises(ScoringError, match="of int64 holds no images"):
        find({"n": pa.int64()}, "n")
    with pytest.raises(ScoringError, match=r"no column 'x' \(it has n\)"):
        find({"n": pa.int64()}, "x")


def test_values() -> None:
    structs = pa.array([{"bytes": b"1", "path": None}, {"bytes": None, "path": "a"}, None], STRUCT)
    column = ImageColumn(name="image", is_path=False, is_struct=True)
    assert [column.value(structs, index) for index in range(3)] == [(b"1", None), (None, "a"), (None, None)]


@pytest.mark.parametrize(
    "ids",
    [pa.array([1, 2]), pa.array(["1", "2"]), pa.array(["1", "2"]).dictionary_encode(), pa.array([1, 2], pa.uint8())],
)
def test_text_and_integers_name_rows(ids: pa.Array) -> None:
    assert as_ids(ids, "n", "file") == ["1", "2"]


def test_nothing_else_does() -> None:
    with pytest.raises(ScoringError, match="column 'n' of double cannot name rows"):
        as_ids(pa.array([1.0]), "n", "file")
    with pytest.raises(ScoringError, match="is empty in some"):
        as_ids(pa.array(["a", None]), "n", "file")
