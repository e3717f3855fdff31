"""Names of version folders, and folders of a store that are not models."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln_backend.repository.version_folders import (
    confuses_triton,
    is_ignored,
    is_version,
    reason_to_ignore,
    version_number,
    visible,
)


@pytest.mark.parametrize(("name", "number"), [("1", 1), ("0", 0), ("10", 10), ("9223372036854775807", 2**63 - 1)])
def test_version_numbers(name: str, number: int) -> None:
    assert version_number(name) == number


@pytest.mark.parametrize(
    "name", ["", "01", "-1", "1.old", "v1", " 1", "\u0663", "\u00b2", "1_0", "+1", "9223372036854775808", "9" * 200]
)
def test_names_that_triton_ignores(name: str) -> None:
    assert version_number(name) is None


@pytest.mark.parametrize("name", ["1.old", "+1", " 1", "-1", "2_backup", "01", "9223372036854775808"])
def test_names_that_confuse_triton(name: str) -> None:
    assert confuses_triton(name)
    assert not is_version(name)


# Folders without models, and broken models.


def make(folder: Path, *files: str) -> Path:
    """A folder with these files; a name that ends with a slash is a folder."""
    folder.mkdir()
    for file in files:
        path = folder / file
        (path if file.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not file.endswith("/"):
            path.touch()
    return folder


@pytest.mark.parametrize("name", [".git", ".ipynb_checkpoints", ".DS_Store", "lost+found", "__pycache__", "__MACOSX"])
def test_system_folders_are_ignored(tmp_path: Path, name: str) -> None:
    make(tmp_path / "m", f"{name}/", "1/")
    assert is_ignored(name)
    assert visible(tmp_path / "m") == [tmp_path / "m" / "1"]


@pytest.mark.parametrize(
    "files",
    [
        ("README.md", "img/a.png"),
        ("train.py", "data/2024-01/x.csv"),
        ("empty/",),
        ("a/b/c/model.onnx",),  # too deep
        ("pom.xml",),
    ],
)
def test_folders_without_models(tmp_path: Path, files: tuple[str, ...]) -> None:
    assert "no files of a model" in reason_to_ignore(make(tmp_path / "docs", *files))


@pytest.mark.parametrize(
    "files",
    [
        ("1/",),
        ("1/model.onnx", "README.md"),
        ("config.pbtxt",),
        ("labels.txt", "README.md"),
        ("model.onnx",),
        ("net.xml", "net.bin"),
        ("weights.SAFETENSORS",),
        ("v1/",),
        ("01/",),
        ("version_2/",),
        ("model/1/model.onnx",),
        ("export/model.savedmodel/",),
    ],
)
def test_models_and_broken_models(tmp_path: Path, files: tuple[str, ...]) -> None:
    assert reason_to_ignore(make(tmp_path / "m", *files)) == ""


def test_unreadable_folder_may_be_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert reason_to_ignore(tmp_path) == ""


def test_links_are_not_searched(tmp_path: Path) -> None:
    make(tmp_path / "elsewhere", "model.onnx")
    folder = make(tmp_path / "docs", "README.md")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    assert reason_to_ignore(folder)
    (folder / "model.onnx").symlink_to(tmp_path / "elsewhere" / "model.onnx")
    assert reason_to_ignore(folder) == ""
