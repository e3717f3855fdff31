"""A store of small models, keys that sign them, and an authority that certifies keys."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import trustme
from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from graphkiln_backend.repository.signing import sign_version
from graphkiln_backend.repository.signing_keys import SigningKey, TrustedKeys, generate_key_pair, public_file

# Written by the last commit that wrote this format: the version 1 of `m` with the file `one`.
_OLD_KEY = """-----BEGIN PUBLIC KEY-----
MCowBQYDK2VwAyEApp5AyBlhhfeLANtOKnv1Edui5D5xDQJJAYjQskGlFpU=
-----END PUBLIC KEY-----
"""
_OLD = {
    "payload": "eyJfdHlwZSI6Imh0dHBzOi8vaW4tdG90by5pby9TdGF0ZW1lbnQvdjEiLCJzdWJqZWN0IjpbeyJuYW1lIjoiMS9tb2RlbC5vbm54"
    "IiwiZGlnZXN0Ijp7InNoYTI1NiI6Ijc2OTJjM2FkMzU0MGJiODAzYzAyMGIzYWVlNjZjZDg4ODcxMjMyMzRlYTBjNmU3MTQzYzBhZGQ3M2ZmNDMxZWQifX0"
    "seyJuYW1lIjoiY29uZmlnLnBidHh0IiwiZGlnZXN0Ijp7InNoYTI1NiI6ImQ0MzY5NjQ5NWE3ZmI5YzU2Mjk0MTVmNTdiNjJiYmFiYjhhMzI5MjhmNT"
    "JlMGRiNWJiY2UwYzhjZDg0M2Q3YjgifX1dLCJwcmVkaWNhdGVUeXBlIjoidXJuOmdyYXBoa2lsbjptb2RlbC12ZXJzaW9uOnYxIiwicHJlZGljYXRlI"
    "jp7Im1vZGVsIjoibSIsInZlcnNpb24iOjF9fQ==",
    "payloadType": "application/vnd.in-toto+json",
    "signatures": [
        {
            "keyid": "a69e40c8196185f78b00db4e2a7bf511dba2e43e710d02490188d0b241a51695",
            "sig": "pAXEmcriKzDWUyhoR06clqcZi3OMUMROwApzSjVKDs2jdBOrQkADZKgpvkBRRcsEFHR3FHGdMt/uW4JB8D7gDA==",
        }
    ],
}


@dataclass(frozen=True)
class SignedStore:
    """Store whose versions have one file each, and a trusted key."""

    folder: Path
    key: SigningKey
    trusted: TrustedKeys

    @classmethod
    def make(cls, folder: Path) -> SignedStore:
        key, public = make_key(folder / "release")
        (folder / "store").mkdir()
        return cls(folder / "store", key, TrustedKeys.read(public))

    def add(self, version: int, text: str, *, key: SigningKey | None = None, signed: bool = True) -> Path:
        """Add a version of the model `m`, with the configuration if it is the first one."""
        model = self.folder / "m"
        (model / str(version)).mkdir(parents=True)
        (model / str(version) / "model.onnx").write_text(text)
        if not (model / "config.pbtxt").exists():
            (model / "config.pbtxt").write_text("max_batch_size: 8\n")
        if signed:
            sign_version(model, version, key or self.key)
        return model

    def add_old(self) -> Path:
        """Add the version 1 with a signature of the old kind; return the file of its public key."""
        model = self.add(1, "one", signed=False)
        (model / "1" / "attestation.json").write_text(json.dumps(_OLD))
        public = self.folder.parent / "old.pub"
        public.write_text(_OLD_KEY)
        return public


def make_key(file: Path) -> tuple[SigningKey, Path]:
    """Make a private key and the file of its public key."""
    generate_key_pair(file)
    return SigningKey.read(file), public_file(file)


class Authority:
    """Certifies keys, and revokes certificates.

    Args:
        folder: Folder for its files.

    Attributes:
        trusted: Its own certificate, a file.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._ca = folder, trustme.CA()
        self.trusted = folder / "authority.pem"
        self._ca.cert_pem.write_to_path(self.trusted)

    def certify(self, name: str, end: datetime | None = None) -> SigningKey:
        """Make a key with a certificate."""
        made = self._ca.issue_cert(f"{name}@example.com", common_name=name, not_after=end)
        key, certificate = self._folder / name, self._folder / f"{name}.crt"
        made.private_key_pem.write_to_path(key)
        key.chmod(0o600)
        made.cert_chain_pems[0].write_to_path(certificate)
        return SigningKey.read(key, certificate=certificate)

    def revoke(self, key: SigningKey) -> None:
        """Write a list with the certificate of a key."""
        assert key.certificate
        now = datetime.now(UTC)
        authority = x509.load_pem_x509_certificate(self.trusted.read_bytes())
        serial = x509.load_pem_x509_certificate(key.certificate.read_bytes()).serial_number
        revoked = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
        listed = x509.CertificateRevocationListBuilder(authority.subject, now, now + timedelta(days=1), [], [revoked])
        secret: Any = load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        (self._folder / "revoked.pem").write_bytes(listed.sign(secret, SHA256()).public_bytes(Encoding.PEM))
