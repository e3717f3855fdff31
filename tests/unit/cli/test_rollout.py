"""`graphkiln rollout`: options, table and JSON."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from commands import RunVerb

from graphkiln.cli.rollout import parse_share
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.server import rollout_changes
from graphkiln_backend.server.rollouts import Example, Gates, Latencies, Progress, RolloutFolder, Wanted

GATES = Gates(agree=0.995, p99_ratio=1.1, errors=0.01, requests=5000, then=(0.1, 0.5, 1.0))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with two versions, and a state folder."""
    for version in (1, 2):
        (tmp_path / "store" / "digits" / str(version)).mkdir(parents=True)
    monkeypatch.setenv("GRAPHKILN_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(rollout_changes, "SILENCE_S", 0.3)
    return tmp_path / "store" / "digits"


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> RolloutFolder:
    return RolloutFolder(tmp_path / "state", model.parent)


def running(folder: RolloutFolder, *, gates: Gates = GATES, **facts: object) -> Progress:
    """Write a shadow of version 2 that has seen 1,240 requests."""
    wanted = Wanted(model="digits", candidate=2, serving=1, share=0.05, gates=gates, changed_at=time.time() - 60)
    folder.write_wanted(wanted)
    latency = Latencies()
    for _ in range(1240):
        latency.add(0.003)
    progress = Progress(
        model="digits", candidate=2, serving=1, phase="shadow", share=0.05, applied_serial=1, compared=1240,
        agreed=1235, disagreed=2, undecided=3, dropped=7, failed=1, failure="the model instance stopped",
        serving_latency=latency, candidate_latency=latency, updated_at=time.time(),
        examples=(
            Example(request="r-17", serving="seven", candidate="one"),
            Example(request="", serving="4", candidate="9", at=1.0),
            Example(request="", serving="4", candidate="9", at=2.0),
        ),
    )  # fmt: skip
    for name, value in facts.items():
        setattr(progress, name, value)
    folder.write_progress(progress)
    return progress


class TestStatus:
    def test_table(self, run: RunVerb, model: Path, folder: RolloutFolder) -> None:
        running(folder)
        finished = run("rollout", "status", model)
        assert finished.code == 0
        assert max(map(len, finished.out.splitlines())) <= 80
        out = " ".join(finished.out.replace("│", " ").split())
        for words in (
            "digits: version 2 is compared with version 1 on 5% of the requests",
            "compared 1,240 requests; 7 copies dropped",
            "same decision 99.84%, between",
            "other decision 2, and 3 are within the noise",
            "failed 1 of 1,241: the model instance stopped",
            "p99 3.04 ms; version 1: 3.04 ms, ratio 1.00",
            "--p99-ratio counts in traffic only",
            "next 10% of the traffic: 1240 of 5000 requests",
            "time left about 3 min",
            "2 without id 4 9 r-17 seven one",
        ):
            assert words in out

    def test_a_candidate_without_processor_time(self, run: RunVerb, model: Path, folder: RolloutFolder) -> None:
        words = "processor time that nothing else needs"
        progress = running(folder)
        assert words not in " ".join(run("rollout", "status", model).out.replace("│", " ").split())
        progress.dropped = 2000
        folder.write_progress(progress)
        assert words in " ".join(run("rollout", "status", model).out.replace("│", " ").split())

    def test_json(self, run: RunVerb, model: Path, folder: RolloutFolder) -> None:
        running(folder)
        document = json.loads(run("rollout", "status", model, "--json").out)
        assert (document["phase"], document["share"], document["applied"]) == ("shadow", 0.05, True)
        assert 0.98 < document["agreement"]["low"] < 0.9984 < document["agreement"]["high"] < 1
        assert document["gates"] == {"outcome": "wait", "reason": "1240 of 5000 requests"}
        assert document["latency"]["candidate"]["requests"] == 1240
        assert document["progress"]["examples"][0]["candidate"] == "one"
        assert document["wanted"]["gates"]["then"] == [0.1, 0.5, 1.0]

    def test_server_that_is_gone(self, run: RunVerb, model: Path, folder: RolloutFolder) -> None:
        running(folder, updated_at=time.time() - 400)
        assert "has not written for 7 min: is it running?" in run("rollout", "status", model).out

    def test_not_begun(self, run: RunVerb, model: Path, folder: RolloutFolder) -> None:
        folder.write_wanted(Wanted(model="digits", candidate=2, serving=1, changed_at=time.time() - 400))
        out = run("rollout", "status", model).out
        assert "version 2 is not tried yet: no server has written about it for 7 min" in out.replace("\n", " ")

    def test_being_proven(self, run: RunVerb, model: Path, folder: RolloutFolder) -> None:
        running(folder, phase="", reason="the candidate is being proven and loaded", applied_serial=0)
        out = run("rollout", "status", model).out
        assert "version 2 is not tried yet: the candidate is being proven and loaded" in out.replace("\n", " ")

    def test_aborted_by_a_gate(self, run: RunVerb, model: Path, folder: RolloutFolder) -> None:
        progress = running(folder)
        reason = "9 of 400 decisions differ"
        folder.write_wanted(Wanted(model="digits", candidate=2, serving=1, phase="aborted", reason=reason, serial=2))
        progress.phase, progress.reason, progress.applied_serial = "aborted", reason, 2
        folder.write_progress(progress)
        out = run("rollout", "status", model).out
        assert "digits: version 2 was aborted, version 1 answers all requests" in out
        assert reason in out
        assert "next" not in out

    def test_without_gates(self, run: RunVerb, model: Path, folder: RolloutFolder) -> None:
        running(folder, gates=Gates())
        out = run("rollout", "status", model).out
        assert "next" not in out
        assert "between" in out

    def test_no_rollout(self, run: RunVerb, model: Path) -> None:
        finished = run("rollout", "status", model)
        assert finished.code == 2
        assert "digits has no rollout" in finished.err
        assert "graphkiln rollout start" in finished.err


class TestStart:
    def test_conditions_are_written(self, run: RunVerb, model: Path, folder: RolloutFolder) -> None:
        finished = run(
            "rollout", "start", model, "--version", 2, "--shadow", "2.5%", "--agree", "0.995", "--p99-ratio", 1.1,
            "--requests", 5000, "--then", "10%,50%,100%",
        )  # fmt: skip
        assert finished.code == 2
        assert "no server applies the rollout" in finished.err
        wanted = folder.read_wanted("digits")
        assert wanted is not None
        assert (wanted.candidate, wanted.serving, wanted.phase, wanted.share) == (2, 1, "shadow", 0.025)
        assert wanted.gates == GATES

    def test_by_hand(self, run: RunVerb, model: Path, folder: RolloutFolder) -> None:
        run("rollout", "start", model, "--version", 2)
        wanted = folder.read_wanted("digits")
        assert wanted is not None
        assert (wanted.share, wanted.gates) == (0.05, Gates())

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--shadow", "5"), "--shadow 5: expected a share between 0% and 100% (write 5%)"),
            (("--agree", "many"), "--agree many: expected a share"),
            (("--then", "50%,10%", "--agree", "0.9", "--requests", "9"), "expected shares that grow"),
            (("--then", "50%"), "needs --agree and --requests"),
            (("--version", "7"), "digits has no version 7"),
        ],
    )
    def test_mistakes(self, run: RunVerb, model: Path, words: tuple[str, ...], message: str) -> None:
        finished = run("rollout", "start", model, "--version", 2, *words)
        assert finished.code == 2
        assert message in finished.err.replace("\n", " ")


@pytest.mark.parametrize(
    ("text", "share"), [("5%", 0.05), ("0.05", 0.05), ("100%", 1.0), ("0", 0.0), (" 12.5% ", 0.125)]
)
def test_shares(text: str, share: float) -> None:
    assert parse_share(text, "--shadow") == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "-1%", "101%", "nan", "1.5", "five"])
def test_no_shares(text: str) -> None:
    with pytest.raises(InvalidInput, match="share"):
        parse_share(text, "--shadow")
