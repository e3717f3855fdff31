"""`graphkiln tune STORE --share a=0.7,b=0.3`: what is read, refused and printed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tuned

from graphkiln.cli.tune_together import apply_choices, check_store, parse_shares, refuse_options, show_together
from graphkiln.tuning import application
from graphkiln.tuning.application import Applied
from graphkiln.tuning.candidate import INSTANCES, THREADS, Candidate
from graphkiln.tuning.sharing import Plan, Response
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.together import Together
from graphkiln_backend.graph.errors import InvalidInput

ONE = Candidate.of({THREADS: 1, INSTANCES: 1})
PLAN = Plan(
    responses={
        name: Response(candidate=ONE, rate=rate, cores=1.0, memory_bytes=100 << 20)
        for name, rate in (("a", 90.0), ("b", 60.0))
    },
    rate=120.0,
    cores=2.0,
    memory_bytes=200 << 20,
    limited_by="a",
)
SHARES = {"a": 3.0, "b": 1.0}
TUNINGS = cast(
    "dict[str, Any]",
    {name: SimpleNamespace(spanned=SimpleNamespace(space=SimpleNamespace(today=ONE))) for name in SHARES},
)


def test_shares_are_read() -> None:
    assert parse_shares("a=0.7, b=0.3") == {"a": 0.7, "b": 0.3}
    assert parse_shares("a=3,b=1,c=2e1") == {"a": 3.0, "b": 1.0, "c": 20.0}


@pytest.mark.parametrize("text", ["a", "a=0,b=1", "a=1,b=-1", "a=1,a=2", "=1,b=1", "a=x,b=1", "a=nan,b=1", "a=1,,b=1"])
def test_what_are_no_shares_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="expected MODEL=SHARE,MODEL=SHARE"):
        parse_shares(text)


def test_a_single_model_is_tuned_by_its_name() -> None:
    with pytest.raises(InvalidInput, match="a single model"):
        parse_shares("a=1")


def test_models_that_the_store_lacks_are_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(InvalidInput, match="has no model b"):
        check_store(str(tmp_path), SHARES)


def test_options_of_a_single_model_are_refused() -> None:
    refuse_options({"--rate": None, "--url": False}, Target(p99_s=1.0))
    with pytest.raises(InvalidInput, match="--url is for a single model"):
        refuse_options({"--rate": None, "--url": True}, Target(p99_s=1.0))
    with pytest.raises(InvalidInput, match="--objective is for a single model"):
        refuse_options({}, Target(p99_s=1.0, objective=Objective.MEMORY))


def together(rate: float | None) -> Together:
    measured = {name: tuned.measured(30.0, 0.02) for name in SHARES}
    return Together(plan=PLAN, rate=rate, measured=measured, reason="" if rate else "b: too slow", spent_s=90.0)


def test_the_table_has_each_model_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    show_together(together(100.0), TUNINGS, SHARES, as_json=False)
    printed = capsys.readouterr().out
    told = " ".join(printed.split())
    assert "together: 100 requests per second, measured in one server (120 by each model alone)" in told
    assert "limited by a; 2 cores, 200 MiB" in printed
    assert all(len(line) <= 80 for line in printed.splitlines())
    assert any("75%" in line and "75" in line for line in printed.splitlines())


def test_what_did_not_hold_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    show_together(together(None), TUNINGS, SHARES, as_json=False)
    assert "no rate held for all models together: b: too slow" in capsys.readouterr().out


def test_json_has_the_rate_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    show_together(together(100.0), TUNINGS, SHARES, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["met"]
    assert {name: row["rate"] for name, row in document["models"].items()} == {"a": 75.0, "b": 25.0}


def test_a_model_of_the_store_has_a_plain_name(tmp_path: Path) -> None:
    (tmp_path / "a" / "1").mkdir(parents=True)
    with pytest.raises(InvalidInput, match=r"has no model a/1, \.\./a"):
        check_store(str(tmp_path), {"a": 1.0, "a/1": 1.0, "../a": 1.0})


def test_nothing_is_written_before_all_are_proven(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []
    monkeypatch.setattr(application, "prove", lambda _, subject, __: done.append(f"prove {subject}"))

    def write(_: Candidate, subject: str, reach: tuple[str, ...]) -> Applied:
        done.append(f"write {subject}")
        return Applied(config=Path(f"/s/{subject}/config.pbtxt"), backup=None, reach=reach)

    monkeypatch.setattr(application, "write", write)
    asked: Any = {
        name: SimpleNamespace(spanned=each.spanned, subject=name, questions=None, reach=())
        for name, each in {**TUNINGS, "c": TUNINGS["a"]}.items()
    }
    other = ONE.with_values({INSTANCES: 2})
    apply_choices({"a": other, "b": other, "c": ONE}, asked)
    assert done == ["prove a", "prove b", "write a", "write b"]
    told = capsys.readouterr().err
    assert "what serves 'c' today is the best" in told
    assert "rm /s/b/config.pbtxt" in told
