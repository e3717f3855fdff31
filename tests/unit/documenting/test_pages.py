"""The pages that are written from the code are what the code says."""

from __future__ import annotations

import shutil
from pathlib import Path

from documenting import pages


def test_every_page_is_what_the_code_says() -> None:
    assert pages.stale() == [], "scripts/docs writes them"


def test_what_was_changed_by_hand_is_written_again(repository: Path, tmp_path: Path) -> None:
    for name in pages.PAGES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(repository / "docs" / name, tmp_path / name)
    (tmp_path / "reference" / "errors.md").write_text("by hand")
    (tmp_path / "reference" / "cli.md").unlink()
    assert pages.write(tmp_path) == ["reference/cli.md", "reference/errors.md"]
    assert pages.stale(tmp_path) == []
