"""Who signed a version, in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from signed import SignedStore

from graphkiln.cli.sign import NOT_SIGNED, check_signers, describe_signers
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository.attestation import Attestation


@pytest.fixture
def signed(tmp_path: Path) -> SignedStore:
    return SignedStore.make(tmp_path)


def test_nobody(signed: SignedStore, tmp_path: Path) -> None:
    version = signed.add(1, "one", signed=False) / "1"
    assert check_signers(version, None) == NOT_SIGNED
    with pytest.raises(RepositoryError, match="it is not signed"):
        check_signers(version, tmp_path / "release.pub")


def test_somebody_and_somebody_who_is_trusted(signed: SignedStore, tmp_path: Path) -> None:
    version = signed.add(1, "one") / "1"
    assert check_signers(version, None) == f"by {signed.key.key_id[:16]}"
    assert check_signers(version, tmp_path / "release.pub") == f"by release ({signed.key.key_id[:16]})"


def test_what_no_longer_holds(signed: SignedStore) -> None:
    version = signed.add(1, "one") / "1"
    attestation = Attestation.read(version)
    assert attestation
    Attestation(attestation.payload, {signed.key.key_id: bytes(64)}).write(version)
    with pytest.raises(RepositoryError, match="its signature does not hold"):
        check_signers(version, None)
    attestation.write(version)
    (version / "model.onnx").write_text("two")
    assert describe_signers(version, None).startswith("not these files: 1/model.onnx is not the file")
