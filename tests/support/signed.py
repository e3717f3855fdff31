"""A store of small models, and keys that sign them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.repository.attestation import sign_version
from graphkiln_backend.repository.signing_keys import SigningKey, TrustedKeys, generate_key_pair, public_file


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


def make_key(file: Path) -> tuple[SigningKey, Path]:
    """Make a private key and the file of its public key."""
    generate_key_pair(file)
    return SigningKey.read(file), public_file(file)
