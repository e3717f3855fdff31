"""`--input`: tensors from files and as JSON."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from graphkiln.cli.tensor_input import Literal, parse_inputs, to_array
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import InvalidInput


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    path = tmp_path / "sample.npy"
    np.save(path, np.arange(4, dtype=np.float32).reshape(1, 2, 2))
    return path


def read(text: str) -> tuple[str, Any]:
    """Parse a single tensor."""
    ((name, value),) = parse_inputs([text]).items()
    return name, value


def rows(dtype: DType, *shape: int) -> dict[str, dict[str, Any]]:
    return {"x": {"name": "x", "datatype": dtype.value, "shape": list(shape)}}


def made(value: Any, dtype: DType, *shape: int) -> Any:
    return to_array("x", Literal(value), rows(dtype, *shape))


class TestFiles:
    def test_name_and_array(self, sample: Path) -> None:
        name, array = read(f"X={sample.rename(sample.with_name('a=b.npy'))}")
        assert name == "X"
        np.testing.assert_array_equal(array, np.arange(4, dtype=np.float32).reshape(1, 2, 2))

    def test_dash_is_standard_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        file = io.BytesIO()
        np.save(file, np.array([b"ab", b"c"]))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.getvalue())))
        assert read("X=-")[1].tolist() == [b"ab", b"c"]

    def test_pickled_objects_are_refused(self, tmp_path: Path) -> None:
        np.save(tmp_path / "x.npy", np.array([{}], object), allow_pickle=True)
        with pytest.raises(InvalidInput, match=r"is not an \.npy file of numbers or strings"):
            read(f"X={tmp_path / 'x.npy'}")

    def test_archive_for_one_input_is_refused(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "x.npz", a=np.zeros(1))
        with pytest.raises(InvalidInput, match=r"holds several arrays.*one \.npy file for each input"):
            read(f"X={tmp_path / 'x.npz'}")

    def test_archive_for_all_inputs(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "x.npz", a=np.zeros(1), b=np.ones(2))
        assert {name: len(array) for name, array in parse_inputs([str(tmp_path / "x.npz")]).items()} == {"a": 1, "b": 2}
        with pytest.raises(InvalidInput, match="gives 'b' twice"):
            parse_inputs([str(tmp_path / "x.npz"), "b=[1]"])
        with pytest.raises(InvalidInput, match=r"none\.npz"):
            parse_inputs(["none.npz"])


class TestLiterals:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("x=[[1,2,3]]", [[1, 2, 3]]),
            ("x=3", 3),
            ("x=-1.5e3", -1500.0),
            ("x=true", True),
            ('x="a=b"', "a=b"),
            ("x=[]", []),
        ],
    )
    def test_json(self, text: str, value: Any) -> None:
        assert read(text) == ("x", Literal(value))

    def test_existing_file_takes_precedence(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        np.save(tmp_path / "3.npy", np.zeros(2))
        (tmp_path / "3.npy").rename(tmp_path / "3")
        assert read("x=3")[1].shape == (2,)

    def test_absurd_nesting(self) -> None:
        with pytest.raises(InvalidInput, match="nested too deeply"):
            read("x=" + "[" * 100_000)
        with pytest.raises(InvalidInput, match="more than 32 dimensions"):
            made(json.loads("[" * 40 + "1" + "]" * 40), DType.FP32, -1)

    @pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype not in (DType.BYTES, DType.BOOL)])
    def test_numeric_types(self, dtype: DType) -> None:
        array = made([[1, 2, 3]], dtype, -1, 3)
        assert array.dtype == dtype.numpy
        assert array.tolist() == [[1, 2, 3]]

    def test_strings_and_booleans(self) -> None:
        assert made(["a", "\u00e4"], DType.BYTES, -1).tolist() == [b"a", "\u00e4".encode()]
        assert made([True, False], DType.BOOL, 2).tolist() == [True, False]

    @pytest.mark.parametrize(
        ("value", "declared", "shape"),
        [
            (3, (-1,), (1,)),
            (3, (-1, 1), (1, 1)),
            (3, (), ()),
            ([1, 2, 3], (-1, 3), (1, 3)),
            ([[1, 2], [3, 4]], (-1, -1), (2, 2)),
            ([[1, 2], [3, 4]], (1, 1, 2, 2), (1, 1, 2, 2)),
            ([], (-1,), (0,)),
            ([[], []], (-1, -1), (2, 0)),
        ],
    )
    def test_leading_dimensions_may_be_omitted(
        self, value: Any, declared: tuple[int, ...], shape: tuple[int, ...]
    ) -> None:
        assert made(value, DType.INT32, *declared).shape == shape

    @pytest.mark.parametrize(
        ("value", "declared"), [(3, (2,)), ([1, 2], (-1, 3)), ([[1, 2, 3]], (3,)), ([1], (2, 1)), ([], (-1, 2))]
    )
    def test_wrong_shape(self, value: Any, declared: tuple[int, ...]) -> None:
        with pytest.raises(InvalidInput, match=r"input 'x' has shape \[.*\], but the model expects \["):
            made(value, DType.INT32, *declared)

    @pytest.mark.parametrize("value", [[[1], [1, 2]], [1, [2]], [[[1]], [1]]])
    def test_ragged_lists(self, value: Any) -> None:
        with pytest.raises(InvalidInput, match="same length"):
            made(value, DType.INT32, -1, -1)

    @pytest.mark.parametrize(
        ("value", "dtype", "words"),
        [
            (1.5, DType.INT32, "expected integers, got 1.5"),
            (True, DType.INT32, "expected integers, got true"),
            ("1", DType.FP32, 'expected numbers, got "1"'),
            (None, DType.FP32, "expected numbers, got null"),
            ({}, DType.BYTES, "expected strings in quotes"),
            (1, DType.BOOL, "expected true or false, got 1"),
            (1, DType.BYTES, "expected strings in quotes"),
            (256, DType.UINT8, "out of range"),
            (-1, DType.UINT64, "out of range"),
            (2**63, DType.INT64, "out of range"),
            (10**400, DType.FP64, "out of range"),
            (1e300, DType.FP32, "out of range"),
            (1e6, DType.FP16, "out of range"),
            (1e39, DType.BF16, "out of range"),
        ],
    )
    def test_wrong_type(self, value: Any, dtype: DType, words: str) -> None:
        with pytest.raises(InvalidInput, match=words):
            made(value, dtype, -1)

    def test_infinity(self) -> None:
        assert made([float("inf"), 1], DType.BF16, -1).dtype == ml_dtypes.bfloat16

    def test_unknown_input(self) -> None:
        with pytest.raises(InvalidInput, match=r"no input 'y'.*known: x"):
            to_array("y", Literal(1), rows(DType.FP32, -1))
