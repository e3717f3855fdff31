"""JPEGs whose scans are too many to be decoded in any time that somebody waits."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.images.decoding import check_scans, count_scans, open_image

END = b"\xff\xd9"


def jpeg(**options: Any) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((24, 16), 60).convert("RGB").save(file, "JPEG", **options)
    return file.getvalue()


def with_more_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan is there so many times more."""
    content = jpeg(progressive=True)
    last = content[content.rindex(b"\xff\xda") : -len(END)]
    return content[: -len(END)] + last * count + END


class TestCountScans:
    def test_one_that_is_not_progressive_has_one(self) -> None:
        assert count_scans(jpeg()) == 1

    def test_progressive_ones_have_what_the_file_holds(self) -> None:
        content = jpeg(progressive=True)
        assert count_scans(content) == content.count(b"\xff\xda") == 10
        assert count_scans(with_more_scans(90)) == 100

    def test_what_is_no_scan_of_the_image_is_not_counted(self) -> None:
        """Thumbnails in metadata, comments, other images and videos behind it."""
        assert count_scans(jpeg(comment=b"\xff\xda" * 20)) == 1
        assert count_scans(jpeg() + jpeg(progressive=True) + b"\xff\xda" * 20) == 1

    def test_marks_of_a_restart_and_bytes_that_fill_are_none(self) -> None:
        assert count_scans(jpeg(restart_marker_blocks=1)) == 1
        assert count_scans(jpeg().replace(b"\xff\xda", b"\xff\xff\xff\xda")) == 1

    @pytest.mark.parametrize("content", [b"", b"\xff", b"\xff\xd8", b"\xff\xd8\xff\xda", b"hello"])
    def test_of_a_damaged_file_as_far_as_it_goes(self, content: bytes) -> None:
        assert count_scans(content) == (b"\xff\xda" in content)


class TestCheckScans:
    @staticmethod
    def check(content: bytes, side: int = 16, kind: str = "JPEG") -> None:
        info = {"progressive": 1} if count_scans(content) > 1 else {}
        image: Any = SimpleNamespace(format=kind, info=info, width=side, height=side)
        file = io.BytesIO(content)
        file.seek(7)
        check_scans(image, file)
        assert file.tell() == 7

    def test_what_programs_write_is_taken_at_any_size(self) -> None:
        self.check(jpeg(progressive=True), 13_000)
        self.check(jpeg(), 13_000)

    @pytest.mark.parametrize("kind", ["JPEG", "MPO"])
    def test_more_scans_than_anybody_writes(self, kind: str) -> None:
        self.check(with_more_scans(490))
        with pytest.raises(ValueError, match=r"would take too long: 501 scans of 16x16 pixels; save it without"):
            self.check(with_more_scans(491), kind=kind)

    def test_of_a_large_image_fewer(self) -> None:
        with pytest.raises(ValueError, match="30 scans of 13000x13000"):
            self.check(with_more_scans(20), 13_000)
        self.check(with_more_scans(20), 8_000)

    def test_other_formats_have_no_scans(self) -> None:
        self.check(with_more_scans(600), kind="TIFF")


@pytest.mark.parametrize("given", [bytes, Path])
def test_it_is_refused_before_it_is_decoded(tmp_path: Path, given: type) -> None:
    content = with_more_scans(600)
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises(InvalidInput, match="cannot be decoded: it would take too long: 610 scans of 24x16"):
        open_image(content if given is bytes else tmp_path / "a.jpg")
    assert open_image(with_more_scans(300)).size == (24, 16)
