"""Ids of units: the same range under the same configuration has the same, anything else another."""

from __future__ import annotations

from dataclasses import replace

from graphkiln_backend.scoring.units import ID_DIGITS, InputRange

FOUND = InputRange(path="photos", part='["a.jpg"]', identity="1", rows=1, size_bytes=7)


def test_a_range_has_one_id_for_a_configuration() -> None:
    unit = FOUND.unit("model")
    assert unit == FOUND.unit("model")
    assert len(unit.id) == ID_DIGITS
    assert (unit.path, unit.part, unit.rows, unit.size_bytes) == ("photos", '["a.jpg"]', 1, 7)


def test_whatever_changes_an_answer_changes_the_id() -> None:
    others = [replace(FOUND, **{name: f"other {name}"}) for name in ("path", "identity")]
    ids = {unit.id for unit in [FOUND.unit("model"), FOUND.unit("other"), *(one.unit("model") for one in others)]}
    assert len(ids) == 4


def test_what_is_only_told_does_not_change_it() -> None:
    assert replace(FOUND, size_bytes=8).unit("model").id == FOUND.unit("model").id


def test_a_range_that_moved_within_its_file_keeps_its_id() -> None:
    assert replace(FOUND, part="elsewhere").unit("model").id == FOUND.unit("model").id
