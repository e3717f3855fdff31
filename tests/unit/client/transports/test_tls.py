"""TLS over HTTP and gRPC."""

from __future__ import annotations

import datetime
import ssl
from collections.abc import Callable
from typing import Any

import grpc
import pytest
import trustme
from canned import GRPC_INFERRED, INFERRED, CannedGrpc, CannedHttp

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConnectionFailed

Infer = Callable[..., dict[str, AnyArray]]


class TestTls:
    def context(self, authority: trustme.CA, **options: Any) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1", **options).configure_cert(context)
        return context

    def test_trusted_server(self, infer: Infer, tmp_path: Any) -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        with CannedHttp([INFERRED], context=self.context(authority)) as server:
            assert infer(server.url, ca_file=tmp_path / "ca.pem")["Y"] == [2]
            with pytest.raises(ConnectionFailed, match="cannot trust"):
                infer(server.url, max_retries=0)

    def test_expired_certificate_is_not_trusted(self, infer: Infer, tmp_path: Any) -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
        context = self.context(authority, not_before=past, not_after=past + datetime.timedelta(days=1))
        with CannedHttp([INFERRED], context=context) as server, pytest.raises(ConnectionFailed, match="expired"):
            infer(server.url, ca_file=tmp_path / "ca.pem", max_retries=0)

    def test_server_without_tls(self, infer: Infer) -> None:
        with (
            CannedHttp([INFERRED]) as server,
            pytest.raises(ConnectionFailed, match=r"TLS handshake|closed the connection|cannot reach https"),
        ):
            infer(server.url.replace("http", "https"), max_retries=0)

    @pytest.mark.parametrize("days", [1, -1])
    def test_grpc_certificates(self, infer: Infer, tmp_path: Any, days: int) -> None:
        authority, now = trustme.CA(), datetime.datetime.now(datetime.UTC)
        authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
        ends = now + datetime.timedelta(days=days)
        issued = authority.issue_cert("127.0.0.1", not_before=now - datetime.timedelta(days=9), not_after=ends)
        pair = (issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes())
        with CannedGrpc([GRPC_INFERRED], credentials=grpc.ssl_server_credentials([pair])) as server:
            if days > 0:
                assert infer(server.url, ca_file=tmp_path / "ca.pem")["Y"] == [2]
                with pytest.raises(ConnectionFailed, match="cannot reach grpcs"):
                    infer(server.url, max_retries=0)
            else:
                with pytest.raises(ConnectionFailed, match="expired"):
                    infer(server.url, ca_file=tmp_path / "ca.pem", max_retries=0)
