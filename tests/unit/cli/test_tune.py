"""`graphkiln tune` with a fixed search: options, output, `--apply` and mistakes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import RunVerb
from commands import words as words_of
from tuned import finished

from graphkiln.tuning.journal import Progress
from graphkiln.tuning.target import Objective, Target
from graphkiln.tuning.tuner import Tuning
from graphkiln_backend.system.signals import Stopped

Ran = list[Tuning]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ran:
    """Replaced searches, which return a fixed result."""
    searches: Ran = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def search(self: Tuning, report: Callable[[Progress], None]) -> Any:
        del report

        searches.append(self)
        return finished(self.space, self.target, met=self.target.p99_s > 0.001)

    monkeypatch.setattr(Tuning, "run", search)

    return searches


def test_met_and_missed_targets(run: RunVerb, ran: Ran, digits: Path) -> None:
    done = run("tune", digits, "--p99", "50ms")
    assert done.code == 0, done.err
    assert "chosen: engine=openvino" in done.out
    assert "candidates of" in done.err
    (asked,) = ran
    assert (asked.target, asked.budget_s) == (Target(p99_s=0.05), 1200)
    missed = run("tune", digits, "--p99", "1ms")
    assert missed.code == 1
    assert "no configuration was confirmed" in missed.out
    assert "closest: " in missed.out


def test_options(run: RunVerb, ran: Ran, digits: Path) -> None:
    words = "--rate 6000/min --objective memory --budget 5m --burst 4 --only engine,threads --fix threads=1"
    done = run("tune", digits / "1", "--p99", "0.2s", *words.split())
    assert done.code == 0, done.err
    (asked,) = ran
    assert asked.target == Target(p99_s=0.2, rate=100, objective=Objective.MEMORY)
    assert (asked.budget_s, asked.arriving.burst) == (300, 4)
    axes = {axis.key: axis.values for axis in asked.space.axes}
    assert axes["threads"] == (1,)
    assert axes["max_batch_size"] == (32,)
    assert False in axes["spin"], "a single thread does not spin"


@pytest.mark.usefixtures("ran")
def test_json_and_html(run: RunVerb, digits: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    done = run("tune", digits, "--p99", "50ms", "--json", "--html", page)
    document = json.loads(done.out)
    assert document["met"]
    assert "digits" in page.read_text()


def test_dry_run_measures_nothing(run: RunVerb, ran: Ran, digits: Path) -> None:
    done = run("tune", digits, "--p99", "50ms", "--dry-run")
    assert done.code == 0
    assert "candidates of" in done.out
    as_data = run("tune", digits, "--p99", "50ms", "--dry-run", "--json", "--only", "spin,engine")
    space = json.loads(as_data.out)
    assert set(space["axes"]["spin"]) == {True, False}
    assert 0 < space["candidates"] < space["points"]
    assert ran == []


@pytest.mark.parametrize(("signal", "code"), [(KeyboardInterrupt(), 130), (Stopped(15), 143)])
@pytest.mark.usefixtures("ran")
def test_interrupted_search_prints_how_to_continue(
    run: RunVerb, digits: Path, monkeypatch: pytest.MonkeyPatch, signal: KeyboardInterrupt, code: int
) -> None:
    def interrupt(_self: Tuning, _report: object) -> None:
        raise signal

    monkeypatch.setattr(Tuning, "run", interrupt)
    done = run("tune", digits, "--p99", "50ms")
    assert done.code == code
    assert "the same command" in done.err


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, digits: Path) -> list[Any]:
    """Candidates that were written, without writing them."""
    from graphkiln.tuning import apply as application

    found: list[Any] = []
    proven: list[Any] = []

    def write(candidate: Any, _: Any) -> application.Applied:
        assert candidate in proven
        found.append(candidate)
        return application.Applied(config=digits / "config.pbtxt", backup=digits / "old", notes=("smaller",))

    monkeypatch.setattr(application, "prove", lambda candidate, *_: proven.append(candidate))
    monkeypatch.setattr(application, "write", write)
    return found


def test_choice_is_applied(run: RunVerb, ran: Ran, digits: Path, written: list[Any]) -> None:
    done = run("tune", digits, "--p99", "50ms", "--apply")
    assert done.code == 0
    assert written[0]["engine"] == "openvino"
    assert f"mv {digits / 'old'} {digits / 'config.pbtxt'}" in done.err
    assert "graphkiln load digits" in done.err
    assert "poll mode" in words_of(done.err)
    assert "smaller" in done.err
    missed = run("tune", digits, "--p99", "1ms", "--apply")
    reason = "no configuration was confirmed to meet the target of 'digits'; the machine became slower"
    assert f"nothing is written: {reason}" in words_of(missed.err)
    assert len(written) == 1, "nothing is written for a missed target"
    assert len(ran) == 2


def test_fixed_values_are_written(
    run: RunVerb, digits: Path, monkeypatch: pytest.MonkeyPatch, written: list[Any]
) -> None:
    """A configuration changed only by `--fix` differs from today's."""

    def search(self: Tuning, _: Callable[[Progress], None]) -> Any:
        found = finished(self.space, self.target)
        return replace(found, chosen=found.rows[1], default=None)  # the first value of each axis

    monkeypatch.setattr(Tuning, "run", search)
    words = ["--p99", "50ms", "--apply", "--fix", "max_batch_size=4"]
    shown = run("tune", digits, *words)
    assert "chosen: max_batch_size=4" in shown.out
    assert [each["max_batch_size"] for each in written] == [4]
    run("tune", digits, "--p99", "50ms", "--apply")
    assert len(written) == 1, "today's configuration is not written"


