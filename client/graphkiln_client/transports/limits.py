"""Bounds of what is read of a response, the same for every transport.

A server may be broken, or another one than the user took it for.
"""

from __future__ import annotations

import os
import zlib

from graphkiln_backend.graph.errors import InvalidInput, ProtocolError
from graphkiln_backend.graph.files import KIB, MIB, format_size

VARIABLE = "GRAPHKILN_MAX_RESPONSE_MIB"
INFER_LIMIT = 256 * MIB  # of a response with tensors, unless the environment says otherwise
JSON_LIMIT = 64 * MIB  # of tensors in JSON, and of the header of binary ones
DOCUMENT_LIMIT = 16 * MIB  # of metadata, configurations, statistics and the index
HEAD_LIMIT = 256 * KIB  # of all headers together

# Lists and objects in JSON: empty, each takes two bytes in a response and eighty in memory.
_MOST_CONTAINERS = 4_000_000
_CHUNK_OVERHEAD = 8  # bytes around each byte of a body in chunks of one
_MOST_MEMBERS = 16
_WBITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


def infer_limit() -> int:
    """Most bytes of a response with tensors.

    Raises:
        InvalidInput: The environment names no number.
    """
    text = os.environ.get(VARIABLE, "")
    if text and not (text.isdecimal() and 0 < int(text) < 1 << 20):
        raise InvalidInput(f"{VARIABLE} must be a number of MiB, got {text[:40]!r}")
    return int(text) * MIB if text else INFER_LIMIT


def too_large(limit_bytes: int) -> ProtocolError:
    """The error of a response that is larger than its limit."""
    hint = f"if it may be so large, set {VARIABLE}, or take it through shared memory"
    return ProtocolError(
        f"the response is larger than {format_size(limit_bytes)} and was not read to its end",
        hint="" if limit_bytes in (HEAD_LIMIT, JSON_LIMIT, DOCUMENT_LIMIT) else hint,
    )


def check_json(body: bytes) -> None:
    """Refuse JSON that would take a multiple of its size in memory.

    Raises:
        ProtocolError: It is too large, or holds too many lists and objects.
    """
    if len(body) > JSON_LIMIT:
        raise too_large(JSON_LIMIT)
    if body.count(b"[") + body.count(b"{") > _MOST_CONTAINERS:
        raise ProtocolError(f"the response's JSON holds more than {_MOST_CONTAINERS} lists and objects")


def decompress(body: bytes, encoding: str, limit_bytes: int = INFER_LIMIT) -> bytes:
    """Decompress the body of a response, of which gzip may have several members.

    Args:
        body: The body.
        encoding: Its `Content-Encoding`.
        limit_bytes: Most bytes of the result.

    Raises:
        ProtocolError: The encoding is unknown, or the body is damaged or would become too large.
    """
    if encoding in ("", "identity"):
        return body
    try:
        return _inflate(body, _WBITS[encoding], limit_bytes)
    except (KeyError, EOFError, zlib.error) as error:
        raise ProtocolError(f"the response cannot be decompressed as {encoding[:40]}: {str(error)[:80]}") from error


def _inflate(body: bytes, wbits: int, limit_bytes: int) -> bytes:
    is_gzip, size = wbits == _WBITS["gzip"], 0
    parts: list[bytes] = []
    while body or not (parts or is_gzip):
        inflater = zlib.decompressobj(wbits)
        parts.append(inflater.decompress(body, limit_bytes - size + 1))
        size += len(parts[-1])
        if size > limit_bytes or len(parts) > _MOST_MEMBERS:
            raise too_large(limit_bytes)
        if not inflater.eof:
            raise EOFError("it is incomplete")
        body = inflater.unused_data.lstrip(b"\0") if is_gzip else b""
    return parts[0] if len(parts) == 1 else b"".join(parts)


class BoundedBody:
    """The body of a response as it comes in, of at most `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        self.size = 0
        self._limit = limit_bytes
        self._content = bytearray()

    def expect(self, length: str | None) -> None:
        """Check the length that the server declares.

        Raises:
            ProtocolError: It is over the limit.
        """
        if length and length.isdecimal() and (len(length) > 18 or int(length) > self._limit):
            raise too_large(self._limit)

    def add(self, piece: bytes) -> None:
        """Add a piece; one beyond the limit is only counted, for `check`."""
        self.size += len(piece)
        if self.size <= self._limit:
            self._content += piece

    def check(self, received: int = 0) -> None:
        """Refuse a body over the limit.

        Args:
            received: Bytes that came in for this body, with everything around it.

        Raises:
            ProtocolError: There is too much body, or too much around it.
        """
        if self.size > self._limit or received > HEAD_LIMIT + (1 + _CHUNK_OVERHEAD) * self.size:
            raise too_large(self._limit)

    def content(self) -> bytes:
        """The body."""
        return bytes(self._content)
