"""Images of all forms become samples: decoding, orientation, geometry and color, compared with Pillow."""

from __future__ import annotations

import base64
import contextlib
import io
import os
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.preprocess import Letterbox, Preprocess
from graphkiln_backend.images import decoding as module
from graphkiln_backend.images.decoding import (
    arrange,
    count_scans,
    describe,
    load_sample,
    open_image,
    prepare,
    to_color,
    upright_size,
)
from graphkiln_backend.images.encoded import PixelBudget
from graphkiln_backend.images.formats import FORMATS

RAW = Preprocess(dtype=DType.UINT8, layout="HWC")


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


class TestImage:
    @pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16", "I"])
    @pytest.mark.parametrize("color", ["RGB", "L"])
    def test_all_modes(self, mode: str, color: Any) -> None:
        image = Image.new(mode, (4, 5))
        sample = load_sample(image, Preprocess(color=color, dtype=DType.UINT8, layout="HWC"))
        assert sample.shape == (5, 4, 1 if color == "L" else 3)

    @pytest.mark.parametrize(
        "pixels",
        [
            np.array([[0.0, 1.0]], np.float32),
            np.array([[0.0, np.nan]], np.float32),
            np.array([[0, 65536]], np.int32),
            np.array([[-1, 0]], np.int32),
        ],
    )
    def test_pixels_of_unknown_range_are_refused(self, pixels: Any) -> None:
        """A float TIFF from 0 to 1 would otherwise be read as 16 bits: all black."""
        image = Image.fromarray(pixels)
        for form in (image, encoded(image, "TIFF")):
            with pytest.raises(InvalidInput, match="cannot be decoded: the range of its 32-bit pixels"):
                load_sample(form, RAW)

    def test_32_bit_pixels_with_16_bit_values(self) -> None:
        image = Image.fromarray(np.array([[0, 257, 65535]], np.int32))
        np.testing.assert_array_equal(load_sample(image, RAW)[0, :, 0], [0, 1, 255])
        with pytest.raises(InvalidInput, match="range of its 32-bit pixels"):
            load_sample(encoded(image, "TIFF"), RAW)

    @pytest.mark.parametrize("mode", ["LAB", "RGBa", "RGBX", "La", "PA", "HSV", "I;16B", "I;16L"])
    def test_rare_modes(self, mode: str) -> None:
        with contextlib.suppress(InvalidInput):
            assert load_sample(Image.new(mode, (4, 5)), RAW).shape == (5, 4, 3)

    @pytest.mark.parametrize(
        ("image", "words"),
        [
            (b"", "not an image"),
            (encoded(Image.effect_noise((50, 50), 80))[:300], "cannot be decoded"),
            ("nowhere.jpg", r"no file nowhere\.jpg"),
            (Path(__file__).parent, "cannot be decoded"),
            (np.zeros((3, 4, 3), np.float32), "expected uint8 pixels"),
            (np.zeros((0, 4, 3), np.uint8), "expected uint8 pixels"),
        ],
    )
    def test_invalid_images(self, image: Any, words: str) -> None:
        with pytest.raises(InvalidInput, match=words):
            load_sample(image, RAW)

    def test_alpha_is_dropped(self) -> None:
        """As torchvision does, which drops alpha; palettes with transparency, too."""
        image = Image.new("RGBA", (2, 2), (10, 20, 30, 0))
        np.testing.assert_array_equal(load_sample(encoded(image), RAW)[0, 0], [10, 20, 30])
        np.testing.assert_array_equal(load_sample(encoded(image.convert("P")), RAW).shape, [2, 2, 3])

    @pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow tells of such data
    @pytest.mark.parametrize(
        "exif", [b"Exif\0\0no TIFF at all", b"Exif\0\0II*\0\xff\xff\xff\x7f", b"Exif\0\0MM\0*\0\0\0\x08\0\x09"]
    )
    def test_damaged_exif_data_are_ignored(self, exif: bytes) -> None:
        image = Image.effect_noise((6, 4), 80).convert("RGB")
        content = encoded(image, "JPEG", exif=exif, quality=100)
        np.testing.assert_array_equal(load_sample(content, RAW), load_sample(encoded(image, "JPEG", quality=100), RAW))
        assert upright_size(content) == (4, 6)

    @pytest.mark.parametrize("orientation", range(1, 9))
    def test_all_orientations(self, orientation: int) -> None:
        image = Image.effect_noise((6, 4), 80).convert("RGB")
        exif = Image.Exif()
        exif[0x0112] = orientation
        turns = {
            1: [],
            2: ["FLIP_LEFT_RIGHT"],
            3: ["ROTATE_180"],
            4: ["FLIP_TOP_BOTTOM"],
            5: ["TRANSPOSE"],
            6: ["ROTATE_270"],
            7: ["TRANSVERSE"],
            8: ["ROTATE_90"],
        }
        expected = image
        for turn in turns[orientation]:
            expected = expected.transpose(Image.Transpose[turn])
        np.testing.assert_array_equal(load_sample(encoded(image, exif=exif), RAW), np.asarray(expected))


