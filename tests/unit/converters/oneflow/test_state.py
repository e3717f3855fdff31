"""State tensors as flow.save writes them: a folder each, with elements in `out`, type and shape in `meta`."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.oneflow.translation import read_state


def save(folder: Path, array: AnyArray, kind: str, name: str = "t") -> Path:
    tensor = folder / name
    tensor.mkdir()
    (tensor / "out").write_bytes(array.tobytes())
    dims = "".join(f"  dim: {dim}\n" for dim in array.shape)
    (tensor / "meta").write_text(f"shape {{\n{dims}}}\ndata_type: {kind}\n")
    return tensor


def test_elements_are_mapped_and_cannot_be_written(tmp_path: Path) -> None:
    save(tmp_path, np.arange(6, dtype="f4").reshape(2, 3), "kFloat")
    tensor = read_state(tmp_path, "t")
    array = tensor.load()
    assert isinstance(array, np.memmap)
    np.testing.assert_array_equal(array, [[0, 1, 2], [3, 4, 5]])
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_bfloat16(tmp_path: Path) -> None:
    save(tmp_path, np.array([1.0, -2.5, 3e38], ml_dtypes.bfloat16), "kBFloat16")
    tensor = read_state(tmp_path, "t")
    assert tensor.dtype is DType.BF16
    np.testing.assert_array_equal(tensor.load(), np.array([1.0, -2.5, 3e38], ml_dtypes.bfloat16))


def test_elements_are_little_endian(tmp_path: Path) -> None:
    tensor = save(tmp_path, np.zeros(1, "i4"), "kInt32")
    (tensor / "out").write_bytes(b"\x01\x02\x00\x00")
    assert read_state(tmp_path, "t").load()[0] == 0x0201


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1)])
def test_scalars_and_empty_tensors(tmp_path: Path, shape: tuple[int, ...]) -> None:
    save(tmp_path, np.ones(shape, "f8"), "kDouble")
    tensor = read_state(tmp_path, "t")
    assert (tensor.name, tensor.shape, tensor.load().shape) == ("t", shape, shape)


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    (save(tmp_path, np.ones(2, "i1"), "kInt8") / "meta").write_text(
        'shape { dim: 2 } data_type: kInt8 placement: "cpu" memory { kind: 3 }'
    )
    assert read_state(tmp_path, "t").dtype is DType.INT8


@pytest.mark.parametrize(
    ("count", "problem"), [(0, "too short"), (23, "too short"), (25, "too long"), (48, "too long")]
)
def test_a_file_of_another_length(tmp_path: Path, count: int, problem: str) -> None:
    (save(tmp_path, np.zeros((2, 3), "f4"), "kFloat") / "out").write_bytes(bytes(count))
    message = rf"'t': .*out has {count} bytes, expected 24 for FP32 \[2, 3\]: it is {problem}"
    with pytest.raises(ConversionError, match=message):
        read_state(tmp_path, "t")


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ("", "names no data_type"),
        ("data_type: kInvalidDataType", "names no data_type"),
        ("data_type: kTensorBuffer", "cannot be read"),
        ("shape { dim: two } data_type: kFloat", "cannot be read"),
        ("shape { dim: 2", "cannot be read"),
        ("shape { dim: -2 dim: -3 } data_type: kFloat", r"has the shape \[-2, -3\]"),
        ("shape { dim: 99999999999999999999 } data_type: kFloat", "cannot be read"),
        ("\x00", "cannot be read"),
    ],
)
def test_damaged_meta(tmp_path: Path, meta: str, message: str) -> None:
    (save(tmp_path, np.zeros((2, 3), "f4"), "kFloat") / "meta").write_text(meta)
    with pytest.raises(ConversionError, match=f"state tensor 't': .*meta.* {message}"):
        read_state(tmp_path, "t")


@pytest.mark.parametrize("missing", ["out", "meta"])
def test_a_missing_file(tmp_path: Path, missing: str) -> None:
    (save(tmp_path, np.zeros(1, "f4"), "kFloat") / missing).unlink()
    with pytest.raises(ConversionError, match=f"there is no .*t/{missing}") as caught:
        read_state(tmp_path, "t")
    assert "incomplete" in caught.value.hint


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    tensor = save(tmp_path, np.zeros(1, "f4"), "kFloat")
    (tensor / "meta").unlink()
    (tensor / "meta").mkdir()
    with pytest.raises(ConversionError, match="meta cannot be read"):
        read_state(tmp_path, "t")


def test_a_missing_tensor_and_one_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("nowhere", "file"):
        with pytest.raises(ConversionError, match=f"'{name}': there is no .*{name}/meta"):
            read_state(tmp_path, name)


def test_a_tensor_that_was_never_registered_comes_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"m\.ab-FreeEagerTensor-1") as caught:
        read_state(tmp_path, "m.ab-FreeEagerTensor-1")
    assert "register_buffer()" in caught.value.hint


def test_an_unknown_file_beside_them(tmp_path: Path) -> None:
    (save(tmp_path, np.zeros(1, "f4"), "kFloat") / "out.tmp").write_bytes(b"")
    with pytest.raises(ConversionError, match=r"out\.tmp is unknown") as caught:
        read_state(tmp_path, "t")
    assert "remove the file" in caught.value.hint


@pytest.mark.parametrize("name", [".", "..", "../t", "a/t", "/etc", "t/"])
def test_a_name_never_leaves_the_folder(tmp_path: Path, name: str) -> None:
    save(tmp_path, np.zeros(1, "f4"), "kFloat")
    with pytest.raises(ConversionError, match="leads out of"):
        read_state(tmp_path, name)
