"""`graphkiln tune STORE --share` with two models on a real server: searched alone, shared out, measured together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tune_command import copy_model, digest, events, journals, measured, tune

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1500)]

WORDS = (
    "--share", "first=0.7,second=0.3", "--p99", "2s", "--budget", "400s", "--json",
    "--only", "spin", "--fix", "threads=1", "--fix", "instances=1", "--fix", "spin=off",
)  # fmt: skip
"""A core and one candidate for each model, and a target and a budget that do for a machine that is busy with others."""


def test_two_models_are_tuned_for_one_machine(digits: Path, tmp_path: Path) -> None:
    store = tmp_path / "models"
    for name in ("first", "second"):
        copy_model(digits, store, name)
    before = digest(store)
    done = tune(tmp_path, store, *WORDS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["met"]
    assert found["cores"] == 2
    assert 0 < found["rate"] <= found["rate_by_models_alone"]
    assert found["limited_by"] in found["models"]
    shares = {name: row["rate"] / found["rate"] for name, row in found["models"].items()}
    assert shares == pytest.approx({"first": 0.7, "second": 0.3})
    for row in found["models"].values():
        assert row["configuration"]["threads"] == 1
        assert 0 < row["p99_at_most_ms"] <= 2000
        assert row["requests"] >= 100
    assert digest(store) == before, "the user's files are as they were"
    check_journals(tmp_path, found["rate"])

    kept = [path.read_bytes() for path in journals(tmp_path)]
    again = tune(tmp_path, store, *WORDS)
    assert json.loads(again.stdout)["rate"] == found["rate"]
    assert [path.read_bytes() for path in journals(tmp_path)] == kept, "nothing is measured twice"


def check_journals(folder: Path, rate: float) -> None:
    """One for each model alone, and one whose last line holds what both did in one server at the rate that is told."""
    first, second, together = journals(folder)
    assert all(measured(events(path)) for path in (first, second))
    last = events(together)[-1]
    assert sum(last["rates"].values()) == pytest.approx(rate, rel=1e-3)
    assert {name: outcome["placed"] for name, outcome in last["outcomes"].items()} == {
        "first": "onnxruntime on cpu in fp32",
        "second": "onnxruntime on cpu in fp32",
    }
