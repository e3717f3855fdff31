"""How much of a response is read."""

from __future__ import annotations

import gzip
import zlib

import pytest

from graphkiln_backend.graph.errors import InvalidInput, ProtocolError
from graphkiln_backend.graph.files import MIB
from graphkiln_client.transports import base as limits
from graphkiln_client.transports.base import check_json, decompress, infer_limit


class TestInferLimit:
    def test_is_the_environments(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert infer_limit() == 256 * MIB
        monkeypatch.setenv(limits.VARIABLE, "3")
        assert infer_limit() == 3 * MIB

    @pytest.mark.parametrize("text", ["0", "-1", "x", "1.5", "9" * 30])
    def test_is_a_number(self, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
        monkeypatch.setenv(limits.VARIABLE, text)
        with pytest.raises(InvalidInput, match=f"{limits.VARIABLE} must be a number of MiB"):
            infer_limit()


class TestDecompress:
    @pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
    def test_up_to_the_limit(self, encoding: str, pack: object) -> None:
        assert callable(pack)
        assert decompress(pack(bytes(100)), encoding, 100) == bytes(100)
        with pytest.raises(ProtocolError, match="larger than 99 bytes"):
            decompress(pack(bytes(100)), encoding, 99)

    def test_several_members_and_padding(self) -> None:
        assert decompress(gzip.compress(b"a") + gzip.compress(b"b") + bytes(9), "gzip", 2) == b"ab"
        with pytest.raises(ProtocolError, match="larger than"):
            decompress(gzip.compress(b"a") + gzip.compress(b"b"), "gzip", 1)

    def test_what_is_cut_short(self) -> None:
        with pytest.raises(ProtocolError, match="decompressed as gzip"):
            decompress(gzip.compress(bytes(1000))[:-9], "gzip", 1000)


class TestJson:
    @pytest.mark.parametrize(
        ("body", "reason"),
        [(b"[" * 4_000_001, "more than 4000000 lists"), (bytes(64 * MIB + 1), "larger than 64 MiB")],
    )
    def test_more(self, body: bytes, reason: str) -> None:
        with pytest.raises(ProtocolError, match=reason):
            check_json(body)
