"""Parts that are kept as they are done."""

from __future__ import annotations

from pathlib import Path

import pytest
from parts import Parts


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    return Parts(tmp_path / "parts", 5, 3.0)


def test_what_is_done_is_not_measured_again(parts: Parts) -> None:
    numbers = iter(range(9))
    assert [parts.measure("one", lambda: next(numbers)) for _ in range(2)] == [0, 0]
    assert parts.measure("one", lambda: next(numbers), again=True) == 1
    assert parts.read("one") == 1
    assert parts.read("two") is None


def test_what_fails_is_not_kept_and_what_was_there_stays(parts: Parts) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    parts.measure("one", lambda: [1])
    with pytest.raises(KeyboardInterrupt):
        parts.measure("one", fail, again=True)
    assert parts.read("one") == [1]


def test_other_conditions_do_not_stand_in_the_same_table(parts: Parts, tmp_path: Path) -> None:
    parts.measure("one", lambda: [1])
    assert Parts(tmp_path / "parts", 1, 3.0).read("one") is None
    assert Parts(tmp_path / "parts", 5, 3.0).read("one") == [1]
