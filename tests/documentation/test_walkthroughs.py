"""The tutorial and the guides, followed from the first line to the last, with real servers in an empty folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from walkthrough import Walkthrough

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1800)]

QUICKER = {"--p99 50ms": "--p99 2s", "--budget 1m": "--budget 15s", "--duration 20": "--duration 12"}
"""A target that any machine meets, and less time."""
NOT_FOLLOWED = {"story.md"}
"""It trains ResNet-101; `test_readme` runs its command with a smaller model."""


def test_the_tutorial(repository: Path, tmp_path: Path) -> None:
    with Walkthrough(tmp_path, QUICKER) as reader:
        reader.follow(repository / "docs" / "tutorial.md")
        assert reader.said(r"right on held-out digits: (9[0-9]|100)\.\d%")
        assert reader.said(r"PASS")
        assert reader.said(r"(9[0-9]|100)\.\d% of 300 right")
        assert reader.said(r"digits\W+2\W+READY")
        assert reader.said(r"graphkiln_instance_info\{")
        manifest = json.loads((tmp_path / "models" / "digits" / "1" / "manifest.json").read_text())
        assert manifest["verification"]
        assert not (tmp_path / "models" / "digits" / "2").exists()


@pytest.mark.parametrize(
    "name", ["convert", "serve", "requests", "engines", "precision", "drop-in", "oneflow", "migrate"]
)
def test_a_guide(name: str, repository: Path, tmp_path: Path) -> None:
    with Walkthrough(tmp_path, QUICKER).bring(repository, "docs", "model_repository") as reader:
        (tmp_path / "tests").symlink_to(repository / "tests")
        reader.follow(repository / "docs" / "how-to" / f"{name}.md")
        assert reader.steps


def test_every_guide_is_followed(repository: Path) -> None:
    (marks,) = [mark for mark in test_a_guide.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]
    guides = {path.name for path in (repository / "docs" / "how-to").glob("*.md")}
    assert guides == {*(f"{name}.md" for name in marks.args[1]), *NOT_FOLLOWED}
