"""A server with mutual TLS, over both protocols."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from running import Server, Serving, run_command

from graphkiln_backend.graph.errors import ConnectionFailed
from graphkiln_client import Client

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates: ca.pem, server.pem, client.pem and expired.pem, each with its key; other.pem is another CA."""
    folder = tmp_path_factory.mktemp("pki")
    authority = trustme.CA()
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    trustme.CA().cert_pem.write_to_path(str(folder / "other.pem"))
    server = authority.issue_cert("127.0.0.1", "localhost")
    server.private_key_pem.write_to_path(str(folder / "server.key"))
    server.cert_chain_pems[0].write_to_path(str(folder / "server.pem"))
    expired = authority.issue_cert("a@b.org", not_before=past, not_after=past + datetime.timedelta(days=9))
    strange = trustme.CA().issue_cert("a@b.org")
    for name, pair in (("client", authority.issue_cert("a@b.org")), ("expired", expired), ("stranger", strange)):
        pair.private_key_and_cert_chain_pem.write_to_path(str(folder / f"{name}.pem"))
    return folder


@pytest.fixture(scope="module")
def mutual(folder: Path, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the digits that asks its clients for certificates."""
    names = {"--tls-cert": "server.pem", "--tls-key": "server.key", "--tls-client-ca": "ca.pem"}
    files = [word for option, name in names.items() for word in (option, folder / name)]
    with Serving(tmp_path_factory.mktemp("server"), "--model-store", digits.parent, *files) as server:
        server.wait_until(lambda: "serving with TLS" in server.log)
        yield server


@pytest.fixture(params=["http", "grpc"])
def url(mutual: Server, request: pytest.FixtureRequest) -> str:
    plain = mutual.url if request.param == "http" else mutual.grpc_url
    return plain.replace("://", "s://")


def test_a_known_client_is_served_and_finds_the_admin_key(url: str, folder: Path, repository: Path) -> None:
    with Client(url, ca_file=folder / "ca.pem", client_cert=folder / "client.pem") as client:
        assert client.model("digits").classify(repository / "docs" / "digits" / "seven.png").top.label == "seven"
        assert client.models()[0].ready


def test_the_command_line(url: str, folder: Path) -> None:
    files = ("--ca-file", folder / "ca.pem", "--client-cert", folder / "client.pem")
    assert run_command("health", "--url", url, *files).stdout == "ready\n"


@pytest.mark.parametrize("certificate", [None, "expired.pem", "stranger.pem"])
def test_other_clients_are_not(url: str, folder: Path, certificate: str | None) -> None:
    own = folder / certificate if certificate else None
    with (
        Client(url, ca_file=folder / "ca.pem", client_cert=own, max_retries=0) as client,
        pytest.raises(ConnectionFailed),
    ):
        client.ready()


def test_another_authority_is_not_trusted(url: str, folder: Path) -> None:
    with (
        Client(url, ca_file=folder / "other.pem", client_cert=folder / "client.pem", max_retries=0) as client,
        pytest.raises(ConnectionFailed, match=r"certificate verify failed|CERTIFICATE_VERIFY_FAILED"),
    ):
        client.ready()


def test_without_tls_nothing_is_said(mutual: Server) -> None:
    for url in (mutual.url, mutual.grpc_url):
        with Client(url, max_retries=0) as client, pytest.raises(ConnectionFailed):
            client.ready()
