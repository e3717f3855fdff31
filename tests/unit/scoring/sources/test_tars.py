"""WebDataset tars."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from scored_inputs import files_source, ids_of, plan, read_all, read_unit, write_tar

from graphkiln_backend.scoring.errors import InputChanged, ScoringError
from graphkiln_backend.scoring.sources import storage

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


def test_image_column_selects_one_of_several_images(shard: Path) -> None:
    write_tar(shard, {"1.left.jpg": b"left", "1.right.JPG": b"right", "2.left.jpg": b"only left"})
    with pytest.raises(ScoringError, match=r"several images \(--image-column says which: left\.jpg, right\.jpg\)"):
        plan(files_source(shard))
    one, two = read_all(files_source(shard, image="right.jpg"))
    assert (one.content, two.error) == (b"right", "the row has no file .right.jpg")


def test_repeated_key_is_refused(shard: Path) -> None:
    write_tar(shard, {"1.jpg": b"", "2.jpg": b"", "1.cls": b""})
    with pytest.raises(ScoringError, match=r"1 id occurs more than once: 's-0\.tar/1' \(files of one key"):
        plan(files_source(shard))


def test_an_empty_image_is_a_row(shard: Path) -> None:
    write_tar(shard, {"1.jpg": b""})
    assert read_all(files_source(shard))[0].content == b""


def test_id_column_is_refused(shard: Path) -> None:
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
def test_damaged_tar_is_refused(shard: Path, damage: object, message: str) -> None:
    shard.write_bytes(damage(shard.read_bytes()))  # type: ignore[operator]
    with pytest.raises(ScoringError, match=message):
        plan(files_source(shard))


def test_empty_tar_is_refused(shard: Path) -> None:
    write_tar(shard, {})
    with pytest.raises(ScoringError, match="has no rows"):
        plan(files_source(shard))


def test_replaced_tar_fails_its_unit(shard: Path) -> None:
    source = files_source(shard)
    (unit,) = plan(source, 10**9)
    write_tar(shard, {"x/1.jpg": b"new"})
    with pytest.raises(InputChanged, match="has changed"):
        read_unit(source, unit)


def test_long_names_are_whole(shard: Path) -> None:
    name = "folder/" * 30 + "1"
    write_tar(shard, {f"{name}.jpg": b"image"})
    assert ids_of(files_source(shard)) == [f"s-0.tar/{name}"]


def write_members(path: Path, *members: tarfile.TarInfo) -> None:
    with tarfile.open(path, "w") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size = kind, link, size
    return made


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_a_link_is_a_row_with_an_error(shard: Path, kind: bytes) -> None:
    links = (member("2.jpg", kind, "1.jpg"), member("2.cls", kind, "1.cls"), member("newest", kind, "folder"))
    write_members(shard, member("1.jpg", size=3), *links)
    one, two = read_all(files_source(shard, kept=("cls",)))
    assert (one.id, one.content) == ("s-0.tar/1", b"xxx")
    assert (two.id, two.kept) == ("s-0.tar/2", {"cls": None})
    assert "the row's .jpg is a link in the tar" in two.error
    assert plan(files_source(shard), 10**9)[0].size_bytes == 3


def test_hidden_files_and_devices_are_skipped(shard: Path) -> None:
    hidden = [member("./.DS_Store"), member("x/._1.jpg"), member("y/._1.jpg"), member("x/._2.jpg")]
    write_members(shard, *hidden, member("x/fifo.jpg", tarfile.FIFOTYPE), member("x/1.jpg"))
    assert ids_of(files_source(shard)) == ["s-0.tar/x/1"]


@pytest.mark.parametrize("other", ["1.jpg", "1.JPG"])
def test_two_files_of_one_suffix_are_refused(shard: Path, other: str) -> None:
    write_members(shard, member("1.jpg"), member(other))
    with pytest.raises(ScoringError, match=r"1 has two files \.jpg, capitals aside"):
        plan(files_source(shard))


def test_sparse_file_is_refused(shard: Path, tmp_path: Path) -> None:
    with (tmp_path / "1.jpg").open("wb") as file:
        file.truncate(1 << 20)
    subprocess.run(["tar", "--sparse", "-cf", shard, "-C", tmp_path, "1.jpg"], check=True)
    with pytest.raises(ScoringError, match=r"1\.jpg has holes \(pack it without tar --sparse"):
        plan(files_source(shard))


def test_concatenated_tars_are_refused(shard: Path) -> None:
    content = shard.read_bytes()
    write_tar(shard, {"x/9.jpg": b"nine"})
    shard.write_bytes(content + shard.read_bytes())
    with pytest.raises(ScoringError, match=r"goes on behind its end, with x/9\.jpg.*tar --concatenate"):
        plan(files_source(shard))
    shard.write_bytes(content + b"what else follows" * 100)
    assert len(ids_of(files_source(shard))) == 3


def test_image_above_the_size_limit_is_a_row_error(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tar(shard, {"1.jpg": b"x" * 11, "2.jpg": b"x" * 10})
    monkeypatch.setattr(storage, "IMAGE_LIMIT", 10)
    one, two = read_all(files_source(shard))
    assert "maximum of 10 bytes" in one.error
    assert two.content == b"x" * 10


@pytest.mark.parametrize("columns", [{"image": "jpgg"}, {"kept": ("cls", "txt")}])
def test_unknown_suffix_is_refused(shard: Path, columns: dict[str, Any]) -> None:
    with pytest.raises(ScoringError, match=r"no row of .* has a file \.(jpgg|txt) \(there are cls, jpg, json\)"):
        plan(files_source(shard.parent, **columns))


def test_suffix_in_one_tar_only(shard: Path) -> None:
    write_tar(shard.with_name("s-1.tar"), {"y/1.jpg": b"", "y/1.txt": b"text"})
    rows = read_all(files_source(shard.parent, kept=("txt",)))
    assert [row.kept["txt"] for row in rows] == [None, None, None, "text"]
