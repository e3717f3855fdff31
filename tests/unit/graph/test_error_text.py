"""What is cut from an error before a protocol carries it or a table shows it."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.text import LIMIT_BYTES, bounded, plain_reason, without_traceback

_TRACE = "\n\nAt:\n  /a b/model.py(97): _load\n  /a b/model.py(84): initialize\n"


@pytest.mark.parametrize("text", ["", "short", "ä" * (LIMIT_BYTES // 2), "x" * LIMIT_BYTES])
def test_what_fits_stays_as_it_is(text: str) -> None:
    assert bounded(text) == text


@pytest.mark.parametrize("letter", ["x", "ä", "€", "\N{BRICK}"])
@pytest.mark.parametrize("begin", ["", "a", "ab", "abc"])
def test_what_is_too_long_is_cut_between_characters(letter: str, begin: str) -> None:
    cut = bounded(begin + letter * 100_000)
    assert LIMIT_BYTES - 4 < len(cut.encode()) <= LIMIT_BYTES
    kept, _, end = cut.partition(" ... ")
    assert kept == begin + letter * (len(kept) - len(begin))
    assert end == f"({len(begin) + 100_000 * len(letter.encode())} bytes in all)"


def test_what_is_no_text_at_all_can_be_sent_all_the_same() -> None:
    """A file name may hold bytes that are not UTF-8."""
    assert bounded("file \udcff") == "file ?"


def test_percent_encoded_it_fits_into_grpcs_headers() -> None:
    assert 3 * len(bounded("ä" * 100_000).encode()) < 8192


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (f"Internal: TritonModelException: m: cut short{_TRACE}", "m: cut short"),
        (f"Internal: ValueError: two\nlines{_TRACE};", "ValueError: two lines"),
        ("unloaded", "unloaded"),
        ("", ""),
    ],
)
def test_a_reason_is_the_cause_on_one_line(text: str, cause: str) -> None:
    assert plain_reason(text) == cause


def test_the_errors_of_several_versions_are_all_kept() -> None:
    text = f"load failed for model 'm': version 1: one{_TRACE};\nversion 2: two{_TRACE};\n"
    assert without_traceback(text) == "load failed for model 'm': version 1: one\nversion 2: two"
