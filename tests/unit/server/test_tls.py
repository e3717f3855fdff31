"""The files of `--tls-cert`, `--tls-key` and `--tls-client-ca`."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import trustme
from certificates import write

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server.tls import TlsFiles, fault_of_validity

BEGIN, END = (datetime.datetime(2026, 3, day, tzinfo=datetime.UTC) for day in (1, 8))


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(authority: trustme.CA, tmp_path: Path) -> TlsFiles:
    """A certificate for 127.0.0.1."""
    return write(authority.issue_cert("127.0.0.1"), tmp_path)


class TestFiles:
    @pytest.mark.parametrize("years", [-1, 1])
    def test_one_that_clients_refuse_is_told_at_the_start(
        self, years: int, authority: trustme.CA, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        end = datetime.datetime.now(datetime.UTC) + years * datetime.timedelta(days=365)
        begin = end - datetime.timedelta(days=500)
        files = write(authority.issue_cert("127.0.0.1", not_before=begin, not_after=end), tmp_path)
        assert TlsFiles.choose(files.certificate, files.key, None) == files
        assert [f"{files.certificate} expired on " in each for each in caplog.messages] == [True] * (years < 0)

    @pytest.mark.parametrize("given", [("c", None, None), (None, "k", None), (None, None, "a")])
    def test_some_are_missing(self, given: tuple[str | None, ...]) -> None:
        paths = [Path(name) if name else None for name in given]
        with pytest.raises(ServerSetupError, match="--tls-cert FILE --tls-key FILE"):
            TlsFiles.choose(paths[0], paths[1], paths[2])

    def test_they_are_tried(self, files: TlsFiles, tmp_path: Path) -> None:
        assert TlsFiles.choose(files.certificate, files.key, None) == files
        trustme.CA().issue_cert("x.org").private_key_pem.write_to_path(str(tmp_path / "other.pem"))
        with pytest.raises(ServerSetupError, match=r"other\.pem cannot be used"):
            TlsFiles.choose(files.certificate, tmp_path / "other.pem", None)
        with pytest.raises(ServerSetupError, match=r"--tls-client-ca .*missing\.pem"):
            TlsFiles.choose(files.certificate, files.key, tmp_path / "missing.pem")


@pytest.fixture(scope="module")
def pem() -> bytes:
    """The server's certificate, then its authority's, which is valid for longer."""
    authority = trustme.CA()
    pair = authority.issue_cert("models.example.org", not_before=BEGIN, not_after=END)
    return b"".join(each.bytes() for each in (*pair.cert_chain_pems, authority.cert_pem))


@pytest.mark.parametrize(
    ("now", "fault"),
    [
        (BEGIN - datetime.timedelta(minutes=1), "is not valid before 2026-03-01 00:00 UTC"),
        (BEGIN, ""),
        (END, ""),
        (END + datetime.timedelta(seconds=1), "expired on 2026-03-08 00:00 UTC"),
    ],
)
def test_clients_refuse_it_before_and_after_its_time(pem: bytes, now: datetime.datetime, fault: str) -> None:
    assert fault_of_validity(pem, now) == fault


def test_what_is_no_certificate_is_an_error() -> None:
    with pytest.raises(ValueError, match="PEM"):
        fault_of_validity(b"no certificate", BEGIN)
