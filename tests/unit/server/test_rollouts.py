"""The state of rollouts: what is asked for, and how far the server is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from graphkiln_backend.server import rollouts
from graphkiln_backend.server.rollouts import (
    Example,
    Gates,
    Latencies,
    Progress,
    RolloutError,
    RolloutFolder,
    Tally,
    Wanted,
    first_change,
    state_folder,
)

BEGUN = Wanted(model="m", candidate=2, serving=1, share=0.05, gates=Gates(agree=0.99, then=(0.1, 1.0)))


@pytest.fixture
def folder(tmp_path: Path) -> RolloutFolder:
    return RolloutFolder(tmp_path / "state", tmp_path / "store")


def test_reads_what_was_written(folder: RolloutFolder) -> None:
    progress = Progress(
        model="m", candidate=2, serving=1, compared=3, examples=(Example(request="7", serving="a", candidate="b"),)
    )
    folder.write_wanted(BEGUN)
    folder.write_progress(progress)
    assert (folder.models(), folder.read_wanted("m"), folder.read_progress("m")) == (["m"], BEGUN, progress)
    assert folder.read_wanted("other") is None


def test_one_store_by_several_paths_has_one_folder(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "link").symlink_to("store")
    paths = {RolloutFolder(tmp_path, tmp_path / name).path for name in ("store", "link", "store/../store")}
    remote = {RolloutFolder(tmp_path, address).path for address in ("s3://b/p", "s3://b/p/")}
    assert (len(paths), len(remote), len(paths | remote)) == (1, 1, 2)


def test_one_server_carries_out_the_rollouts_of_a_store(folder: RolloutFolder, tmp_path: Path) -> None:
    other = RolloutFolder(tmp_path / "state", tmp_path / "store")
    assert other.claim() == ""  # there are none yet
    folder.write_wanted(BEGUN)
    assert (folder.claim(), folder.claim()) == ("", "")
    assert "another server" in other.claim()
    assert folder._claim is not None
    os.close(folder._claim)
    assert other.claim() == ""


def test_reports_each_change_once(folder: RolloutFolder) -> None:
    assert folder.changed() == []
    folder.write_wanted(BEGUN)
    assert (folder.changed(), folder.changed()) == (["m"], [])
    folder.write_wanted(BEGUN.changed("aborted"))
    assert (folder.changed(), folder.changed()) == (["m"], [])


def test_only_the_next_change_is_written(folder: RolloutFolder) -> None:
    folder.write_wanted(BEGUN)
    folder.write_wanted(BEGUN.changed("traffic", 0.1))
    with pytest.raises(RolloutError, match="changed meanwhile"):
        folder.write_wanted(BEGUN.changed("promoted"))
    found = folder.read_wanted("m")
    assert found
    assert (found.phase, found.share, found.serial) == ("traffic", 0.1, 2)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": "m"}', '"\\ud800"', "[" * 100_000])
def test_a_damaged_file_is_said_once_and_ignored(
    folder: RolloutFolder, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_wanted(BEGUN)
    (folder.path / "m.wanted.json").write_text(content)
    assert [folder.read_wanted("m") for _ in range(3)] == [None] * 3
    assert len([record for record in caplog.records if "is ignored" in record.message]) == 1


def test_a_file_of_another_model_is_ignored(folder: RolloutFolder) -> None:
    folder.write_wanted(BEGUN)
    (folder.path / "n.wanted.json").write_bytes((folder.path / "m.wanted.json").read_bytes())
    assert folder.read_wanted("n") is None


def test_a_crash_while_writing_leaves_the_old_file(folder: RolloutFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_wanted(BEGUN)

    def crash(_: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(rollouts.os, "fsync", crash)
    with pytest.raises(OSError, match="full"):
        folder.write_wanted(BEGUN.changed("promoted"))
    assert folder.read_wanted("m") == BEGUN
    assert [path.name for path in folder.path.iterdir()] == ["m.wanted.json"]


def test_a_rollout_begins_once() -> None:
    begun = first_change("m", candidate=2, serving=1, share=0.05, gates=Gates(), before=None)
    assert (begun.serial, begun.phase, begun.is_running) == (1, "shadow", True)
    with pytest.raises(RolloutError, match="running"):
        first_change("m", candidate=3, serving=1, share=0.05, gates=Gates(), before=begun)
    with pytest.raises(RolloutError, match="serves"):
        first_change("m", candidate=1, serving=1, share=0.05, gates=Gates(), before=None)
    again = first_change("m", candidate=3, serving=1, share=0.05, gates=Gates(), before=begun.changed("aborted"))
    assert again.serial == 3


def test_quantiles_are_right_within_a_bucket() -> None:
    latencies, other = Latencies(), Latencies()
    for index in range(1, 1001):
        (latencies if index % 2 else other).add(index / 1000)
    latencies.merge(other)
    assert latencies.total == 1000
    assert latencies.p50 == pytest.approx(0.5, rel=0.1)
    assert latencies.p99 == pytest.approx(0.99, rel=0.1)
    assert Latencies().p99 == 0


def test_counts_of_instances_are_added() -> None:
    tally = Tally(compared=3, agreed=2, disagreed=1, examples=(Example(request="a", serving="1", candidate="2", at=2),))
    tally.merge(
        Tally(
            compared=2,
            undecided=2,
            failed=1,
            failure="x",
            examples=(Example(request="b", serving="1", candidate="2", at=1),),
        )
    )
    assert (tally.compared, tally.agreed, tally.disagreed, tally.undecided, tally.requests) == (5, 2, 1, 2, 6)
    assert [example.request for example in tally.examples] == ["b", "a"]
    assert tally.failure == "x"


def test_the_state_is_where_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHKILN_STATE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_folder() == tmp_path / "graphkiln"
    monkeypatch.setenv("GRAPHKILN_STATE", str(tmp_path / "other"))
    assert (state_folder(), state_folder(tmp_path)) == (tmp_path / "other", tmp_path)


def test_files_are_json_for_people(folder: RolloutFolder) -> None:
    folder.write_wanted(BEGUN)
    assert json.loads((folder.path / "m.wanted.json").read_bytes())["phase"] == "shadow"
