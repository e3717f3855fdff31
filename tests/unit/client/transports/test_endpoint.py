"""Parsing of URLs, headers and certificate authorities."""

from __future__ import annotations

import base64
import ssl
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_client.transports.endpoint import Endpoint


def parse(url: str, headers: dict[str, str] | None = None, ca_file: Path | None = None) -> Endpoint:
    return Endpoint.parse(url, headers or {}, ca_file)


class TestUrls:
    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            ("localhost:8000", "http://localhost:8000"),
            ("localhost", "http://localhost:80"),
            ("http://host", "http://host:80"),
            ("https://host", "https://host:443"),
            ("grpc://host", "grpc://host:8001"),
            ("grpcs://host", "grpcs://host:443"),
            ("HTTP://Host:1", "http://host:1"),
            ("http://[::1]:8000", "http://[::1]:8000"),
            ("http://[fe80::1]", "http://[fe80::1]:80"),
            ("http://host:8000/", "http://host:8000"),
            ("https://gateway/triton/a/", "https://gateway:443/triton/a"),
            ("https://gateway/a%20b/c d/\u00e4", "https://gateway:443/a%20b/c%20d/%C3%A4"),
            ("http://B\u00fccher.example:8000", "http://xn--bcher-kva.example:8000"),
            ("grpc://b\u00fccher.example", "grpc://xn--bcher-kva.example:8001"),
            ("http://user:pass@host:9", "http://host:9"),
            ("user@host:9", "http://host:9"),
        ],
    )
    def test_url_forms(self, url: str, shown: str) -> None:
        assert str(parse(url)) == shown

    @pytest.mark.parametrize("url", ["ftp://host", "http://", "", "://host", "http://host:0"])
    def test_unsupported_urls(self, url: str) -> None:
        with pytest.raises(InvalidInput, match="unsupported URL") as caught:
            parse(url)
        assert "grpcs://HOST:PORT" in caught.value.hint

    @pytest.mark.parametrize(
        "url",
        [
            "http://host:port",
            "http://host:-1",
            "http://\u2028",
        ],
    )
    def test_invalid_urls(self, url: str) -> None:
        with pytest.raises(InvalidInput, match="is not a URL"):
            parse(url)

    @pytest.mark.parametrize("scheme", ["grpc", "grpcs"])
    def test_grpc_url_with_path_is_refused(self, scheme: str) -> None:
        with pytest.raises(InvalidInput, match="no path"):
            parse(f"{scheme}://gateway/triton")
        assert parse(f"{scheme}://host:1/").path == ""

    @pytest.mark.parametrize("rest", ["?key=s3cret", "/a?key=s3cret", "#s3cret"])
    def test_query_and_fragment_are_refused(self, rest: str) -> None:
        with pytest.raises(InvalidInput, match="must not contain") as caught:
            parse(f"http://host:8000{rest}")
        assert "s3cret" not in str(caught.value)

    @pytest.mark.parametrize("url", ["ftp://me:s3cret@host", "http://me:s3cret@host:port", "x://me:s3cret@"])
    def test_errors_show_no_password(self, url: str) -> None:
        with pytest.raises(InvalidInput) as caught:
            parse(url)
        assert "s3cret" not in str(caught.value)

    @given(st.text(max_size=40))
    def test_only_own_errors_are_raised(self, url: str) -> None:
        try:
            endpoint = parse(url)
        except InvalidInput:
            return
        assert endpoint.host
        assert 0 < endpoint.port < 65536

    @pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "[::1]", "0.0.0.0"])
    def test_local_hosts(self, host: str) -> None:
        assert parse(f"http://{host}:8000").is_local

    @pytest.mark.parametrize("host", ["far.away", "10.0.0.1", "[fe80::1]", "localhost.far.away", "notlocalhost"])
    def test_remote_hosts(self, host: str) -> None:
        assert not parse(f"http://{host}:8000").is_local


class TestCredentials:
    @pytest.mark.parametrize(
        ("userinfo", "plain"),
        [("me:pass", "me:pass"), ("me", "me:"), ("me:p%40ss%3A", "me:p@ss:"), ("%C3%A4:x", "\u00e4:x"), (":x", ":x")],
    )
    def test_url_credentials_become_a_header(self, userinfo: str, plain: str) -> None:
        header = parse(f"http://{userinfo}@host").headers["Authorization"]
        assert header.partition(" ")[0] == "Basic"
        assert base64.b64decode(header.partition(" ")[2]).decode() == plain

    def test_explicit_header_overrides_url_credentials(self) -> None:
        endpoint = parse("http://me:pass@host", {"Authorization": "Bearer mine"})
        assert endpoint.headers == {"Authorization": "Bearer mine"}

    def test_credentials_are_not_shown(self) -> None:
        endpoint = parse("http://me:s3cret@host", {"X-Token": "s3cret"})
        assert "s3cret" not in f"{endpoint} {endpoint!r}"
        assert base64.b64encode(b"me:s3cret").decode() not in repr(endpoint)


class TestHeaders:
    @pytest.mark.parametrize("name", ["", "X Token", "X\r\nY", "X\u00e4", "--"])
    def test_invalid_names(self, name: str) -> None:
        with pytest.raises(InvalidInput, match="not a valid header name"):
            parse("http://host", {name: "x"})

    @pytest.mark.parametrize("value", ["a\r\nX-B: b", "\x00", "\u00e4"])
    def test_invalid_header_value(self, value: str) -> None:
        with pytest.raises(InvalidInput, match="X-Token contains characters") as caught:
            parse("http://host", {"X-Token": f"s3cret{value}"})
        assert "s3cret" not in str(caught.value)


class TestTls:
    def test_tls_verifies_server(self) -> None:
        context = parse("https://host").tls()
        assert context is not None
        assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)

    @pytest.mark.parametrize("content", [None, "", "nonsense"])
    def test_file_without_certificates(self, tmp_path: Path, content: Any) -> None:
        file = tmp_path / "ca.pem"
        if content is not None:
            file.write_text(content)
        with pytest.raises(InvalidInput, match=r"cannot read certificate authorities from .*ca\.pem"):
            parse("https://host", ca_file=file).tls()
