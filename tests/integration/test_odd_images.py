"""Images as people have them, on a real server: decoded there or here, every task answers the same bit for bit."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from light_boxes import write_store
from PIL import Image, ImageOps
from running import Server, Serving

from graphkiln_backend.graph.errors import ClientError, InvalidInput
from graphkiln_backend.graph.image_model import CONFIG_LINE
from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.slow]

ORIENTATION = 0x0112
SIZE = (60, 40)
MODELS = {"detector": "detect", "segmenter": "segment", "embedder": "embed"}


def drawn(width: int = SIZE[0], height: int = SIZE[1]) -> Image.Image:
    """A light box, a little colored, off the center."""
    pixels = np.full((height, width, 3), 20, np.uint8)
    pixels[height // 8 : -(-height // 2), width // 4 : -(-width // 2)] = (250, 240, 200)
    return Image.fromarray(pixels)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


def deep(image: Image.Image) -> Image.Image:
    """Gray of 16 bits."""
    return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)


def png_of_48_bits(image: Image.Image) -> bytes:
    """RGB of 16 bits each, which Pillow reads but does not write."""
    rows = np.asarray(image).astype(">u2") * np.uint16(257)
    raw = b"".join(b"\0" + row.astype(">u2").tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", image.width, image.height, 16, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def odd_files() -> dict[str, bytes]:
    """Name -> an image that can be read."""
    image, other = drawn(), Image.new("RGB", SIZE, "white")
    transparent = image.convert("RGBA")
    transparent.putalpha(Image.linear_gradient("L").resize(SIZE))
    palette = image.convert("P", palette=Image.Palette.ADAPTIVE)
    several = {"save_all": True, "append_images": [other]}
    return {
        "a light pixel": saved(Image.new("RGB", (1, 1), "white"), "PNG"),
        "a dark pixel": saved(Image.new("L", (1, 1), 0), "BMP"),
        "a line": saved(drawn(700, 1), "PNG"),
        "a column": saved(drawn(1, 700), "JPEG"),
        "8,000 pixels": saved(drawn(8000, 4500).convert("L"), "JPEG"),
        "8,000 pixels high": saved(drawn(30, 8000), "PNG"),
        "CMYK JPEG": saved(image.convert("CMYK"), "JPEG"),
        "CMYK TIFF": saved(image.convert("CMYK"), "TIFF"),
        "YCbCr TIFF": saved(image.convert("YCbCr"), "TIFF"),
        "16 bits PNG": saved(deep(image), "PNG"),
        "16 bits TIFF": saved(deep(image), "TIFF"),
        "32 bits TIFF": saved(Image.fromarray(np.asarray(image.convert("L")).astype(np.int32)), "TIFF"),
        "floats TIFF": saved(Image.fromarray(np.asarray(image.convert("L")).astype(np.float32)), "TIFF"),
        "one bit": saved(image.convert("1"), "PNG"),
        "alpha PNG": saved(transparent, "PNG"),
        "gray and alpha": saved(transparent.convert("LA"), "PNG"),
        "alpha WebP": saved(transparent, "WEBP", lossless=True),
        "palette": saved(palette, "PNG"),
        "transparent palette": saved(palette, "PNG", transparency=0),
        "GIF": saved(palette, "GIF"),
        "animated GIF": saved(image, "GIF", **several),
        "animated WebP": saved(image, "WEBP", lossless=True, **several),
        "animated PNG": saved(image, "PNG", **several),
        "pages": saved(image, "TIFF", **several),
        "progressive": saved(image, "JPEG", progressive=True),
        "gray JPEG": saved(image.convert("L"), "JPEG"),
        "48 bits PNG": png_of_48_bits(image),
        "two pictures": saved(image, "MPO", **several),
        "two pictures, turned": saved(image, "MPO", exif=turned(8), **several),
        "4:4:4": saved(image, "JPEG", subsampling=0),
        **{f"EXIF {number} JPEG": saved(image, "JPEG", exif=turned(number)) for number in range(1, 10)},
        **{f"EXIF {number} {kind}": saved(image, kind, exif=turned(number)) for kind in ("PNG", "WEBP", "TIFF")
           for number in (3, 6)},
    }  # fmt: skip


def damaged_files() -> dict[str, bytes]:
    """Name -> what is no image."""
    image = drawn(200, 200)
    files = {kind: saved(image, kind) for kind in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF")}
    cut = {f"half a {kind}": content[: len(content) // 2] for kind, content in files.items()}
    bomb = bytearray(files["PNG"])
    bomb[16:24] = (60_000).to_bytes(4, "big") * 2  # the header's width and height
    return {
        **cut,
        "nothing": b"",
        "text": b"hello",
        "a header": files["PNG"][:20],
        "another format": saved(image, "PPM"),
        "a bomb": bytes(bomb),
    }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A detector, a segmenter and an embedding, which accept images."""
    folder = tmp_path_factory.mktemp("odd")
    store = write_store(folder)
    for model in MODELS:
        with (store / model / "config.pbtxt").open("a") as config:
            config.write(CONFIG_LINE)
    with Serving(folder, "--model-store", store) as running:
        running.wait_ready()
        yield running


