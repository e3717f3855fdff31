"""Bytes on a bare connection: HTTP/1.1 with broken framing, HTTP/2 with broken frames, and what is neither."""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from hypothesis import strategies as st

from soaking.fuzz_values import damaged

_CHUNK = 65536
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client's HTTP/2 connection begins with. Source: RFC 9113, 3.4."""
_LENGTHS = ("0", "-1", "5", "10", "+5", "0x10", "18446744073709551616", "4294967296", "1e3", "5, 6", "", "abc")
_CHUNKS = (
    b"5\r\nhello\r\n0\r\n\r\n",
    b"ffffffffffffffff\r\nx",
    b"-1\r\n",
    b"zz\r\n",
    b"0\r\n\r\n",
    b"5\r\nhel",
    b"7fffffff\r\n",
)


@dataclass(frozen=True, kw_only=True)
class RawCase:
    """What is sent over one connection.

    Attributes:
        kind: Which strategy made it.
        protocol: Whose port it is sent to.
        body: Everything that is sent.
        model: Always None: nothing here must be answered rightly.
    """

    kind: str
    protocol: Literal["HTTP", "gRPC"]
    body: bytes
    model: None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.body[:500]!r}"


@st.composite
def broken_http(draw: st.DrawFn) -> RawCase:
    """Requests whose lines, headers, lengths or chunks are not those of HTTP."""
    parts = [draw(_requests()) for _ in range(draw(st.integers(1, 3)))]  # several: one behind the other
    body = b"".join(parts)
    return RawCase(
        kind="HTTP broken framing", protocol="HTTP", body=draw(st.one_of(st.just(body), st.just(body), damaged(body)))
    )


def _mostly(right: bytes, *wrong: bytes) -> st.SearchStrategy[bytes]:
    """Three of four times the right one: what is wrong in every place is refused at the first."""
    return st.integers(0, 3).flatmap(lambda number: st.just(right) if number else st.sampled_from(wrong))


@st.composite
def _requests(draw: st.DrawFn) -> bytes:
    method = draw(_mostly(b"POST", b"GET", b"post", b"P\x00ST", b"", b"X" * 5000, b"CONNECT", b"PRI"))
    path = draw(_mostly(b"/v2/models/fixed/infer", b"/v2", b"*", b"http://x/v2", b"/" + b"a" * 9000, b"", b"/%"))
    version = draw(_mostly(b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/9.9", b"", b"HTTP/1.1 x"))
    lines = [b" ".join((method, path, version)), *draw(st.lists(_headers(), max_size=4))]
    body = draw(st.one_of(st.binary(max_size=40), st.sampled_from(_CHUNKS)))
    return draw(_mostly(b"\r\n", b"\n", b"\r")).join(lines) + b"\r\n\r\n" + body


@st.composite
def _headers(draw: st.DrawFn) -> bytes:
    length = draw(st.sampled_from(_LENGTHS)).encode()
    return draw(
        st.sampled_from(
            (
                b"Content-Length: " + length, b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked, gzip",
                b"Inference-Header-Content-Length: " + length, b"Expect: 100-continue", b"Connection: upgrade",
                b"Upgrade: h2c", b"Host: x", b"Host", b": x", b"X: " + b"y" * 70_000, b" folded: x", b"X\x00Y: z",
                b"Content-Encoding: gzip", b"Connection: close", b"\xff\xfe: \xff",
            )
        )
    )  # fmt: skip


@st.composite
def broken_http2(draw: st.DrawFn) -> RawCase:
    """HTTP/2 frames of any type, with lengths, flags and streams that need not fit."""
    frames = b"".join(draw(st.lists(_frames(), max_size=6)))
    preface = draw(st.sampled_from((_PREFACE, _PREFACE, _PREFACE, b"", _PREFACE[:10])))
    return RawCase(kind="gRPC broken framing", protocol="gRPC", body=preface + frames)


@st.composite
def _frames(draw: st.DrawFn) -> bytes:
    payload = draw(st.binary(max_size=60))
    length = draw(st.one_of(st.just(len(payload)), st.sampled_from((0, 1, 2**14, 2**14 + 1, 2**24 - 1))))
    kind, flags = draw(st.integers(0, 12)), draw(st.integers(0, 255))
    stream = draw(st.sampled_from((0, 1, 2, 3, 2**31 - 1, 2**32 - 1)))
    return length.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def exchange(connection: socket.socket, body: bytes) -> str:
    """Sends bytes, says that no more will come, and waits until the other end says so, too.

    Returns:
        The status of an HTTP response, or what else there was.

    Raises:
        TimeoutError: The other end keeps the connection.
    """
    received = b""
    with suppress(ConnectionError):
        connection.sendall(body)
        with suppress(OSError):  # the other end has hung up by now
            connection.shutdown(socket.SHUT_WR)
        while (chunk := connection.recv(_CHUNK)) and len(received) < _CHUNK:
            received += chunk
    words = received.split(maxsplit=2)
    if received.startswith(b"HTTP/") and len(words) > 1:
        return words[1].decode(errors="replace")
    return "other bytes" if received else "closed"
