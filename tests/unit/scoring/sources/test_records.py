"""Records are found with their bytes, in blocks of any size."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.sources import listing as records
from graphkiln_backend.scoring.sources.listing import Block, read_blocks

FIELD = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=5)


def blocks_of(content: bytes, size: int = 7, *, quoted: bool = False) -> list[Block]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_BLOCK", size)
        return list(read_blocks(io.BytesIO(content), "listing", quoted=quoted))


@given(content=st.binary(max_size=80).filter(lambda content: b"\0" not in content), size=st.integers(1, 30))
def test_blocks_are_the_file_and_records_are_its_lines(content: bytes, size: int) -> None:
    blocks = blocks_of(content, size)
    text = content.removeprefix(b"\xef\xbb\xbf")
    assert b"".join(block.content for block in blocks) == text
    assert [record for block in blocks for record in block.records] == text.removesuffix(b"\n").split(b"\n")[
        : len(text)
    ]
    for block in blocks:
        assert content[block.offset :].startswith(block.content)
        begins = [0, *block.ends[:-1]]
        assert [
            block.content[a:b].removesuffix(b"\n") for a, b in zip(begins, block.ends, strict=True)
        ] == block.records


@given(rows=st.lists(st.lists(FIELD, min_size=2, max_size=2), max_size=8), size=st.integers(1, 30))
def test_records_of_csv_are_those_that_csv_reads(rows: list[list[str]], size: int) -> None:
    written = io.StringIO()
    csv.writer(written, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows(rows)
    found = [record for block in blocks_of(written.getvalue().encode(), size, quoted=True) for record in block.records]
    assert [next(csv.reader(io.StringIO(record.decode(), newline=""))) for record in found] == rows


def test_a_file_of_bytes_is_refused() -> None:
    with pytest.raises(ScoringError, match="null bytes"):
        blocks_of(b"a\0b\n")


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_LONGEST", 20)
    with pytest.raises(ScoringError, match="a line of more than 20 bytes at byte 2"):
        blocks_of(b"a\n" + b"b" * 40)


def test_a_quotation_without_end_is_refused() -> None:
    with pytest.raises(ScoringError, match="never ends"):
        blocks_of(b'a,"b\nc\n', quoted=True)


def test_a_quotation_that_stays_open_is_looked_through_once() -> None:
    class Counting(bytes):
        looked = 0

        def count(self, *arguments: Any) -> int:
            begin, end = arguments[1:]
            Counting.looked += end - begin
            return super().count(*arguments)

    content = Counting(b'"' + b"a line\n" * 1000)
    assert records._last_end(content, quoted=True) == 0
    assert Counting.looked <= 2 * len(content)
    assert records._last_end(Counting(b'"a\nb"\n"c\nd\n'), quoted=True) == 6


def test_a_quotation_without_end_is_named_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_LONGEST", 20)
    with pytest.raises(ScoringError, match="a quotation without an end, of more than 20 bytes at byte 2"):
        blocks_of(b'a\n"' + b"b\n" * 40, quoted=True)
