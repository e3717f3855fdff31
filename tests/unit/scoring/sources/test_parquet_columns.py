"""Which column is the image, and which can name rows."""

from __future__ import annotations

import pyarrow as pa
import pytest

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.sources.base import Columns
from graphkiln_backend.scoring.sources.parquet import ImageColumn, as_ids, find_image_column

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


@pytest.mark.parametrize("kind", [pa.binary_view(), pa.dictionary(pa.int32(), pa.binary())])
def test_bytes_of_every_kind_are_images(kind: pa.DataType) -> None:
    assert find({"n": pa.int64(), "jpg": kind}) == ImageColumn(name="jpg", is_path=False, is_struct=False)


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())])
def test_text_of_every_kind_names_images_and_rows(kind: pa.DataType) -> None:
    column = find({"path": kind}, "path")
    assert column.is_path
    paths = pa.array(["a", "b", "a"], kind)
    assert [column.value(paths, index) for index in range(3)] == [(None, "a"), (None, "b"), (None, "a")]
    assert as_ids(paths, "path", "file") == ["a", "b", "a"]


def test_a_dictionary_may_hold_nothing() -> None:
    empty = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["a", None]))
    with pytest.raises(ScoringError, match="is empty in some"):
        as_ids(empty, "n", "file")


def test_of_two_columns_of_one_name_none_is_meant() -> None:
    schema = pa.schema([("image", pa.binary()), ("image", pa.int64()), ("n", pa.int64()), ("n", pa.int64())])
    for columns in (Columns(), Columns(image="image"), Columns(image="image", kept=("n",))):
        with pytest.raises(ScoringError, match="two columns of one name: 'image'"):
            find_image_column(schema, columns, "file")
    other = pa.schema([("image", pa.binary()), ("n", pa.int64()), ("n", pa.int64())])
    assert find_image_column(other, Columns(), "file").name == "image"
    with pytest.raises(ScoringError, match="two columns of one name: 'n'"):
        find_image_column(other, Columns(kept=("n",)), "file")
