"""A store of small models, keys that sign them, and an authority that certifies keys."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

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

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        own = self._build(self._name, self._key.public_key(), days=9).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.trusted = folder / f"{name}.pem"
        self.trusted.write_bytes(own.sign(self._key, SHA256()).public_bytes(Encoding.PEM))

    def certify(self, name: str, *, days: int = 9, signs: bool = True) -> SigningKey:
        """Make a key with a certificate that ends in some days, perhaps in the past."""
        key, certificate = ec.generate_private_key(ec.SECP256R1()), self._folder / f"{name}.crt"
        (self._folder / name).write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        (self._folder / name).chmod(0o600)
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        usage = x509.KeyUsage(signs, False, False, False, not signs, False, False, False, False)
        built = self._build(subject, key.public_key(), days=days).add_extension(usage, critical=True)
        if not signs:
            purpose = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH])
            built = built.add_extension(purpose, critical=False)
        certificate.write_bytes(built.sign(self._key, SHA256()).public_bytes(Encoding.PEM))
        return SigningKey.read(self._folder / name, certificate=certificate)

    def revoke(self, key: SigningKey) -> Path:
        """Write a list with the certificate of a key."""
        assert key.certificate
        now = datetime.now(UTC)
        serial = x509.load_pem_x509_certificate(key.certificate.read_bytes()).serial_number
        revoked = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
        listed = x509.CertificateRevocationListBuilder().issuer_name(self._name).last_update(now)
        signed = listed.next_update(now + timedelta(days=1)).add_revoked_certificate(revoked)
        path = self._folder / "revoked.pem"
        path.write_bytes(signed.sign(self._key, SHA256()).public_bytes(Encoding.PEM))
        return path

    def _build(self, subject: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        begin = now - timedelta(days=5)
        builder = x509.CertificateBuilder(self._name, subject, key, x509.random_serial_number()).not_valid_before(begin)
        return builder.not_valid_after(now + timedelta(days=days))
