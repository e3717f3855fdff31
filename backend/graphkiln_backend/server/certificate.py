"""When a certificate is valid. OpenSSL serves an expired one like any other, and only clients complain."""

from __future__ import annotations

from datetime import datetime
from importlib.util import find_spec


def fault_of_validity(pem: bytes, now: datetime) -> str:
    """Why clients refuse a certificate at a moment; empty where they do not, or where nothing here can read it.

    Args:
        pem: The server's own certificate, and what may follow it.
        now: With its time zone.

    Raises:
        ValueError: The first certificate is none that can be read.
    """
    if find_spec("cryptography") is None:  # the extras that serve bring it
        return ""
    from cryptography import x509

    own = x509.load_pem_x509_certificates(pem)[0]
    if now < own.not_valid_before_utc:
        return f"is not valid before {own.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
    return f"expired on {own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC" if now > own.not_valid_after_utc else ""
