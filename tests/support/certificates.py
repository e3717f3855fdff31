"""Certificate files for servers of tests."""

from __future__ import annotations

from pathlib import Path

import trustme

from graphkiln_backend.server.tls import TlsFiles


def write(pair: trustme.LeafCert, folder: Path, authorities: trustme.CA | None = None) -> TlsFiles:
    """Write a certificate, its key, and the client authority."""
    pair.private_key_pem.write_to_path(str(folder / "key.pem"))
    pair.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    if authorities:
        authorities.cert_pem.write_to_path(str(folder / "ca.pem"))
    return TlsFiles(
        certificate=folder / "cert.pem",
        key=folder / "key.pem",
        client_authorities=folder / "ca.pem" if authorities else None,
    )
