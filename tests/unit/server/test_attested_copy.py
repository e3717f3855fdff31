"""Only what is signed gets into the copy, and what was signed once is not lost."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest
from signed import SignedStore, make_key

from graphkiln_backend.repository.attestation import sign_version
from graphkiln_backend.repository.signing_keys import TrustedKeys
from graphkiln_backend.repository.stores import scan_stores
from graphkiln_backend.server.store_copies import AttestedStore


@pytest.fixture
def signed(tmp_path: Path) -> SignedStore:
    return SignedStore.make(tmp_path)


@pytest.fixture
def copy(signed: SignedStore, tmp_path: Path) -> AttestedStore:
    (tmp_path / "copies").mkdir()
    return AttestedStore(signed.folder, tmp_path / "copies", signed.trusted)


def take(copy: AttestedStore, store: SignedStore) -> dict[str, str]:
    """Takes over the store; the graphs in the copy, by version."""
    for stored in scan_stores([store.folder]).values():
        copy.take(stored)
    return {path.parent.name: path.read_text() for path in copy.folder.glob("m/*/model.onnx")}


def refused(copy: AttestedStore) -> dict[int, str]:
    return dict(copy.refused()["m"].refused) if copy.refused() else {}


def test_what_is_signed_is_copied_with_what_it_shares(signed: SignedStore, copy: AttestedStore) -> None:
    signed.add(1, "one")
    assert take(copy, signed) == {"1": "one"}
    assert (copy.folder / "m" / "config.pbtxt").read_text() == "max_batch_size: 8\n"
    assert not list(copy.folder.glob("m/*/attestation.json"))


def test_what_is_not_signed_stays_out(signed: SignedStore, copy: AttestedStore, tmp_path: Path) -> None:
    signed.add(1, "one")
    signed.add(2, "two", signed=False)
    signed.add(3, "three", key=make_key(tmp_path / "stranger")[0])
    assert take(copy, signed) == {"1": "one"}
    reasons = refused(copy)
    assert "it is not signed" in reasons[2]
    assert "not trusted" in reasons[3]


def test_a_model_without_any_signed_version_is_a_placeholder_with_the_reason(
    signed: SignedStore, copy: AttestedStore
) -> None:
    signed.add(1, "one", signed=False)
    assert take(copy, signed) == {}
    assert "it is not signed" in (copy.folder / "m" / "1" / "model.py").read_text()
    sign_version(signed.folder / "m", 1, signed.key)
    assert take(copy, signed) == {"1": "one"}
    assert not refused(copy)


def test_an_altered_version_serves_on_as_it_was_checked(
    signed: SignedStore, copy: AttestedStore, caplog: pytest.LogCaptureFixture
) -> None:
    model = signed.add(1, "one")
    take(copy, signed)
    (model / "1" / "model.onnx").write_text("worse")
    with caplog.at_level(logging.ERROR):
        assert take(copy, signed) == {"1": "one"}
    assert "is not the file that was signed" in caplog.text
    assert "the verified copy keeps serving" in caplog.text


def test_versions_that_were_signed_with_another_configuration_go(signed: SignedStore, copy: AttestedStore) -> None:
    model = signed.add(1, "one")
    take(copy, signed)
    (model / "config.pbtxt").write_text("max_batch_size: 9\n")
    signed.add(2, "two")
    assert take(copy, signed) == {"2": "two"}
    assert (copy.folder / "m" / "config.pbtxt").read_text() == "max_batch_size: 9\n"
    sign_version(model, 1, signed.key)
    assert take(copy, signed) == {"1": "one", "2": "two"}


def test_a_file_that_is_exchanged_while_it_is_copied_is_noticed(signed: SignedStore, copy: AttestedStore) -> None:
    model = signed.add(1, "one")
    signed.add(2, "two")
    (stored,) = scan_stores([signed.folder]).values()
    left = iter([None] * 2)

    def exchange() -> None:  # once version 2 and its configuration are copied
        if next(left, "over") == "over":
            (model / "1" / "model.onnx").write_text("other")

    copy.take(stored, exchange)
    shown = {path.parent.name: path.read_text() for path in copy.folder.glob("m/*/model.onnx")}
    assert shown == {"2": "two"}
    assert "is not the file that was signed" in refused(copy)[1]


def test_what_is_known_is_not_copied_again(signed: SignedStore, copy: AttestedStore) -> None:
    signed.add(1, "one")
    take(copy, signed)
    inode = (copy.folder / "m" / "1" / "model.onnx").stat().st_ino
    signed.add(2, "two")
    assert take(copy, signed) == {"1": "one", "2": "two"}
    assert (copy.folder / "m" / "1" / "model.onnx").stat().st_ino == inode


def test_what_is_removed_goes_with_its_files(signed: SignedStore, copy: AttestedStore, tmp_path: Path) -> None:
    model = signed.add(1, "one")
    signed.add(2, "two")
    take(copy, signed)
    shutil.rmtree(model / "1")
    assert take(copy, signed) == {"2": "two"}
    copy._remove("m")
    assert not list(copy.folder.iterdir())
    assert not list((tmp_path / "copies" / "contents").iterdir())


def test_an_interrupted_copy_leaves_nothing(signed: SignedStore, copy: AttestedStore, tmp_path: Path) -> None:
    signed.add(1, "one")
    (stored,) = scan_stores([signed.folder]).values()

    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        copy.take(stored, stop)
    assert not list((tmp_path / "copies" / "contents").iterdir())
    assert take(copy, signed) == {"1": "one"}


def test_a_pipe_keeps_nobody_waiting(signed: SignedStore, copy: AttestedStore) -> None:
    model = signed.add(1, "one")
    signed.add(2, "two")
    (model / "2" / "model.onnx").unlink()
    os.mkfifo(model / "2" / "model.onnx")
    assert take(copy, signed) == {"1": "one"}
    assert "neither a file nor a folder" in refused(copy)[2]


def test_what_a_link_leads_to_is_copied_and_not_the_link(
    signed: SignedStore, copy: AttestedStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else who can write where it leads could exchange what serves."""
    weights = tmp_path / "weights.bin"
    weights.write_text("w")
    model = signed.add(1, "one", signed=False)
    (model / "1" / "weights.bin").symlink_to(weights)
    sign_version(model, 1, signed.key)
    take(copy, signed)
    copied = copy.folder / "m" / "1" / "weights.bin"
    assert (copied.is_symlink(), copied.read_text()) == (False, "w")
    weights.write_text("other")
    take(copy, signed)
    assert copied.read_text() == "w"
    assert "1/weights.bin is not the file that was signed" in caplog.text


