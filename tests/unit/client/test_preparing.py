"""Preparation and download of images."""

from __future__ import annotations

import io
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme
from canned import CannedHttp, hang_up, http, silence, trickle
from PIL import Image

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConnectionFailed, DeadlineExceeded, InvalidInput
from graphkiln_backend.graph.preprocess import Letterbox, Preprocess
from graphkiln_client import preparing as module
from graphkiln_client.preparing import download, prepare

RAW = Preprocess(dtype=DType.UINT8, layout="HWC")
NOISE = Image.effect_noise((6, 4), 80).convert("RGB")


def encoded(image: Image.Image = NOISE) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("spec", "sample_bytes"),
    [
        (Preprocess(crop=(4, 4)), 192),
        (Preprocess(crop=(8, 8), dtype=DType.UINT8), 192),
        (Preprocess(resize=(6, 4), color="L"), 96),
        (Preprocess(letterbox=Letterbox(size=(4, 4))), 192),
        (Preprocess(resize=2), 1 << 30),  # the size of its sample is not known before
    ],
)
def test_small_image_is_sent_encoded(spec: Preprocess, sample_bytes: int) -> None:
    content = encoded(Image.new("RGB", (16, 16)))
    for size in (len(content), 95, 96, 191, 192, 1 << 16):
        image = content.ljust(size, b"\0")
        assert isinstance(prepare(image, spec, "auto"), bytes) == (len(image) < sample_bytes)
        assert prepare(image, spec, "encoded") == image
        assert not isinstance(prepare(image, spec, "tensor"), bytes)


def test_image_types(tmp_path: Path) -> None:
    path, pixels = tmp_path / "a.png", np.asarray(NOISE)
    path.write_bytes(encoded())
    for image in (path, str(path), encoded(), NOISE, pixels):
        np.testing.assert_array_equal(prepare(image, RAW).sample, pixels)
    for image in (path, str(path), encoded()):
        assert prepare(image, RAW, "encoded") == encoded()
    for image in (NOISE, pixels):
        np.testing.assert_array_equal(prepare(image, RAW, "encoded").sample, pixels)


@pytest.mark.parametrize("text", ["https.png", "ftp://host/x.png", "HTTPS://host/x.png", "./https://x.png"])
@pytest.mark.parametrize("form", ["auto", "tensor"])
def test_other_strings_are_paths(text: str, form: Any) -> None:
    with pytest.raises(InvalidInput, match="there is no file"):
        prepare(text, RAW, form, fetch_timeout_s=5)


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ssl.SSLContext]:
    """TLS context of a trusted server."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    monkeypatch.delenv("https_proxy", raising=False)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    return context


def moved(location: str, status: str = "302 Found") -> bytes:
    return http(b"", status, f"Location: {location}")


@pytest.mark.parametrize("form", ["auto", "tensor", "encoded"])
def test_download_image(context: ssl.SSLContext, form: Any) -> None:
    with CannedHttp([moved("/there"), http(encoded())], context=context) as server:
        image = prepare(f"{server.url}/here", RAW, form, fetch_timeout_s=5)
    if form == "tensor":
        np.testing.assert_array_equal(image.sample, np.asarray(NOISE))
    else:
        assert image == encoded()


@pytest.mark.parametrize("status", ["302 Found", "308 Permanent"])
def test_redirects_are_followed(context: ssl.SSLContext, status: str) -> None:
    content = bytes(range(256)) * 1000
    with CannedHttp([moved("/there?c=d", status), http(content)], context=context) as server:
        assert download(f"{server.url}/here", 5) == content
        assert [request.split(b" ")[1] for request in server.requests] == [b"/here", b"/there?c=d"]


@pytest.mark.parametrize("location", ["/here", "http://127.0.0.1:9/x", "file:///etc/passwd"])
def test_invalid_redirects(context: ssl.SSLContext, location: str) -> None:
    with (
        CannedHttp([moved(location)], context=context) as server,
        pytest.raises(InvalidInput, match=r"redirects to|returned 302"),
    ):
        download(f"{server.url}/here", 5)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/x", "file:///etc/passwd", ""])
def test_only_https_urls(url: str) -> None:
    with pytest.raises(InvalidInput, match="not an https:// URL"):
        download(url, 5)


@pytest.mark.parametrize("status", [404, 503])
def test_download_error_status(context: ssl.SSLContext, status: int) -> None:
    with CannedHttp([http(b"why", f"{status} Oh")], context=context) as server:
        with pytest.raises(InvalidInput, match=f"returned {status}") as caught:
            download(f"{server.url}/here", 5)
        assert caught.value.status == status
        assert len(server.requests) == 1


@pytest.mark.parametrize(("size", "fits"), [(100, True), (101, False)])
def test_download_limit(context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch, size: int, fits: bool) -> None:
    monkeypatch.setattr(module, "_DOWNLOAD_LIMIT", 100)
    with CannedHttp([http(b"x" * size)], context=context) as server:
        if fits:
            assert len(download(f"{server.url}/here", 5)) == size
        else:
            with pytest.raises(InvalidInput, match="is larger than"):
                download(f"{server.url}/here", 5)


@pytest.mark.parametrize(
    ("answer", "error", "word"),
    [
        (hang_up, ConnectionFailed, "cannot fetch"),
        (b"nonsense\r\n\r\n", ConnectionFailed, "cannot fetch"),
        (lambda connection: connection.sendall(http(b"x", length=9)), ConnectionFailed, "before the end"),
        (silence, ConnectionFailed, "timed out"),
        (trickle(http(bytes(1000)), 0.01), DeadlineExceeded, "not downloaded within"),
    ],
    ids=["closed", "other protocol", "cut short", "silence", "byte after byte"],
)
def test_broken_download(context: ssl.SSLContext, answer: Any, error: Any, word: str) -> None:
    with CannedHttp([answer], context=context) as server, pytest.raises(error, match=word):
        download(f"{server.url}/here", 0.5)


def test_untrusted_server() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    with (
        CannedHttp([http(b"")], context=context) as server,
        pytest.raises(ConnectionFailed, match="certificate"),
    ):
        prepare(f"{server.url}/here.png", RAW, fetch_timeout_s=5)
