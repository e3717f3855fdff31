"""What a release checks before it builds, and the links of its README."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from releasing import release as module
from releasing.release import ReleaseError, check_versions, main, run, with_absolute_links

FILES = (
    "pyproject.toml", "Dockerfile", "deploy/helm/graphkiln/Chart.yaml", "deploy/kubernetes/base/kustomization.yaml",
    "deploy/kserve/kustomization.yaml",
)  # fmt: skip

ADDRESS = "https://example.org/someone/graphkiln"


@pytest.fixture
def tree(repository: Path, tmp_path: Path) -> Path:
    """The files that name the version, with a dated changelog."""
    for file in FILES:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(repository / file, tmp_path / file)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0 (2026-11-29)\n\n- All.\n")
    return tmp_path


def test_all_files_name_the_version(tree: Path) -> None:
    assert check_versions(tree) == "0.1.0"


@pytest.mark.parametrize("file", FILES[1:])
def test_another_version_is_named(tree: Path, file: str) -> None:
    path = tree / file
    path.write_text(path.read_text().replace("0.1.0", "0.0.9", 1))
    with pytest.raises(ReleaseError, match=f"{file} names 0.0.9"):
        check_versions(tree)


def test_a_changelog_without_a_date_is_refused(tree: Path) -> None:
    changelog = tree / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("2026-11-29", "unreleased"))
    with pytest.raises(ReleaseError, match="no dated section"):
        check_versions(tree)


def test_uncommitted_changes_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "run", lambda *_, **__: " M README.md\n")
    with pytest.raises(ReleaseError, match=r"commit or remove what was changed:\n M README.md"):
        module.release("https://example.org/graphkiln", tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


def test_a_failed_step_shows_its_last_lines() -> None:
    with pytest.raises(ReleaseError, match=r"failed:\nno module"):
        run(sys.executable, "-c", "import sys; sys.exit('no module')")


@pytest.mark.parametrize("words", [[], ["http://example.org"], ["https://example.org/a", "b"]])
def test_address_is_needed(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["release", *words])
    with pytest.raises(SystemExit, match="scripts/release ADDRESS"):
        main()


@pytest.mark.parametrize(
    ("link", "absolute"),
    [
        ("[page](docs/page.md#safety)", f"[page]({ADDRESS}/blob/v1/docs/page.md#safety)"),
        ("![a [b]](docs/a.svg)", f"![a [b]]({ADDRESS}/raw/v1/docs/a.svg)"),
        ("[`code`](SECURITY.md)", f"[`code`]({ADDRESS}/blob/v1/SECURITY.md)"),
        ("[there](https://example.org/x)", "[there](https://example.org/x)"),
        ("[below](#try-it)", "[below](#try-it)"),
        ("text (not a link)", "text (not a link)"),
    ],
)
def test_relative_links_become_absolute(link: str, absolute: str) -> None:
    assert with_absolute_links(link, f"{ADDRESS}/", "v1") == absolute


def test_no_link_of_the_readme_stays_relative(repository: Path) -> None:
    readme = (repository / "README.md").read_text()
    targets = re.findall(r"\]\(([^)]+)\)", with_absolute_links(readme, ADDRESS, "v1"))
    assert len(targets) == len(re.findall(r"\]\(([^)]+)\)", readme)) > 20
    assert [target for target in targets if not target.startswith("https://")] == []
