"""What the verbs that take images share."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from PIL import Image

from graphkiln.cli.image_arguments import (
    check_formats,
    check_place,
    drawing_paths,
    expand_folders,
    report_failures,
    save_drawing,
    split_errors,
)
from graphkiln_backend.graph.errors import ClientError, InvalidInput

A, B = Path("a.png"), Path("b.png")


def test_errors_of_some_and_of_all() -> None:
    error = InvalidInput("bad")
    assert split_errors([A, B], ["x", error]) == ([(A, "x")], [(B, error)])
    assert len(split_errors([A, B], [InvalidInput("bad"), InvalidInput("worse")])[1]) == 2
    with pytest.raises(ClientError, match="bad"):
        split_errors([A, B], [InvalidInput("bad"), InvalidInput("bad")])


def test_a_failure_names_its_image_once_and_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (InvalidInput("a.png cannot be decoded"), InvalidInput("bad \x1b[2J")):
        with pytest.raises(typer.Exit):
            report_failures([(A, error)])
    assert capsys.readouterr().err == "graphkiln: a.png cannot be decoded\ngraphkiln: a.png: bad \\x1b[2J\n"


@pytest.mark.parametrize(("paths", "draw"), [([A, B], Path("x.png")), ([A], Path("x.txt"))])
def test_formats_that_do_not(paths: list[Path], draw: Path) -> None:
    with pytest.raises(InvalidInput):
        check_formats(paths, draw, as_json=False, as_csv=False)


def test_a_drawing_goes_into_a_file_or_under_its_name_into_a_folder(tmp_path: Path) -> None:
    image = Image.new("RGB", (2, 2))
    for draw in (tmp_path / "x.png", tmp_path / "new" / "folder"):
        save_drawing(image, drawing_paths([A], draw)[A])
    assert sorted(path.name for path in tmp_path.rglob("*.png")) == ["a.png", "x.png"]
    assert drawing_paths([A, B], None) == {}


def test_images_of_one_name_do_not_take_each_others_place(tmp_path: Path) -> None:
    images = [tmp_path / name for name in ("day/1.jpg", "night/1.jpg", "night/1.png", "2.jpg")]
    names = ["day/1.jpg.png", "night/1.jpg.png", "night/1.png.png", "2.jpg.png"]
    assert [*drawing_paths(images, Path("out")).items()] == [
        (image, Path("out", name)) for image, name in zip(images, names, strict=True)
    ]
    assert drawing_paths([A, A], Path("out")) == {A: Path("out/a.png")}


def test_a_way_back_in_a_name_does_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    images = [tmp_path / "day" / "1.png", tmp_path / "day" / ".." / "night" / "1.png"]
    assert [*drawing_paths(images, Path("out")).values()] == [Path("out/day/1.png.png"), Path("out/night/1.png.png")]


@pytest.mark.parametrize("draw", ["photos", "photos/../photos", "photos/a.png", "link"])
def test_a_drawing_never_takes_the_place_of_an_image(tmp_path: Path, draw: str) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    with pytest.raises(InvalidInput, match=r"would take the place of .*a\.png"):
        drawing_paths([tmp_path / "photos" / "a.png"], tmp_path / draw)


def test_a_folder_whose_name_has_a_dot_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "out.d").mkdir()
    check_formats([A, B], tmp_path / "out.d", as_json=False, as_csv=False)
    assert drawing_paths([A], tmp_path / "out.d") == {A: tmp_path / "out.d" / "a.png"}


@pytest.mark.parametrize(
    ("image", "words", "hint"),
    [
        ("https://example.org/cat.jpg", r"https:/example\.org/cat\.jpg is a URL", "fetch_urls=True"),
        ("http://10.0.0.1/cat.jpg", "is a URL", "curl -O"),
        ("-", "not from what is piped in", "> image.jpg"),
    ],
)
def test_what_is_no_file_here_is_refused_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: str, words: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match=words) as caught:
        expand_folders([A, Path(image)])
    assert hint in caught.value.hint


def test_a_file_or_a_folder_may_be_named_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("-", "https.png"):
        Path(name).touch()
        check_place(Path(name))


def test_images_of_other_formats_in_a_folder_are_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a hundred images of a phone, the three that were JPEG were answered, and nothing was said."""
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


@pytest.mark.parametrize("text", ["data:image/png;base64,iVBORw0KGgo//Ag==", "iVBORw0KGgo" + "A" * 4000, "<svg/>"])
def test_an_image_as_text_is_no_path(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"is no path: it is (a data: URL|base64 text|SVG)") as caught:
        expand_folders([Path(text)])
    assert len(caught.value.message) < 140


@pytest.mark.parametrize(("name", "size"), [("x.webp", (16384, 1)), ("x.jpg", (1, 65501)), ("x.gif", (65536, 1))])
def test_a_drawing_that_its_format_cannot_hold_is_refused(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    with pytest.raises(InvalidInput, match=rf"{name}: its format cannot hold {size[0]}x{size[1]} pixels \(name it"):
        save_drawing(Image.new("RGB", size), tmp_path / name)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        save_drawing(Image.new("RGB", (1, 1)), tmp_path / "folder.png")
