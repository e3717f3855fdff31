"""The versions that a policy selects."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln_backend.repository.config import read_config
from graphkiln_backend.repository.version_policy import select_versions


@pytest.mark.parametrize(
    ("policy", "selected"),
    [
        ("", [10]),
        ("version_policy { latest { } }", [10]),
        ("version_policy { latest { num_versions: 2 } }", [9, 10]),
        ("version_policy { latest { num_versions: 7 } }", [1, 9, 10]),
        ("version_policy { all { } }", [1, 9, 10]),
        ("version_policy { specific { versions: [9, 1, 4] } }", [1, 9]),
        ("version_policy { specific { } }", []),
    ],
)
def test_of_three_versions(tmp_path: Path, policy: str, selected: list[int]) -> None:
    (tmp_path / "config.pbtxt").write_text(policy)
    assert select_versions(read_config(tmp_path / "config.pbtxt"), [10, 1, 9]) == selected


def test_of_none(tmp_path: Path) -> None:
    assert select_versions(read_config(tmp_path / "missing"), []) == []