def test_a_file_that_is_added_later_does_not_get_in(
    signed: SignedStore, copy: AttestedStore, caplog: pytest.LogCaptureFixture
) -> None:
    model = signed.add(1, "one")
    take(copy, signed)
    (model / "1" / "model.py").write_text("evil")
    (model / "labels.txt").write_text("cat\n")
    assert take(copy, signed) == {"1": "one"}
    assert sorted(path.name for path in (copy.folder / "m").iterdir()) == ["1", "config.pbtxt"]
    assert [path.name for path in (copy.folder / "m" / "1").iterdir()] == ["model.onnx"]
    assert "1/model.py, labels.txt added" in caplog.text


def test_a_key_that_is_trusted_no_more_serves_nothing_after_the_next_start(signed: SignedStore, tmp_path: Path) -> None:
    second, public = make_key(tmp_path / "second")
    signed.add(1, "one")
    signed.add(2, "two", key=second)
    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    both = TrustedKeys({**signed.trusted.names, **TrustedKeys.read(public).names})
    assert take(AttestedStore(signed.folder, tmp_path / "before", both), signed) == {"1": "one", "2": "two"}
    after = AttestedStore(signed.folder, tmp_path / "after", signed.trusted)
    assert take(after, signed) == {"1": "one"}
    assert f"signed by {second.key_id[:16]}, which is not trusted" in refused(after)[2]