class TestForms:
    """The same image in different forms."""

    def test_all_forms_of_an_image(self, tmp_path: Path) -> None:
        image = Image.effect_noise((7, 5), 80).convert("RGB")
        image.save(tmp_path / "image.png")
        forms = [tmp_path / "image.png", str(tmp_path / "image.png"), encoded(image), np.asarray(image), image]
        for form in forms:
            np.testing.assert_array_equal(load_sample(form, RAW), np.asarray(image))

    def test_arrays_with_one_and_four_channels(self) -> None:
        gray, four = np.arange(6, dtype=np.uint8).reshape(2, 3), np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
        np.testing.assert_array_equal(load_sample(gray, RAW), gray[..., np.newaxis].repeat(3, axis=2))
        np.testing.assert_array_equal(load_sample(four, RAW), four[..., :3])

    def test_callers_image_is_not_changed(self) -> None:
        image = Image.effect_noise((9, 6), 80).convert("RGB")
        before = image.tobytes()
        load_sample(image, Preprocess(resize=3, crop=(2, 2), color="L", mean=(0.5,), std=(0.1,)))
        assert (image.tobytes(), image.size, image.mode) == (before, (9, 6), "RGB")

    @pytest.mark.parametrize(
        ("image", "name"),
        [
            ("a/b.png", "a/b.png"),
            (Path("c.jpg"), "c.jpg"),
            (b"12345", "5 bytes"),
            (np.zeros((2, 3, 3), np.uint8), "ndarray(2, 3, 3)"),
            (Image.new("L", (4, 6)), "Image(4, 6)"),
        ],
    )
    def test_describe(self, image: Any, name: str) -> None:
        assert describe(image) == name


class TestUnsupportedFiles:
    """Formats that Pillow opens and this project does not."""

    EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n(%pipe%touch owned) (w) file\n%%EOF\n"

    @pytest.mark.parametrize("ending", ["eps", "png", "jpg"])
    def test_postscript_is_not_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
        def no_process(*arguments: Any, **_: Any) -> None:
            raise AssertionError(arguments)

        monkeypatch.setattr("subprocess.check_call", no_process)
        monkeypatch.setattr("subprocess.Popen", no_process)
        (tmp_path / f"a.{ending}").write_bytes(self.EPS)
        for image in (self.EPS, tmp_path / f"a.{ending}", Image.open(io.BytesIO(self.EPS))):
            with pytest.raises(InvalidInput, match=r"is not an image in a known format.*known are JPEG, PNG, WEBP"):
                load_sample(image, RAW)

    @pytest.mark.parametrize("kind", ["PPM", "ICO", "PDF"])
    def test_other_formats(self, kind: str) -> None:
        with pytest.raises(InvalidInput, match="is not an image in a known format"):
            load_sample(encoded(Image.new("RGB", (4, 4)), kind), RAW)

    @pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
    def test_first_frame_is_decoded(self, kind: str) -> None:
        frames = [Image.new("RGB", (4, 4), color) for color in ("white", "black")]
        content = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
        assert load_sample(content, RAW).min() > 250

    def test_pipe_does_not_block(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "a.png")
        with pytest.raises(InvalidInput, match=r"a\.png cannot be decoded: it is a pipe"):
            load_sample(tmp_path / "a.png", RAW)

    def test_decompression_bomb(self) -> None:
        header = encoded(Image.new("1", (1, 1)))
        claimed = header[:16] + (30_000).to_bytes(4, "big") * 2 + header[24:29]
        content = claimed + zlib.crc32(claimed[12:29]).to_bytes(4, "big") + header[33:]
        with pytest.raises(InvalidInput, match="is too large to decode safely"):
            load_sample(content, RAW)

    @settings(max_examples=300, deadline=None)
    @given(st.sampled_from(FORMATS), st.data())
    def test_damaged_files(self, kind: str, data: st.DataObject) -> None:
        content = bytearray(encoded(Image.linear_gradient("L").resize((9, 7)).convert("RGB"), kind))
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        with contextlib.suppress(InvalidInput):
            load_sample(bytes(content[: data.draw(st.integers(0, len(content)))]), RAW)


