"""When a certificate is valid."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import trustme

from graphkiln_backend.server.tls import fault_of_validity

BEGIN, END = datetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 3, 8, tzinfo=UTC)


@pytest.fixture(scope="module")
def pem() -> bytes:
    """Of a server, then of its authority, which is valid for longer."""
    authority = trustme.CA()
    pair = authority.issue_cert("models.example.org", not_before=BEGIN, not_after=END)
    return b"".join(each.bytes() for each in (*pair.cert_chain_pems, authority.cert_pem))


@pytest.mark.parametrize(
    ("now", "fault"),
    [
        (BEGIN - timedelta(minutes=1), "is not valid before 2026-03-01 00:00 UTC"),
        (BEGIN, ""),
        (END, ""),
        (END + timedelta(seconds=1), "expired on 2026-03-08 00:00 UTC"),
    ],
)
def test_clients_refuse_it_before_and_after_its_time(pem: bytes, now: datetime, fault: str) -> None:
    assert fault_of_validity(pem, now) == fault


def test_what_is_no_certificate_is_an_error() -> None:
    with pytest.raises(ValueError, match="PEM"):
        fault_of_validity(b"no certificate", BEGIN)
