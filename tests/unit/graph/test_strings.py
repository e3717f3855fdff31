"""Text as plain arrays."""

from __future__ import annotations

import numpy as np
import pytest

from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.strings import as_text, is_text, pack_text, unpack_text


@pytest.mark.parametrize(
    "array", [np.array(["a", "ü"]), np.array([b"a", "ü".encode()]), np.array(["a", b"\xc3\xbc"], np.object_)]
)
def test_every_kind_of_text_becomes_str(array: np.ndarray) -> None:
    assert is_text(array)
    assert as_text(array).tolist() == ["a", "ü"]
    assert as_text(array).dtype == np.object_


def test_numbers_are_no_text() -> None:
    numbers = np.ones(3)
    assert as_text(numbers) is numbers
    assert not is_text(numbers)


def test_other_bytes_are_refused() -> None:
    with pytest.raises(UnicodeDecodeError):
        as_text(np.array([b"\xff"], np.object_))


def test_a_scalar_and_its_shape_come_back() -> None:
    content, lengths = pack_text(np.array("é\0", np.object_))
    assert content.tobytes() == "é\0".encode()
    found = unpack_text(content, lengths)
    assert found.shape == ()
    assert found.item() == "é\0"


def test_lengths_of_other_bytes_are_refused() -> None:
    with pytest.raises(ManifestError, match="lengths"):
        unpack_text(np.zeros(3, np.uint8), np.array([1]))
