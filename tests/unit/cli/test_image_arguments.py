"""Shared parts of the verbs for images."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from PIL import Image

from graphkiln.cli.images import (
    check_formats,
    check_place,
    drawing_paths,
    expand_folders,
    report_failures,
    save_drawing,
)
from graphkiln_backend.graph.errors import InvalidInput

A, B = Path("a.png"), Path("b.png")


def test_failure_names_its_image_once_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (InvalidInput("a.png cannot be decoded"), InvalidInput("bad \x1b[2J")):
        with pytest.raises(typer.Exit):
            report_failures([(A, error)])
    assert capsys.readouterr().err == "graphkiln: a.png cannot be decoded\ngraphkiln: a.png: bad \\x1b[2J\n"


def test_parent_folder_in_a_name_stays_inside(tmp_path: Path) -> None:
    images = [tmp_path / "day" / "1.png", tmp_path / "day" / ".." / "night" / "1.png"]
    assert [*drawing_paths(images, Path("out")).values()] == [Path("out/day/1.png.png"), Path("out/night/1.png.png")]


def test_drawing_folder_with_a_suffix(tmp_path: Path) -> None:
    (tmp_path / "out.d").mkdir()
    check_formats([A, B], tmp_path / "out.d", as_json=False, as_csv=False)
    assert drawing_paths([A], tmp_path / "out.d") == {A: tmp_path / "out.d" / "a.png"}


def test_unusual_file_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("-", "https.png"):
        Path(name).touch()
        check_place(Path(name))


def test_images_of_other_formats_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.jpg", "b.HEIC", "c/d.avif", "notes.txt", "._e.heic"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert expand_folders([tmp_path]) == [tmp_path / "a.jpg"]
    said = capsys.readouterr().err
    assert f"{tmp_path}: left out 2 files, such as {tmp_path / 'b.HEIC'}, of other formats (known endings: .bmp" in said
    with pytest.raises(
        InvalidInput, match=r"c holds 1 file, such as .*d\.avif, of other formats \(convert them; known"
    ):
        expand_folders([tmp_path / "c"])
    assert expand_folders([tmp_path / "a.jpg"]) == [tmp_path / "a.jpg"]
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("name", "size"), [("x.webp", (16384, 1)), ("x.jpg", (1, 65501)), ("x.gif", (65536, 1))])
def test_drawing_too_large_for_its_format(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    with pytest.raises(InvalidInput, match=rf"{name}: {size[0]}x{size[1]} pixels"):
        save_drawing(Image.new("RGB", size), tmp_path / name)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        save_drawing(Image.new("RGB", (1, 1)), tmp_path / "folder.png")
