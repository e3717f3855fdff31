"""Names that are no text become text; digests keep values apart."""

from __future__ import annotations

import os

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.sources.names import as_id, checked_text

ODD = os.fsdecode(b"caf\xe9.jpg")


def test_bytes_that_are_no_text_are_written_out() -> None:
    assert as_id(ODD) == r"caf\xe9.jpg"
    assert as_id("café.jpg") == "café.jpg"


PIECES = st.sampled_from([b"\\", b"x", b"e9", b"\xe9", b"\xc3\xa9", b"\xc3", b".jpg", b"\n"])
NAMES = st.lists(PIECES, max_size=8).map(b"".join)


@settings(max_examples=40, deadline=None)
@given(one=NAMES, other=NAMES)
@example(one=b"\xe9.jpg", other=b"\\xe9.jpg")
@example(one=b"\\\xe9", other=b"\\\\xe9")
def test_two_names_never_have_one_id(one: bytes, other: bytes) -> None:
    assert (as_id(os.fsdecode(one)) == as_id(os.fsdecode(other))) is (one == other)


def test_a_path_that_is_no_text_cannot_be_planned() -> None:
    for path in ("/photos", "/photos\\xe9"):
        assert checked_text(path) == path
    with pytest.raises(ScoringError, match=r"caf\\xe9"):
        checked_text(ODD)
