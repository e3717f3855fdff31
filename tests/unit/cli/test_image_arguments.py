"""What the verbs that take images share."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from PIL import Image

from graphkiln.cli.image_arguments import (
    check_formats,
    drawing_paths,
    report_failures,
    save_drawing,
    split_errors,
)
from graphkiln_backend.graph.errors import ClientError, InvalidInput

A, B = Path("a.png"), Path("b.png")


def test_answers_and_errors_with_their_images() -> None:
    error = InvalidInput("bad")
    assert split_errors([A, B], ["x", error]) == ([(A, "x")], [(B, error)])


def test_what_fails_everywhere_for_one_reason_is_said_once() -> None:
    with pytest.raises(ClientError, match="bad"):
        split_errors([A, B], [InvalidInput("bad"), InvalidInput("bad")])
    assert len(split_errors([A, B], [InvalidInput("bad"), InvalidInput("worse")])[1]) == 2


def test_failures_end_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    report_failures([])
    with pytest.raises(typer.Exit) as caught:
        report_failures([(A, InvalidInput("bad"))])
    assert caught.value.exit_code == 1
    assert "a.png: bad" in capsys.readouterr().err


@pytest.mark.parametrize("draw", [None, Path("folder"), Path("x.png")])
def test_formats_that_go_together(draw: Path | None) -> None:
    check_formats([A], draw, as_json=True, as_csv=False)


@pytest.mark.parametrize(("paths", "draw"), [([A, B], Path("x.png")), ([A], Path("x.txt"))])
def test_formats_that_do_not(paths: list[Path], draw: Path) -> None:
    with pytest.raises(InvalidInput):
        check_formats(paths, draw, as_json=False, as_csv=False)


def test_a_drawing_goes_into_a_file_or_under_its_name_into_a_folder(tmp_path: Path) -> None:
    image = Image.new("RGB", (2, 2))
    for draw in (tmp_path / "x.png", tmp_path / "new" / "folder"):
        save_drawing(image, *drawing_paths([A], draw))
    assert sorted(path.name for path in tmp_path.rglob("*.png")) == ["a.png", "x.png"]
    assert drawing_paths([A, B], None) == []


def test_images_of_one_name_do_not_take_each_others_place(tmp_path: Path) -> None:
    images = [tmp_path / name for name in ("day/1.jpg", "night/1.jpg", "night/1.png", "2.jpg")]
    names = ["day/1.jpg.png", "night/1.jpg.png", "night/1.png.png", "2.jpg.png"]
    assert drawing_paths(images, Path("out")) == [Path("out", name) for name in names]
    assert drawing_paths([A, A], Path("out")) == [Path("out/a.png")] * 2


@pytest.mark.parametrize("draw", ["photos", "photos/../photos", "photos/a.png", "link"])
def test_a_drawing_never_takes_the_place_of_an_image(tmp_path: Path, draw: str) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    with pytest.raises(InvalidInput, match=r"would take the place of .*a\.png"):
        drawing_paths([tmp_path / "photos" / "a.png"], tmp_path / draw)


def test_a_folder_whose_name_has_a_dot_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "out.d").mkdir()
    check_formats([A, B], tmp_path / "out.d", as_json=False, as_csv=False)
    assert drawing_paths([A], tmp_path / "out.d") == [tmp_path / "out.d" / "a.png"]
