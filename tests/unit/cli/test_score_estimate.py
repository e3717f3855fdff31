"""What `score --dry-run` prints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphkiln.cli.score_results import print_estimate
from graphkiln.scoring.estimation import Estimate, Planned, Rate, Workers
from graphkiln_backend.scoring.messages import ScoreRequest

REQUEST = ScoreRequest(source="/photos", model="/store/m", destination="/out")
ESTIMATE = Estimate(
    configuration="c0ffee",
    model="resnet50 version 3",
    session="openvino on cpu in int8",
    planned=Planned(units=1000, rows=10**6, size_bytes=120 << 30, units_before=250, rows_before=250_000),
    workers=Workers(by_node={f"node-{number}": 4 for number in range(40)}, cores=8, here=4),
    rate=Rate(rows=4096, errors=2, pieces=10, per_s=812.4, interval=(790.2, 834.6)),
    start_s=4.2,
    seconds=3600.0,
    seconds_interval=(3500.0, 7300.0),
)


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def printed(estimate: Estimate, capsys: pytest.CaptureFixture[str]) -> str:
    print_estimate(estimate, REQUEST)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    return " ".join(text.replace("\u2502", " ").split())


def test_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = printed(ESTIMATE, capsys)
    for said in (
        "1,000,000 rows in 1,000 units, 120 GiB",
        "250,000 rows in 250 units: 750,000 rows are left",
        "resnet50 version 3: openvino on cpu in int8",
        "4 on node-0",
        "and 30 more nodes, 8 cores each",
        "4,096 rows in 10 pieces, 2 with an error",
        "812 rows/s (790 to 835 with 95% confidence)",
        "60 min, of which 4 s until workers are ready (58 min to 2.0 h)",
    ):
        assert said in words


def test_nothing_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing is left to be scored" in printed(replace(ESTIMATE, rate=None), capsys)


def test_too_few_rows_and_no_room(capsys: pytest.CaptureFixture[str]) -> None:
    rate = Rate(rows=1, errors=0, pieces=1, per_s=1.0, interval=None)
    nowhere = replace(ESTIMATE, rate=rate, workers=replace(ESTIMATE.workers, by_node={}))
    words = printed(nowhere, capsys)
    assert "too few rows for an interval" in words
    assert "no node has room" in words


def test_what_a_run_would_refuse(capsys: pytest.CaptureFixture[str]) -> None:
    words = printed(replace(ESTIMATE, planned=replace(ESTIMATE.planned, stale=7)), capsys)
    assert "7 units in the destination are not of this input and configuration" in words
