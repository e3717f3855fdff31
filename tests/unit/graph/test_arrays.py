"""Arrays read from untrusted files."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest

from graphkiln_backend.graph import arrays
from graphkiln_backend.graph.arrays import as_text, is_text, pack_text, parse_npy, read_npz, unpack_text
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ManifestError


def npy(array: AnyArray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def header(shape: str) -> bytes:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def test_read_npz(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.arange(6).reshape(2, 3), y=np.zeros(0))
    found = read_npz(tmp_path / "a.npz")
    assert list(found) == ["x", "y"]
    np.testing.assert_array_equal(found["x"], np.arange(6).reshape(2, 3))


@pytest.mark.parametrize("name", ["f4", "i8", "U3"])
def test_native_byte_order(tmp_path: Path, name: str) -> None:
    expected = np.arange(6).astype(f"<{name}")
    np.savez(tmp_path / "a.npz", x=expected.astype(f">{name}"))
    for found in (read_npz(tmp_path / "a.npz")["x"], parse_npy(npy(expected.astype(f">{name}")))):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_bf16() -> None:
    bits = np.array([0x3F80, 0x4000], np.uint16)
    assert parse_npy(npy(bits.view("V2"))).astype(np.float32).tolist() == [1.0, 2.0]
    pairs = bits.view([("a", np.uint8), ("b", np.uint8)])
    assert parse_npy(npy(pairs)).dtype == pairs.dtype


def test_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npz")
    with pytest.raises(ManifestError, match="it is a pipe"):
        read_npz(tmp_path / "a.npz")


def test_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(1 << 20, np.uint8))
    assert read_npz(tmp_path / "a.npz")["x"].nbytes == 1 << 20
    monkeypatch.setattr(arrays, "_SMALL_BYTES", 1 << 19)
    with pytest.raises(ManifestError, match=r"KiB in it would become 1 MiB .*without compression"):
        read_npz(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", x=np.zeros(1 << 20, np.uint8))
    assert read_npz(tmp_path / "a.npz")["x"].nbytes == 1 << 20


@pytest.mark.parametrize(
    "content",
    [
        header("(1000000000000000,)"),
        header("(4,)"),
        header("(-1,)"),
        header("(" * 5000),
        header("x"),
        b"no array",
        npy(np.array([{}])),
    ],
)
def test_damaged_members(tmp_path: Path, content: bytes) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", content)
    with pytest.raises(ManifestError) as caught:
        read_npz(tmp_path / "a.npz")
    assert str(caught.value)
    with pytest.raises(ManifestError):
        parse_npy(content)


def test_unsupported_compression(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", npy(np.zeros(3)))
    whole = (tmp_path / "a.npz").read_bytes()
    for offset, value in ((6, 1), (8, 99)):  # flags and method: of the member, and of the directory
        damaged = bytearray(whole)
        damaged[offset] = damaged[whole.rindex(b"PK\x01\x02") + offset + 2] = value
        (tmp_path / "a.npz").write_bytes(damaged)
        with pytest.raises(ManifestError):
            read_npz(tmp_path / "a.npz")


def test_npy_in_place_of_npz(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(npy(np.zeros(3)))
    with pytest.raises(ManifestError, match=r"one array without a name \(use numpy\.savez"):
        read_npz(tmp_path / "a.npz")


def test_parse_npy() -> None:
    np.testing.assert_array_equal(parse_npy(npy(np.arange(3))), np.arange(3))
    several = io.BytesIO()
    np.savez(several, x=np.zeros(1))
    with pytest.raises(ManifestError, match="it holds several arrays"):
        parse_npy(several.getvalue())


# Text as plain arrays.


@pytest.mark.parametrize(
    "array", [np.array(["a", "ü"]), np.array([b"a", "ü".encode()]), np.array(["a", b"\xc3\xbc"], np.object_)]
)
def test_text_becomes_str(array: np.ndarray) -> None:
    assert is_text(array)
    assert as_text(array).tolist() == ["a", "ü"]
    assert as_text(array).dtype == np.object_


def test_numbers_are_not_text() -> None:
    numbers = np.ones(3)
    assert as_text(numbers) is numbers
    assert not is_text(numbers)


def test_text_that_is_not_utf8() -> None:
    with pytest.raises(UnicodeDecodeError):
        as_text(np.array([b"\xff"], np.object_))


def test_packed_scalar() -> None:
    content, lengths = pack_text(np.array("é\0", np.object_))
    assert content.tobytes() == "é\0".encode()
    found = unpack_text(content, lengths)
    assert found.shape == ()
    assert found.item() == "é\0"


def test_lengths_that_do_not_match() -> None:
    with pytest.raises(ManifestError, match="lengths"):
        unpack_text(np.zeros(3, np.uint8), np.array([1]))
