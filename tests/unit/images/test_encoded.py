"""Encoded images of several requests: samples as in the client, and errors per request."""

from __future__ import annotations

import io
import struct
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from PIL import Image

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images import encoded as module
from graphkiln_backend.images.decoding import load_sample
from graphkiln_backend.images.encoded import Decoder, PixelBudget

SPEC = Preprocess(resize=16, crop=(16, 16), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
FREE = Preprocess(dtype=DType.UINT8)


def encode(width: int = 40, height: int = 24, kind: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.effect_noise((width, height), 60).convert(mode).save(file, kind, **options)
    return file.getvalue()


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    return encode(exif=exif)


def animation() -> bytes:
    frames = [Image.new("P", (20, 20), color) for color in (1, 2)]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


def bomb() -> bytes:
    """A PNG of a few bytes whose header declares 40,000 by 40,000 pixels."""
    content = encode(1, 1, kind="PNG")
    header = b"IHDR" + struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    return content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:]


GOOD = {
    "jpeg": encode(),
    "progressive": encode(progressive=True),
    "gray": encode(mode="L"),
    "cmyk": encode(mode="CMYK"),
    "png": encode(kind="PNG"),
    "alpha": encode(kind="PNG", mode="RGBA"),
    "palette": encode(kind="PNG", mode="P"),
    "webp": encode(kind="WEBP"),
    "bmp": encode(kind="BMP"),
    "gif": animation(),
    "turned": turned(),
    "one pixel": encode(1, 1),
    "portrait": encode(9, 300),
}
BAD = {
    "nothing": (b"", "0 bytes is not an image"),
    "text": (b"hello", "5 bytes is not an image"),
    "cut": (encode()[:-100], "cannot be decoded"),
    "bomb": (bomb(), "too large to decode safely"),
}


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    with Decoder(SPEC, threads=3) as decoder:
        yield decoder


def test_samples_equal_the_clients_in_order(decoder: Decoder) -> None:
    images = [*GOOD.values()]
    (samples,) = decoder.decode([images])
    np.testing.assert_array_equal(samples, [load_sample(image, SPEC) for image in images])


@pytest.mark.parametrize("name", BAD)
def test_bad_image_fails_only_its_request(decoder: Decoder, name: str) -> None:
    content, reason = BAD[name]
    before, bad, after = decoder.decode([[GOOD["jpeg"]], [GOOD["png"], content], [GOOD["gif"]]])
    assert isinstance(bad, InvalidInput)
    assert bad.message.startswith("image 1: ")
    assert reason in bad.message
    np.testing.assert_array_equal(before, [load_sample(GOOD["jpeg"], SPEC)])
    np.testing.assert_array_equal(after, [load_sample(GOOD["gif"], SPEC)])


def test_number_of_named_faults_is_limited(decoder: Decoder) -> None:
    (bad,) = decoder.decode([[b"x", GOOD["jpeg"], b"y", b"z", b"u", b"v"]])
    assert isinstance(bad, InvalidInput)
    assert [f"image {index}:" in bad.message for index in range(6)] == [True, False, True, True, False, False]
    assert bad.message.endswith("and 2 more")


def test_samples_of_different_sizes() -> None:
    with Decoder(FREE, threads=1) as decoder:
        (bad,) = decoder.decode([[encode(8, 8), encode(9, 8)]])
        (good,) = decoder.decode([[encode(9, 8), encode(9, 8)]])
    assert isinstance(bad, InvalidInput)
    assert "image 1 becomes [3, 8, 9], image 0 [3, 8, 8]" in bad.message
    assert isinstance(good, np.ndarray)
    assert good.shape == (2, 3, 8, 9)


def test_request_without_images(decoder: Decoder) -> None:
    (bad,) = decoder.decode([[]])
    assert isinstance(bad, InvalidInput)


def test_other_errors_are_raised(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_image: bytes, _spec: Preprocess, **_: Any) -> AnyArray:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(module, "load_sample", fail)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        decoder.decode([[GOOD["jpeg"]]])


def test_caller_decodes_beside_the_threads(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    together, seen = threading.Barrier(3, timeout=60), set[threading.Thread]()

    def load(_image: bytes, _spec: Preprocess, **_: Any) -> AnyArray:
        together.wait()
        seen.add(threading.current_thread())
        return np.zeros(1, np.uint8)

    monkeypatch.setattr(module, "load_sample", load)
    first, second = decoder.decode([[b"a"] * 4, [b"b"] * 2])
    assert (len(first), len(second), len(seen)) == (4, 2, 3)
    assert threading.current_thread() in seen


def test_single_image_is_decoded_by_the_caller(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[threading.Thread] = []

    def load(_image: bytes, _spec: Preprocess, **_: Any) -> AnyArray:
        seen.append(threading.current_thread())
        return np.zeros(1, np.uint8)

    monkeypatch.setattr(module, "load_sample", load)
    decoder.decode([[], [b"a"]])
    assert seen == [threading.current_thread()]


def test_decoder_is_thread_safe(decoder: Decoder) -> None:
    images = [[image] for image in GOOD.values()]
    expected = [load_sample(image, SPEC)[np.newaxis].tobytes() for (image,) in images]
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(decoder.decode, [images] * 8):
            assert [samples.tobytes() for samples in found if isinstance(samples, np.ndarray)] == expected


def test_images_take_from_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    class Recorded(PixelBudget):
        @contextmanager
        def take(self, pixels: int) -> Iterator[None]:
            with super().take(pixels):
                taken.append(pixels)
                yield

    monkeypatch.setattr(module, "PixelBudget", Recorded)
    with Decoder(SPEC, threads=2) as decoder:
        first, second = decoder.decode([[encode(40, 24), encode(30, 20, kind="PNG")], [encode(20, 20, kind="GIF")]])
    assert (len(first), len(second), sorted(taken)) == (2, 1, [400, 600, 960])


def test_decoding_times(decoder: Decoder) -> None:
    decoder.decode([[GOOD["jpeg"], GOOD["png"]], [b"hello"]])
    assert len(decoder.seconds) == 3
    assert 0 < sum(decoder.seconds) < 60


# How many pixels are in memory at once.


class TestPixelBudget:
    def test_budget_is_not_exceeded(self) -> None:
        budget, lock, held, most = PixelBudget(100), threading.Lock(), [0], [0]

        def hold(pixels: int) -> None:
            with budget.take(pixels):
                with lock:
                    held[0] += pixels
                    most[0] = max(most[0], held[0])
                with lock:
                    held[0] -= pixels

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(hold, [70, 40, 30, 90, 10] * 40))
        assert 0 < most[0] <= 100

    def test_image_above_the_budget_is_alone(self) -> None:
        budget = PixelBudget(100)
        other, over = threading.Event(), threading.Event()

        def small() -> bool:
            other.set()
            with budget.take(1):
                return over.is_set()

        with ThreadPoolExecutor(1) as pool:
            with budget.take(1000):
                waiting = pool.submit(small)
                assert other.wait(30)
                assert not waiting.done()
                over.set()
            assert waiting.result(30)