def test_apply_requires_a_writable_folder(
    run: RunVerb, ran: Ran, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, *_, **__: Path(path) != digits)
    done = run("tune", digits, "--p99", "50ms", "--apply")
    assert done.code == 2
    assert "is not writable" in words_of(done.err)
    assert ran == []


def test_model_on_several_devices_is_refused(run: RunVerb, ran: Ran, digits: Path, tmp_path: Path) -> None:
    model = tmp_path / "digits"
    shutil.copytree(digits, model)
    with (model / "config.pbtxt").open("a") as config:
        config.write('parameters { key: "parallel" value { string_value: "data=1" } }\n')
    done = run("tune", model, "--p99", "50ms")
    assert done.code == 2
    assert "spreads 'digits' over devices" in words_of(done.err)
    assert ran == []


FOREIGN = """# of the vision team
platform: "onnxruntime_onnx"
max_batch_size: 16
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 500 }
instance_group [ { kind: KIND_CPU } ]  # Triton makes it two
optimization { graph: { level: 1 } }
parameters { key: "intra_op_thread_count" value: { string_value: "1" } }
"""


def test_model_of_tritons_cpp_backend(run: RunVerb, ran: Ran, digits: Path, tmp_path: Path) -> None:
    model = tmp_path / "store" / "resnet"
    (model / "1").mkdir(parents=True)
    shutil.copy(digits / "1" / "model.onnx", model / "1")
    (model / "config.pbtxt").write_text(FOREIGN)
    done = run("tune", model, "--p99", "50ms", "--only", "max_batch_size", "--fix", "instances=1")
    assert done.code == 0, done.err
    (asked,) = ran
    assert len(asked.space.candidates) > 4, "today's values exclude no candidate"
    today = asked.space.today
    assert today["spin"] is False, "a single thread does not spin"
    assert (today["engine"], today["threads"], today["instances"], today["max_batch_size"]) == ("onnxruntime", 1, 2, 16)
    assert (today["max_queue_delay_us"], today["preferred_batch_sizes"]) == (500, (4, 8))
    assert asked.requests.origin == "made up"
    assert (model / "config.pbtxt").read_text() == FOREIGN


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("{digits} --p99 50", "--p99 50: expected a time such as 50ms"),
        ("{digits} --p99 50ms --rate 0", "--rate 0"),
        ("{digits} --p99 50ms --rate 9/s --objective throughput", "objective throughput"),
        ("{digits} --p99 50ms --budget 0s", "--budget 0s: expected a time above 0"),
        ("{digits} --p99 50ms --rate 1/min --budget 20m", "20 requests in 1200 s"),
        ("{digits} --p99 50ms --fix thread=1", "threads"),
        ("{digits} --p99 50ms --fix threads=0", "at least 1"),
        ("{digits} --p99 50ms --fix threads=1 --fix threads=2", "'threads' is already fixed"),
        ("{digits} --p99 50ms --calibration none.npz", "none.npz"),
        ("{digits} --p99 50ms --html .", "is a folder"),
        ("{digits} --p99 50ms --fix engine=tensorrt", "one of onnxruntime, openvino"),
        ("{digits} --p99 50ms --only engin", "engine"),
        ("{digits} --p99 50ms --fix threads=9 --fix instances=9", "no candidate is left"),
        ("{digits} --p99 50ms --accuracy-floor 1%", "labelled samples: golden samples have none"),
        ("{digits} --p99 50ms --accuracy-floor 1", "a share such as 0.5%"),
        ("{digits} --p99 50ms --burst 2 --trace none.txt", "mutually exclusive"),
        ("{digits} --p99 50ms --trace none.txt", "none.txt cannot be read"),
        ("{digits}s --p99 50ms", "there is no file or folder"),
        ("s3://bucket/models/digits --p99 50ms", "is not on this machine"),
    ],
)
def test_mistakes(run: RunVerb, ran: Ran, digits: Path, words: str, reason: str) -> None:
    done = run("tune", *words.format(digits=digits).split())
    assert done.code == 2, done.err

    assert reason in words_of(done.err)
    assert ran == []


@pytest.mark.usefixtures("ran")
def test_version_that_is_not_served(run: RunVerb, digits: Path, tmp_path: Path) -> None:
    model = shutil.copytree(digits, tmp_path / "digits")
    shutil.copytree(model / "1", model / "3")
    assert "version 1 is not served (version_policy: 3)" in words_of(run("tune", model / "1", "--p99", "50ms").err)
