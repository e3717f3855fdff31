"""Parts that are kept as they are done."""

from __future__ import annotations

import os
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


def test_what_is_kept_says_of_when_it_is(parts: Parts, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    parts.measure("one", lambda: [1])
    assert capsys.readouterr().err == ""
    os.utime(tmp_path / "parts" / "one.json", (0, 0))
    parts.measure("one", lambda: [2])
    assert "one: kept, as measured 1970-01-01 00:00 UTC (--only 'one' measures it again)" in capsys.readouterr().err


def test_what_is_stopped_while_it_is_written_leaves_the_old_one(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    parts.measure("one", lambda: [1])
    write = Path.write_text

    def stop(path: Path, text: str) -> int:
        write(path, text[:10])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", stop)
    with pytest.raises(KeyboardInterrupt):
        parts.measure("one", lambda: [2], again=True)
    assert Parts(tmp_path / "parts", 5, 3.0).read("one") == [1]
