"""WebDataset's tars: files of a key are a row; damage and repetitions are told."""

from __future__ import annotations

from pathlib import Path

import pytest
from scored_inputs import files_source, ids_of, plan, read_all, read_unit, write_tar

from graphkiln_backend.scoring.errors import InputChanged, ScoringError

MEMBERS = {"x/1.jpg": b"one", "x/1.cls": b"7", "x/2.cls": b"8", "x/2.jpg": b"two", "x/3.json": b"{}"}


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    write_tar(tmp_path / "s-0.tar", MEMBERS)
    return tmp_path / "s-0.tar"


def test_files_of_a_key_are_a_row(shard: Path) -> None:
    one, two, three = read_all(files_source(shard, kept=("cls",)), 1)
    assert (one.id, one.content, one.kept) == ("s-0.tar/x/1", b"one", {"cls": "7"})
    assert (two.id, two.content, two.kept) == ("s-0.tar/x/2", b"two", {"cls": "8"})
    assert (three.id, three.error, three.kept) == ("s-0.tar/x/3", "the row has no image, but ['json']", {"cls": None})


def test_rows_of_several_tars(shard: Path) -> None:
    write_tar(shard.with_name("s-1.tar"), MEMBERS)
    assert ids_of(files_source(shard.parent)) == [f"s-{tar}.tar/x/{key}" for tar in (0, 1) for key in (1, 2, 3)]


def test_of_several_images_one_is_chosen(shard: Path) -> None:
    write_tar(shard, {"1.left.jpg": b"left", "1.right.JPG": b"right", "2.left.jpg": b"only left"})
    with pytest.raises(ScoringError, match=r"several images \(--image-column says which: left\.jpg, right\.jpg\)"):
        plan(files_source(shard))
    one, two = read_all(files_source(shard, image="right.jpg"))
    assert (one.content, two.error) == (b"right", "the row has no file .right.jpg")


def test_a_key_that_comes_again_is_named(shard: Path) -> None:
    write_tar(shard, {"1.jpg": b"", "2.jpg": b"", "1.cls": b""})
    with pytest.raises(ScoringError, match=r"1 id occurs more than once: 's-0\.tar/1' \(files of one key"):
        plan(files_source(shard))


def test_an_empty_image_is_a_row(shard: Path) -> None:
    write_tar(shard, {"1.jpg": b""})
    assert read_all(files_source(shard))[0].content == b""


def test_ids_are_the_keys(shard: Path) -> None:
    with pytest.raises(ScoringError, match="named by their keys"):
        plan(files_source(shard, id="cls"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[: 512 + 1], "cut off|no sound tar"),
        (lambda content: content[:1024] + b"x" * 512 + content[1536:], "damaged near byte 1024"),
        (lambda content: b"x" * len(content), "no sound tar"),
    ],
)
def test_damage_is_told(shard: Path, damage: object, message: str) -> None:
    shard.write_bytes(damage(shard.read_bytes()))  # type: ignore[operator]
    with pytest.raises(ScoringError, match=message):
        plan(files_source(shard))


def test_an_empty_tar_is_told(shard: Path) -> None:
    write_tar(shard, {})
    with pytest.raises(ScoringError, match="has no rows"):
        plan(files_source(shard))


def test_a_tar_that_was_replaced_ends_the_run(shard: Path) -> None:
    source = files_source(shard)
    (unit,) = plan(source, 10**9)
    write_tar(shard, {"x/1.jpg": b"new"})
    with pytest.raises(InputChanged, match="has changed"):
        read_unit(source, unit)
    with pytest.raises(ScoringError, match="--replace"):
        list(source.replan(unit))


def test_long_names_are_whole(shard: Path) -> None:
    name = "folder/" * 30 + "1"
    write_tar(shard, {f"{name}.jpg": b"image"})
    assert ids_of(files_source(shard)) == [f"s-0.tar/{name}"]
