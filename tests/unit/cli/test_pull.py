"""`graphkiln pull`: what was pushed to a real registry comes back, and unsigned versions do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import RunVerb
from oci_server import OciServer, needs_registry
from signed import SignedStore


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OciServer]:
    with OciServer(tmp_path_factory.mktemp("registry")) as server:
        yield server


@pytest.fixture
def signed(tmp_path: Path) -> SignedStore:
    store = SignedStore.make(tmp_path)
    store.add(1, "one")
    return store


@needs_registry
def test_what_was_pushed_comes_back(run: RunVerb, registry: OciServer, signed: SignedStore, tmp_path: Path) -> None:
    address = f"oci://{registry.host}/models:1"
    assert run("push", signed.folder, address).code == 0
    pulled = run("pull", address, tmp_path / "pulled", "--trusted-keys", tmp_path / "release.pub")
    assert (pulled.code, pulled.out) == (0, f"{tmp_path / 'pulled'}: 3 new files, 0.0 MB (m of {address})\n"), pulled
    for path in signed.folder.rglob("*"):
        copy = tmp_path / "pulled" / path.relative_to(signed.folder)
        assert copy.is_dir() if path.is_dir() else copy.read_bytes() == path.read_bytes()
    again = run("pull", f"{address}/m", tmp_path / "pulled")
    assert again.out == f"{tmp_path / 'pulled'}: nothing is new (m of {address}/m)\n"


@needs_registry
def test_a_version_that_is_not_signed_is_not_pulled(
    run: RunVerb, registry: OciServer, signed: SignedStore, tmp_path: Path
) -> None:
    signed.add(2, "two", signed=False)
    address = f"oci://{registry.host}/models:2"
    assert run("push", signed.folder, address).code == 0
    refused = run("pull", address, tmp_path / "pulled", "--trusted-keys", tmp_path / "release.pub")
    assert refused.code == 2
    assert "m version 2 is not pulled: it is not signed" in refused.err
    assert list((tmp_path / "pulled").iterdir()) == []


def test_a_folder_is_no_address(run: RunVerb, tmp_path: Path) -> None:
    done = run("pull", tmp_path / "store", tmp_path / "copy")
    assert done.code == 2
    assert "is no address" in done.err
