"""Images in every usual form, and which of them are sent encoded."""

from __future__ import annotations

import io
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import canned
import numpy as np
import pytest
import trustme
from canned import CannedHttp, hang_up, http, silence, trickle
from PIL import Image

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConnectionFailed, DeadlineExceeded, InvalidInput
from graphkiln_backend.graph.preprocess import Letterbox, Preprocess
from graphkiln_client import preparing as module
from graphkiln_client.preparing import check_form, choose_encoded, download, prepare, to_tensor

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
    assert to_tensor([b"a", b"b\0"], batch_dimension=True).tolist() == [[b"a"], [b"b\0"]]
    assert to_tensor([b"a"], batch_dimension=False).tolist() == [b"a"]


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


# Downloads: over HTTPS only, of bounded size, and every failure an error of ours.


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ssl.SSLContext]:
    """Of a server that this process trusts."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    monkeypatch.delenv("https_proxy", raising=False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


def moved(location: str, status: str = "302 Found") -> bytes:
    return http(b"", status, f"Location: {location}")


def test_the_content(context: ssl.SSLContext) -> None:
    content = bytes(range(256)) * 1000
    with CannedHttp([http(content)], context=context) as server:
        assert download(f"{server.url}/a/b.png?c=d", 5) == content
        assert server.requests[0].startswith(b"GET /a/b.png?c=d HTTP/1.1\r\n")


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
def test_redirects_are_followed(context: ssl.SSLContext, status: str) -> None:
    with CannedHttp([moved("/there", status), http(b"content")], context=context) as server:
        assert download(f"{server.url}/here", 5) == b"content"
        assert [request.split(b" ")[1] for request in server.requests] == [b"/here", b"/there"]


def test_but_not_for_ever(context: ssl.SSLContext) -> None:
    with (
        CannedHttp([moved("/here")], context=context) as server,
        pytest.raises(InvalidInput, match=r"cannot fetch .*returned 302"),
    ):
        download(f"{server.url}/here", 5)


@pytest.mark.parametrize("location", ["http://127.0.0.1:9/x", "ftp://127.0.0.1/x", "file:///etc/passwd", "gopher://x"])
def test_and_to_https_only(context: ssl.SSLContext, location: str) -> None:
    with (
        CannedHttp([moved(location)], context=context) as server,
        pytest.raises(InvalidInput, match=r"redirects to|returned 302"),
    ):
        download(f"{server.url}/here", 5)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/x", "ftp://127.0.0.1/x", "file:///etc/passwd", "data:,x", "/etc/passwd", "", "HTTP://x"]
)
def test_other_urls_are_never_opened(url: str) -> None:
    with pytest.raises(InvalidInput, match="not an https:// URL"):
        download(url, 5)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 429, 500, 503])
def test_an_error_of_the_server(context: ssl.SSLContext, status: int) -> None:
    with CannedHttp([http(b"why", f"{status} Oh")], context=context) as server:
        with pytest.raises(InvalidInput, match=f"returned {status}") as caught:
            download(f"{server.url}/here", 5)
        assert caught.value.status == status
        assert len(server.requests) == 1


@pytest.mark.parametrize(("size", "fits"), [(99, True), (100, True), (101, False), (5000, False)])
def test_no_more_than_the_limit(
    context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch, size: int, fits: bool
) -> None:
    monkeypatch.setattr(module, "_DOWNLOAD_LIMIT", 100)
    with CannedHttp([http(b"x" * size)], context=context) as server:
        if fits:
            assert len(download(f"{server.url}/here", 5)) == size
        else:
            with pytest.raises(InvalidInput, match="is larger than"):
                download(f"{server.url}/here", 5)


@pytest.mark.parametrize(
    "answer", [hang_up, b"nonsense\r\n\r\n", lambda connection: connection.sendall(http(b"x", length=9))]
)
def test_a_connection_that_breaks(context: ssl.SSLContext, answer: Any) -> None:
    with (
        CannedHttp([answer], context=context) as server,
        pytest.raises(ConnectionFailed, match="cannot fetch https://127"),
    ):
        download(f"{server.url}/here", 5)


def test_a_server_that_says_nothing(context: ssl.SSLContext) -> None:
    with CannedHttp([silence], context=context) as server, pytest.raises(ConnectionFailed, match="timed out"):
        download(f"{server.url}/here", 0.2)


@pytest.mark.usefixtures("context")
def test_a_server_that_is_not_there() -> None:
    with pytest.raises(ConnectionFailed, match="cannot fetch"):
        download("https://127.0.0.1:9/here", 5)


def test_a_server_that_sends_byte_after_byte(context: ssl.SSLContext) -> None:
    answer = trickle(http(bytes(1000)), 0.01)
    with CannedHttp([answer], context=context) as server, pytest.raises(DeadlineExceeded, match="did not come within"):
        download(f"{server.url}/x", 1)
