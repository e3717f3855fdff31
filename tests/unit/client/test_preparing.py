"""Images in every usual form, and which of them are sent encoded."""

from __future__ import annotations

import io
import ssl
from pathlib import Path

import canned
import numpy as np
import pytest
import trustme
from PIL import Image

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConnectionFailed, InvalidInput
from graphkiln_backend.graph.preprocess import Letterbox, Preprocess
from graphkiln_client.preparing import check_form, choose_encoded, prepare, to_tensor

SPEC = Preprocess(crop=(2, 2))  # 48 bytes in FP32


@pytest.mark.parametrize(
    ("spec", "size_bytes"),
    [
        (SPEC, 48),
        (Preprocess(crop=(2, 2), dtype=DType.UINT8), 12),
        (Preprocess(resize=(2, 3), color="L"), 24),
        (Preprocess(letterbox=Letterbox(size=(2, 2))), 48),
    ],
)
def test_what_is_smaller_than_its_sample_is_sent(spec: Preprocess, size_bytes: int) -> None:
    images = [bytes(size_bytes - 1), bytes(size_bytes)]
    assert list(choose_encoded(images, "auto", spec, fetch_timeout_s=None)) == [0]


def test_where_no_size_is_known_images_are_sent() -> None:
    assert choose_encoded([bytes(1 << 20)], "auto", Preprocess(resize=2), fetch_timeout_s=None)


def test_images_are_chosen_by_their_place(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(b"x")
    large.write_bytes(bytes(48))
    images = [small, large, str(small), b"y", np.zeros((1, 1, 3), np.uint8), tmp_path / "missing", "https://x/y.png"]
    chosen = choose_encoded(images, "auto", SPEC, fetch_timeout_s=None)
    assert chosen == {0: b"x", 2: b"x", 3: b"y"}
    assert choose_encoded(images, "encoded", SPEC, fetch_timeout_s=None) == {**chosen, 1: bytes(48)}


def test_the_tensor_has_an_element_for_each_image() -> None:
    assert to_tensor([b"a", b"b\0"], batched=True).tolist() == [[b"a"], [b"b\0"]]
    assert to_tensor([b"a"], batched=False).tolist() == [b"a"]


def test_another_form_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'auto', 'encoded' or 'tensor', got 'jpeg'"):
        check_form("jpeg")


RAW = Preprocess(dtype=DType.UINT8, layout="HWC")


def encoded(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


class TestUrls:
    def test_they_are_fetched_only_on_demand(self) -> None:
        with pytest.raises(InvalidInput, match="fetch_urls=True"):
            prepare("https://example.invalid/cat.png", RAW)

    @pytest.fixture
    def authority(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> trustme.CA:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        return authority

    def context(self, authority: trustme.CA) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        return context

    def test_an_image_from_the_web(self, authority: trustme.CA) -> None:
        image = Image.effect_noise((6, 4), 80).convert("RGB")
        moved = canned.http(b"", "302 Found", "Location: /there.png")
        with canned.CannedHttp([moved, canned.http(encoded(image))], context=self.context(authority)) as server:
            sample = prepare(f"{server.url}/here.png", RAW, fetch_timeout_s=5).sample
        np.testing.assert_array_equal(sample, np.asarray(image))

    def test_a_server_that_nobody_trusts(self) -> None:
        with (
            canned.CannedHttp([canned.http(b"")], context=self.context(trustme.CA())) as server,
            pytest.raises(ConnectionFailed, match="certificate"),
        ):
            prepare(f"{server.url}/here.png", RAW, fetch_timeout_s=5)

    def test_an_image_that_cannot_be_decoded_is_named_by_its_url(self, authority: trustme.CA) -> None:
        with (
            canned.CannedHttp([canned.http(b"no image")], context=self.context(authority)) as server,
            pytest.raises(InvalidInput, match=f"{server.url}/here.png: 8 bytes is not an image") as caught,
        ):
            prepare(f"{server.url}/here.png", RAW, fetch_timeout_s=5)
        assert "JPEG" in caught.value.hint

    @pytest.mark.parametrize("text", ["https.png", "ftp://host/x.png", "HTTPS://host/x.png", "./https://x.png"])
    def test_what_is_no_url_is_a_file(self, text: str) -> None:
        with pytest.raises(InvalidInput, match="there is no file"):
            prepare(text, RAW, fetch_timeout_s=5)


class TestFiles:
    def test_a_path_or_its_text(self, tmp_path: Path) -> None:
        image = Image.effect_noise((6, 4), 80).convert("RGB")
        (tmp_path / "a.png").write_bytes(encoded(image))
        for path in (tmp_path / "a.png", str(tmp_path / "a.png")):
            np.testing.assert_array_equal(prepare(path, RAW).sample, np.asarray(image))

    def test_encoded_bytes(self) -> None:
        image = Image.effect_noise((6, 4), 80).convert("RGB")
        np.testing.assert_array_equal(prepare(encoded(image), RAW, fetch_timeout_s=1).sample, np.asarray(image))

    def test_pixels(self) -> None:
        pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
        np.testing.assert_array_equal(prepare(pixels, RAW).sample, pixels)