class TestLetterbox:
    @pytest.mark.parametrize("layout", ["CHW", "HWC"])
    def test_letterbox_of_zeros(self, layout: Any) -> None:
        letterbox = Letterbox(size=(6, 8), padding=None, position="top-left")
        spec = Preprocess(letterbox=letterbox, layout=layout, mean=(0.5,) * 3)
        sample = load_sample(np.full((6, 3, 3), 255, np.uint8), spec)
        sample = sample if layout == "HWC" else sample.transpose(1, 2, 0)
        assert sample.shape == (6, 8, 3)
        assert (sample[:, :3] == 0.5).all()
        assert (sample[:, 3:] == 0).all()


def with_late_exif(png: bytes, exif: bytes) -> bytes:
    """Append an orientation after the pixels of a PNG."""
    body = b"eXIf" + exif
    chunk = len(exif).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")
    return png[:-12] + chunk + png[-12:]


class TestUprightSize:
    @pytest.mark.parametrize("kind", FORMATS)
    @pytest.mark.parametrize("orientation", range(10))
    def test_upright_size_equals_the_decoded_size(self, kind: str, orientation: int) -> None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        options = {} if kind in ("BMP", "GIF") else {"exif": exif}
        content = encoded(Image.new("RGB", (5, 3)), kind, **options)
        image = open_image(content)
        assert upright_size(content) == (image.height, image.width)
        assert (image.width < image.height) == (orientation in (5, 6, 7, 8) and bool(options))

    @pytest.mark.parametrize("orientation", [1, 6])
    def test_orientation_after_the_pixels(self, orientation: int) -> None:
        exif = Image.Exif()
        exif[0x0112] = orientation
        content = with_late_exif(encoded(Image.new("RGB", (5, 3))), exif.tobytes().removeprefix(b"Exif\0\0"))
        image = open_image(content)
        assert upright_size(content) == (image.height, image.width) == ((5, 3) if orientation == 6 else (3, 5))

    @pytest.mark.parametrize("content", [b"", b"hello", b"\x89PNG\r\n\x1a\n"])
    def test_upright_size_of_invalid_images(self, content: bytes) -> None:
        with pytest.raises(InvalidInput, match=f"^{len(content)} bytes is not an image"):
            upright_size(content)


class TestBudget:
    """The budget of pixels that are decoded at the same time."""

    @pytest.mark.parametrize(("resize", "pixels"), [(None, 1200), (3, 1200), (60, 4800), ((100, 100), 10_000)])
    @pytest.mark.parametrize("given", [bytes, Path])
    def test_budget_covers_decoding_and_resizing(self, tmp_path: Path, resize: Any, pixels: int, given: type) -> None:
        events: list[Any] = []

        @contextlib.contextmanager
        def turn(pixels: int) -> Iterator[None]:
            events.append(pixels)
            yield
            events.append("over")

        content = encoded(Image.new("RGB", (40, 30)))
        (tmp_path / "a.png").write_bytes(content)
        spec = Preprocess(resize=resize, dtype=DType.UINT8)
        sample = load_sample(content if given is bytes else tmp_path / "a.png", spec, budget=turn)
        assert events == [pixels, "over"]
        np.testing.assert_array_equal(sample, load_sample(content, spec))

    def test_damaged_image_returns_its_budget(self) -> None:
        budget = PixelBudget(1200)
        damaged = encoded(Image.effect_noise((40, 30), 80))[:300]
        for _ in range(2):
            with pytest.raises(InvalidInput, match="cannot be decoded"):
                load_sample(damaged, RAW, budget=budget.take)


