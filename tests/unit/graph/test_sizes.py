"""Sizes in bytes as people write them."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.text import read_size


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("123", 123), ("1.5k", 1536), ("500M", 500 << 20), (" 2TiB ", 2 << 40), ("7B", 7)]
)
def test_are_powers_of_1024(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "1 2", "1P", "1e3", "9" * 400])
def test_anything_else_is_none(text: str) -> None:
    assert read_size(text) is None
