"""The control groups of a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln_backend.system.resources import own_groups


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("0::/\n", [("", 2)]),
        ("0::/a/b\n", [("a/b", 2), ("a", 2), ("", 2)]),
        ("5:memory:/a\n4:cpu,cpuacct:/\n", [("cpu", 1)]),
        ("4:cpuacct,cpu:/a\n0::/\n", [("cpu/a", 1), ("cpu", 1), ("", 2)]),
        ("5:memory:/a\n", []),
    ],
)
def test_the_innermost_comes_first(tmp_path: Path, own: str, expected: list[tuple[str, int]]) -> None:
    (tmp_path / "own").write_text(own)
    groups = tmp_path / "groups"
    assert [*own_groups("cpu", groups, tmp_path / "own")] == [(groups / path, version) for path, version in expected]


def test_a_system_without_groups_has_none(tmp_path: Path) -> None:
    assert [*own_groups("cpu", tmp_path, tmp_path / "none")] == []