class TestRealFiles:
    """Files of cameras, editors and web pages."""

    IMAGE = Image.effect_noise((48, 32), 60).convert("RGB")

    @pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP"])
    @pytest.mark.parametrize("more", [b"\0", b"\n\n", b"\xff\xd8\xff\xe0 another one", b"x" * 100_000])
    def test_trailing_data_are_ignored(self, kind: str, more: bytes) -> None:
        content = encoded(self.IMAGE, kind)
        np.testing.assert_array_equal(load_sample(content + more, RAW), load_sample(content, RAW))
        assert upright_size(content + more) == (32, 48)

    @pytest.mark.parametrize("kind", ["JPEG", "MPO"])
    def test_inverted_cmyk(self, kind: str) -> None:
        """As Photoshop saves CMYK: 255 is no ink. Pillow writes it so; without Adobe's marker it is read alike."""
        content = encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), kind)
        assert (load_sample(content, RAW)[8, 8] > 200).tolist() == [True, False, False]
        at = content.index(b"Adobe") - 4
        without = content[:at] + content[at + 2 + int.from_bytes(content[at + 2 : at + 4], "big") :]
        np.testing.assert_array_equal(load_sample(without, RAW), load_sample(content, RAW))

    def test_color_profile_is_ignored(self) -> None:
        """As torchvision does: models have learned from pixels as they are."""
        profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
        content = encoded(self.IMAGE, "PNG", icc_profile=profile)
        np.testing.assert_array_equal(load_sample(content, RAW), np.asarray(self.IMAGE))

    @pytest.mark.parametrize("cut", [1, 2, 100])
    def test_truncated_jpeg_is_refused(self, cut: int) -> None:
        content = encoded(self.IMAGE, "JPEG", quality=95)
        with pytest.raises(InvalidInput, match="cannot be decoded"):
            load_sample(content[: len(content) // 2 - cut], RAW)

    @pytest.mark.parametrize("size", [(1, 10_000), (10_000, 1)])
    @pytest.mark.parametrize("kind", ["JPEG", "PNG"])
    def test_very_long_images(self, size: tuple[int, int], kind: str) -> None:
        content = encoded(Image.new("RGB", size, (200, 100, 50)), kind)
        assert upright_size(content) == size[::-1]
        assert load_sample(content, Preprocess(resize=(8, 8), dtype=DType.UINT8)).shape == (3, 8, 8)
        assert load_sample(content, Preprocess(resize=8, crop=(8, 8), dtype=DType.UINT8)).shape == (3, 8, 8)

    @pytest.mark.slow
    def test_largest_images(self) -> None:
        spec = Preprocess(resize=8, crop=(8, 8), dtype=DType.UINT8)
        with pytest.warns(Image.DecompressionBombWarning):
            sample = load_sample(encoded(Image.new("L", (10_000, 10_000), 77)), spec)
        assert (sample == 77).all()
        with pytest.raises(InvalidInput, match=r"too large to decode safely.*make it smaller first"):
            load_sample(encoded(Image.new("1", (20_000, 15_000))), spec)


# From a decoded image to a sample, beside Pillow's own functions.

IMAGE = Image.effect_noise((40, 30), 80).convert("RGB")


def pixels(**fields: Any) -> Preprocess:
    return Preprocess(dtype=DType.UINT8, layout="HWC", **fields)


@pytest.mark.parametrize("interpolation", ["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"])
@pytest.mark.parametrize("color", ["RGB", "BGR"])
def test_resize_and_crop(interpolation: Any, color: Any) -> None:
    sample = arrange(IMAGE, pixels(resize=15, crop=(9, 10), interpolation=interpolation, color=color), "a")
    expected = IMAGE.resize((20, 15), Image.Resampling[interpolation.upper()]).crop((5, 3, 15, 12))
    np.testing.assert_array_equal(sample if color == "RGB" else sample[..., ::-1], np.asarray(expected))


def test_letterbox_padding() -> None:
    white = Image.new("RGB", (40, 30), "white")
    gray = arrange(white, pixels(letterbox=Letterbox(size=(40, 40), padding=7)), "a")
    assert (gray[:5] == 7).all() & (gray[5:35] == 255).all() & (gray[35:] == 7).all()
    zeros = arrange(white, Preprocess(letterbox=Letterbox(size=(40, 40), padding=None), mean=(0.5,) * 3), "a")
    assert (zeros[:, :5] == 0).all() & (zeros[:, 5:35] == 0.5).all()


def test_huge_resized_image_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"^a\.png is too long and narrow: it would be resized to 25600000x256$"):
        arrange(Image.new("L", (100_000, 1)), Preprocess(resize=256, color="L"), "a.png")


# Progressive JPEGs with too many scans: tested with harmless files of some scans more, and lower limits.

END = b"\xff\xd9"


def jpeg(**options: Any) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((24, 16), 60).convert("RGB").save(file, "JPEG", **options)
    return file.getvalue()


def with_more_scans(count: int) -> bytes:
    """Repeat the last scan of a progressive JPEG a few times."""
    content = jpeg(progressive=True)
    last = content[content.rindex(b"\xff\xda") : -len(END)]
    return content[: -len(END)] + last * count + END


class TestCountScans:
    def test_scans_of_a_progressive_jpeg(self) -> None:
        content = jpeg(progressive=True)
        assert count_scans(content) == content.count(b"\xff\xda") == 10
        assert count_scans(with_more_scans(5)) == 15

    def test_scans_of_thumbnails_are_not_counted(self) -> None:
        """Thumbnails in metadata, comments, other images and videos behind it."""
        assert count_scans(jpeg(comment=b"\xff\xda" * 20)) == 1
        assert count_scans(jpeg() + jpeg(progressive=True) + b"\xff\xda" * 20) == 1

    def test_restart_markers_and_fill_bytes(self) -> None:
        assert count_scans(jpeg(restart_marker_blocks=1)) == 1
        assert count_scans(jpeg().replace(b"\xff\xda", b"\xff\xff\xff\xda")) == 1


@pytest.mark.parametrize(("limit", "value"), [("_MOST_SCANS", 12), ("_MOST_PIXELS", 12 * 24 * 16)])
@pytest.mark.parametrize("given", [bytes, Path])
def test_too_many_scans_are_refused(
    tmp_path: Path, given: type, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    """The limits are those of libjpeg-turbo's tools and NVIDIA DALI."""
    assert (module._MOST_SCANS, module._MOST_PIXELS) == (500, 1 << 32)
    monkeypatch.setattr(module, limit, value)
    content = with_more_scans(3)
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises(InvalidInput, match="would take too long: 13 scans of 24x16"):
        open_image(content if given is bytes else tmp_path / "a.jpg")
    assert open_image(with_more_scans(2)).size == (24, 16)


# Errors for files that are not images.


def avif() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "AVIF")
    return file.getvalue()


@pytest.mark.parametrize("begin", ["", "data:image/png;base64,"])
def test_base64_text(begin: str) -> None:
    text = begin + base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(100_000)).decode()
    with pytest.raises(InvalidInput, match=r"is not a path: it is (base64 text|a data: URL) \(decode ") as caught:
        open_image(text)
    assert len(str(caught.value)) < 4500