def comparable(answer: Any) -> Any:
    """What can be compared with `==`, to the last bit."""
    if isinstance(answer, np.ndarray):
        return answer.tobytes()
    if isinstance(answer, ClientError):
        return type(answer)
    if isinstance(answer, tuple):
        return [(each.to_dict(), each.box, each.score) for each in answer]
    return answer.classes.shape, answer.classes.tobytes()


def answers(client: Client, model: str, form: Any, files: list[bytes]) -> list[Any]:
    """One by one: in a batch with others, the last bits may differ."""
    ask = getattr(client.model(model, images=form), f"{MODELS[model]}_many")
    return [comparable(answer) for file in files for answer in ask([file], on_error="return")]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("url", ["url", "grpc_url"])
def test_every_form_gives_the_same(server: Server, model: str, url: str) -> None:
    files = odd_files()
    with Client(getattr(server, url)) as client:
        told = {form: answers(client, model, form, [*files.values()]) for form in ("encoded", "tensor", "auto")}
    for place, name in enumerate(files):
        assert told["encoded"][place] == told["tensor"][place], name
        assert told["auto"][place] == told["tensor"][place], name
        assert not isinstance(told["tensor"][place], type), f"{name} was refused"


def test_answers_are_in_pixels_of_the_upright_image(server: Server) -> None:
    """Its size as Pillow says it; its light box as numpy finds it."""
    files = odd_files()
    with Client(server.url) as client:
        for name, content in files.items():
            upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
            for form in ("encoded", "tensor"):
                areas = client.model("segmenter", images=form).segment(content)
                assert areas.classes.shape == (upright.height, upright.width), name
                for found in client.model("detector", images=form).detect(content):
                    assert 0 <= found.box.x1 < found.box.x2 <= upright.width, name
                    assert 0 <= found.box.y1 < found.box.y2 <= upright.height, name
        for number in range(1, 9):
            pixels = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(files[f"EXIF {number} JPEG"]))))
            rows, columns = np.nonzero(pixels.mean(2) > 0.4 * 255)
            (found,) = client.model("detector", images="encoded").detect(files[f"EXIF {number} JPEG"])
            expected = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
            box = found.box.x1, found.box.y1, found.box.x2, found.box.y2
            np.testing.assert_allclose(box, expected, atol=2.5, err_msg=str(number))  # a cell of the input is 1.9


@pytest.mark.parametrize("model", MODELS)
def test_what_is_no_image_fails_alone_in_every_form(server: Server, model: str) -> None:
    good, bad = saved(drawn(), "PNG"), damaged_files()
    mixed = [part for content in bad.values() for part in (good, content)]
    with Client(server.url) as client:
        for form in ("encoded", "tensor", "auto"):
            ask = getattr(client.model(model, images=form), f"{MODELS[model]}_many")
            found = [*ask(mixed, on_error="return")]
            refused = dict(zip(bad, found[1::2], strict=True))
            assert {name: type(each) for name, each in refused.items()} == dict.fromkeys(bad, InvalidInput), form
            assert not any(isinstance(each, ClientError) for each in found[::2]), form


@pytest.mark.parametrize("model", MODELS)
def test_three_hundred_images_in_one_call(server: Server, model: str) -> None:
    """Of many sizes, some without anything light: in order, and the same as one by one but for rounding."""
    images = [drawn(20 + number % 37, 16 + number % 23) for number in range(290)]
    images += [Image.new("RGB", (20 + number, 30)) for number in range(10)]
    files = [saved(image, "PNG") for image in images]
    with Client(server.url) as client:
        by_form = {
            form: [*getattr(client.model(model, images=form), f"{MODELS[model]}_many")(files)]
            for form in ("encoded", "tensor")
        }
        assert [*map(comparable, by_form["encoded"])] == answers(client, model, "tensor", files)
    assert [*map(comparable, by_form["encoded"])] == [*map(comparable, by_form["tensor"])]
    if model == "detector":
        assert [len(each) for each in by_form["encoded"]] == [1] * 290 + [0] * 10
