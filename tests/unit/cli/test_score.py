"""`graphkiln score` with a simulated run: options, output and errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from commands import RunVerb
from score_events import RUN

from graphkiln_backend.scoring import driver as backend_run
from graphkiln_backend.scoring.driver import WriteNotes
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.messages import InputRange, Report, ScoreRequest
from graphkiln_backend.scoring.plan import open_destination, write_plan


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[ScoreRequest]:
    """Requests of simulated runs, which report the events of `score_events`."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("graphkiln.scoring.metrics.ray_registry", lambda: None)
    requested: list[ScoreRequest] = []

    def play(request: ScoreRequest, report: Report, write_notes: WriteNotes) -> None:
        requested.append(request)
        Path(request.destination).mkdir(exist_ok=True)
        for event in RUN:
            report(event)
        destination = open_destination(request)
        write_notes(destination, destination.lock("played"), None)

    monkeypatch.setattr(backend_run, "score_data_set", play)
    return requested


GIVEN = ("photos", "--model", "store/m:2", "--out", "out")


def test_options_become_a_request(
    run: RunVerb, requests: list[ScoreRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphkiln.scoring.running.check_source", lambda _: None)
    words = "--address auto --workers 3 --cores-per-worker 2 --set precision=bf16 --top-k 2 --softmax --replace"
    more = "--keep-columns a,b --image-column i --id-column n --query t --rows-per-unit 50 --cache off --format delta"
    assert run("score", *GIVEN, *words.split(), *more.split()).code == 0
    (request,) = requests
    assert (request.source, request.version) == (str(tmp_path / "photos"), 2)
    assert (request.address, request.workers, request.cores_per_worker) == ("auto", 3, 2)
    assert [(each.key, each.value, each.flag) for each in request.overrides] == [("precision", "bf16", "--set")]
    assert (request.top_k, request.softmax, request.replace) == (2, True, True)
    assert (request.keep_columns, request.image_column, request.id_column) == (("a", "b"), "i", "n")
    assert request.query == "t"
    assert (request.rows_per_unit, request.cache, request.format) == (50, None, "delta")


def test_the_destination_has_two_names(run: RunVerb, requests: list[ScoreRequest], tmp_path: Path) -> None:
    assert run("score", "photos", "--model", "store/m:2", "--destination", "answers").code == 0
    assert requests[0].destination == str(tmp_path / "answers")


def test_ledger_reaches_the_request(
    run: RunVerb, requests: list[ScoreRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def note(request: ScoreRequest, *_: object) -> None:
        requests.append(request)
        raise ScoringError("seen")

    monkeypatch.setattr(backend_run, "score_data_set", note)
    words = ("photos", "--model", "store/m:2", "--out", "s3://b/out", "--ledger", "postgresql://h/d")
    assert "seen" in run("score", *words).err
    assert requests[0].ledger == "postgresql://h/d"


def test_outputs_reach_the_request(run: RunVerb, requests: list[ScoreRequest]) -> None:
    assert run("score", *GIVEN, "--output", "Y", "--output", "Z").code == 0
    assert requests[0].outputs == ("Y", "Z")
    assert requests[0].cache is not None


def test_summary_accounts_for_rows_in_80_columns(run: RunVerb, requests: list[ScoreRequest]) -> None:
    finished = run("score", *GIVEN)
    assert finished.code == 0
    assert max(map(len, finished.out.splitlines()[:-2])) <= 80
    words = " ".join(finished.out.replace("\u2502", " ").split())
    for said in (
        "1,000: 197 scored, 3 errors, 400 answered before",
        "cats/7.jpg: it ends its worker: signal 11",
        "10: 2 by this run, 4 before, 1 attempt made again, 1 found committed",
        "node-1:7",
        "onnxruntime on cpu in fp32",
        "ended: killed by signal 11",
        "2e-07",
        "compute: the session runs 5.0 50%",
    ):
        assert said in words, finished.out
    assert finished.out.endswith(f"next: graphkiln score --verify {requests[0].destination}\n")
    assert "graphkiln: 6/10 units" in finished.err


def test_json_progress_is_the_only_output(run: RunVerb, requests: list[ScoreRequest]) -> None:
    finished = run("score", *GIVEN, "--progress", "json")
    assert finished.err == ""
    documents = [json.loads(line) for line in finished.out.splitlines()]
    assert documents[-1]["event"] == "finished"
    assert {document["schema"] for document in documents} == {1}
    assert len(requests) == 1


@pytest.mark.usefixtures("requests")
def test_progress_off(run: RunVerb) -> None:
    assert run("score", *GIVEN, "--progress", "off").err == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "SOURCE is missing (graphkiln score PHOTOS"),
        (("photos",), "--model is missing"),
        (("photos", "--model", "store/m"), "--out is missing"),
        (("photos", "--model", "store/m", "--out", "photos"), "both source and destination"),
        (("photos", "--model", "store/m", "--out", "photos/out"), "inside the source"),
        (("nowhere", "--model", "store/m", "--out", "out"), "nowhere"),
        (("photos", "--model", "store/m:x", "--out", "out"), "'x' is not a version"),
        ((*GIVEN, "--set", "precison=bf16"), "did you mean 'precision'?"),
        ((*GIVEN, "--scores", "--top-k", "3"), "--top-k and --scores contradict each other"),
        (("photos", "--verify", "out"), "--verify out cannot be used with source"),
        (("--model", "store/m", "--verify", "out"), "--verify out cannot be used with --model"),
        (("--dry-run", "--verify", "out"), "--verify out cannot be used with --dry-run"),
        (("--verify", "nowhere"), "nowhere"),
    ],
)
def test_invalid_arguments_are_refused(
    run: RunVerb, requests: list[ScoreRequest], words: tuple[str, ...], said: str
) -> None:
    finished = run("score", *words)
    assert said in finished.err
    assert finished.code == 2
    assert finished.err.startswith("graphkiln: ")
    assert requests == []
    assert not os.path.lexists("out")


@pytest.mark.usefixtures("requests")
def test_failed_run_exits_with_its_error(run: RunVerb, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: ScoreRequest, report: Report, __: WriteNotes) -> None:
        report(RUN[0])
        raise ScoringError("no worker works", hint="look at node-1")

    monkeypatch.setattr(backend_run, "score_data_set", fail)
    finished = run("score", *GIVEN)
    assert finished.code == 2
    assert finished.err.endswith("graphkiln: no worker works (look at node-1)\n")
    assert finished.out == ""


def test_missing_extra_is_reported(run: RunVerb, requests: list[ScoreRequest], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphkiln_backend.graph.modules.find_spec", lambda _: None)
    finished = run("score", *GIVEN)
    assert finished.code == 1
    assert "pip install 'graphkiln[score]'" in finished.err
    assert requests == []


def test_dry_run_prints_an_estimate_and_writes_nothing(
    run: RunVerb, requests: list[ScoreRequest], digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphkiln.scoring.estimation.MEASURED_S", 0.1)
    words = ("score", "photos", "--model", digits, "--out", "out", "--dry-run")
    finished = run(*words)
    assert finished.code == 0, finished.err
    for said in ("1 rows in 1 units", "too few rows"):
        assert said in finished.out
    document = json.loads(run(*words, "--progress", "json").out)
    assert (document["planned"]["rows"], document["rate"]["errors"]) == (1, 1)
    assert requests == []
    assert not os.path.lexists("out")


@pytest.mark.usefixtures("requests")
def test_verify_finds_missing_results(run: RunVerb, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write_plan(tmp_path / "out" / "_plan.parquet", [InputRange(path="photos", part="a", identity="b", rows=7)], "c")
    finished = run("score", "--verify", "out")
    assert finished.code == 1
    assert "none of its 7 rows has a result" in finished.out
    document = json.loads(run("score", "--verify", "out", "--progress", "json").out)
    assert (document["ok"], document["inputs"], document["findings"][0]["place"]) == (False, 7, "photos")
    write_plan(tmp_path / "out" / "_plan.parquet", [], "c")
    finished = run("score", "--verify", "out")
    assert finished.code == 0
    assert "out is whole: 0 rows" in finished.out


@pytest.mark.usefixtures("requests")
def test_verify_opens_the_ledger(run: RunVerb, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[ScoreRequest] = []

    def open_destination(request: ScoreRequest) -> None:
        opened.append(request)
        raise ScoringError("opened")

    monkeypatch.setattr("graphkiln.scoring.running.open_destination", open_destination)
    assert run("score", "--verify", "s3://b/a", "--ledger", "postgresql://h/d", "--format", "parquet").code == 2
    assert [(each.destination, each.ledger, each.format) for each in opened] == [
        ("s3://b/a", "postgresql://h/d", "parquet")
    ]