def test_very_long_path() -> None:
    with pytest.raises(InvalidInput, match=r"^there is no file aaaa.*a\.\.\. \(5004 characters\)$"):
        open_image("a" * 5000 + ".png")


def test_path_that_looks_like_base64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (5, 4)).save("R0lGOD.png")
    assert open_image("R0lGOD.png").size == (5, 4)


def test_unsupported_format_is_named(tmp_path: Path) -> None:
    (tmp_path / "cat.jpg").write_bytes(avif())
    for read in (lambda: open_image(tmp_path / "cat.jpg"), lambda: open_image(avif()), lambda: upright_size(avif())):
        with pytest.raises(InvalidInput, match=r"it is AVIF \(convert it: avifdec"):
            read()


@pytest.mark.parametrize("given", [io.BytesIO(avif()), bytearray(b"a"), [b"a", b"b"], None])
def test_objects_that_are_not_images(given: Any) -> None:
    for read in (open_image, lambda image: prepare(image, Preprocess())):
        with pytest.raises(
            InvalidInput, match=rf"^a {type(given).__name__} is not an image \(give a path, the bytes of"
        ):
            read(given)
    assert describe(given) == type(given).__name__ or hasattr(given, "shape")


# Images of any mode in colors or gray of 8 bits.


@pytest.mark.parametrize("color", ["RGB", "BGR", "L"])
def test_16_bits_are_rounded_to_8(color: str) -> None:
    values = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    found = np.asarray(to_color(Image.fromarray(values), color))
    expected = (values.astype(np.int64) + 128) // 257
    np.testing.assert_array_equal(found if color == "L" else found[..., 1], expected)


def test_conversion_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(0).integers(0, 1 << 16, (37, 11), np.uint16)
    whole = np.asarray(to_color(Image.fromarray(pixels), "L"))
    for strip in (1, 12, 33, 37 * 11):
        monkeypatch.setattr(module, "_STRIP_PIXELS", strip)
        np.testing.assert_array_equal(np.asarray(to_color(Image.fromarray(pixels), "L")), whole)


def test_conversion_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without strips, a pixel takes 24 bytes: 4 GB for a file of half a megabyte."""
    monkeypatch.setattr(module, "_STRIP_PIXELS", 1 << 13)
    image = Image.fromarray(np.zeros((1000, 1000), np.uint16))
    tracemalloc.start()
    try:
        to_color(image, "L")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8e6
