"""`graphkiln story` with a fake runner: options, output and errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from commands import RunVerb
from stories import CHAIN, make_observation, story_document

from graphkiln.story import runner as running
from graphkiln.story.runner import Progress
from graphkiln.story.variants import Platform, StoryRequest, weights_path
from graphkiln_backend.graph.errors import GraphkilnError, MeasurementError

MODEL = ("--model", "torchvision:resnet18")


class FakeRunner:
    """A fake runner that records its arguments and returns a fixed document."""

    made: ClassVar[list[FakeRunner]]
    document_: ClassVar[dict[str, Any]]
    proven = True
    failure: BaseException | None = None
    reports: Sequence[Progress] = ()

    def __init__(self, request: StoryRequest, platform: Platform, *, resume: bool, report: Any) -> None:
        self.request, self.platform, self.resume, self.report = request, platform, resume, report
        self.ran: tuple[float, Sequence[str]] | None = None
        self.made.append(self)

    def run(self, seconds: float, only: Sequence[str] = ()) -> None:
        self.ran = seconds, only
        for progress in self.reports:
            self.report(progress)
        if self.failure:
            raise self.failure

    def document(self) -> dict[str, Any]:
        return self.document_


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeRunner]:
    """A new class of fake runners for each test."""

    class Runner(FakeRunner):
        made: ClassVar[list[FakeRunner]] = []
        document_ = story_document(
            eager=make_observation(1.0), static=make_observation(1.25), reduced=make_observation(3.0)
        )

    monkeypatch.setattr(running, "StoryRunner", Runner)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Runner


class TestRequest:
    def test_defaults(self, run: RunVerb, fake: type[FakeRunner]) -> None:
        finished = run("story", *MODEL)
        assert finished.code == 0
        assert "random weights" in finished.err
        (runner,) = fake.made
        assert runner.request == StoryRequest(
            source="torchvision:resnet18", image_size=224, weights=None, gradient=False, samples=None
        )
        assert (runner.ran, runner.resume) == ((20.0, []), False)

    def test_options(self, run: RunVerb, fake: type[FakeRunner], tmp_path: Path) -> None:
        weights = tmp_path / "w.pth"
        weights.write_bytes(b"")
        words = ("--image-size", 64, "--seconds", 3, "--gradient", "--weights", weights, "--samples", tmp_path)
        run("story", *MODEL, *words, "--preprocess", '{"resize": 64}', "--only", "reduced,,served", "--resume")
        (runner,) = fake.made
        assert runner.request == StoryRequest(
            source="torchvision:resnet18", image_size=64, weights=weights, gradient=True, samples=tmp_path,
            preprocess={"resize": 64},
        )  # fmt: skip
        assert (runner.ran, runner.resume) == ((3.0, ["reduced", "served"]), True)

    def test_trained_weights_are_found(self, run: RunVerb, fake: type[FakeRunner]) -> None:
        path = weights_path("resnet18", 32)
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")
        finished = run("story", *MODEL, "--image-size", 32)
        assert fake.made[0].request.weights == path
        assert finished.err == ""


class TestOutput:
    def test_json_keys(self, run: RunVerb, fake: type[FakeRunner]) -> None:
        printed = json.loads(run("story", *MODEL, "--json").out)
        assert printed == json.loads(json.dumps(fake.document_))
        assert list(printed) == ["facts", "precision", "steps"]
        assert list(printed["steps"][0]) == [
            "key", "step", "title", "switch", "per_second", "rounds", "p50_ms", "p99_ms", "own", "beside", "cumulative",
            "source", "cores", "memory_mb", "judgment", "refused", "counts", "commands",
        ]  # fmt: skip
        assert list(printed["steps"][0]["judgment"]) == [
            "passed", "verdict", "error", "limit", "difference", "samples", "same", "interval", "undecided", "right",
            "gradient_error",
        ]  # fmt: skip

    def test_tables_and_html_report(self, run: RunVerb, tmp_path: Path) -> None:
        path = tmp_path / "report.html"
        finished = run("story", *MODEL, "--html", path)
        assert path.read_text().startswith("<!DOCTYPE html>")
        assert f"graphkiln: wrote {path}" in finished.err
        assert "img/s" in finished.out
        assert "all together: 3.0x" in finished.out
        assert max(map(len, finished.out.splitlines())) <= 80

    def test_progress_lines(self, run: RunVerb, fake: type[FakeRunner]) -> None:
        fake.reports = (
            Progress(activity="opening the model"),
            Progress(activity="static", done_s=1.0, total_s=9.0),
            Progress(activity="static", done_s=2.0, total_s=9.0, figure="static: 4.0 images/s"),
        )
        lines = run("story", *MODEL).err.splitlines()[1:]
        assert lines == ["graphkiln: opening the model", "graphkiln: static: 4.0 images/s"]


class TestEnd:
    def test_unproven_chain(self, run: RunVerb, fake: type[FakeRunner]) -> None:
        fake.proven = False
        finished = run("story", *MODEL)
        assert finished.code == 1
        assert "img/s" in finished.out

    def test_ctrl_c_prints_the_measurements(self, run: RunVerb, fake: type[FakeRunner]) -> None:
        fake.failure = KeyboardInterrupt()
        finished = run("story", *MODEL, "--json")
        assert finished.code == 130
        assert json.loads(finished.out)["steps"][0]["key"] == CHAIN[0].key
        assert "with --resume to continue" in finished.err

    @pytest.mark.parametrize(
        ("failure", "message"),
        [
            (MeasurementError("the server ended"), "graphkiln: the server ended"),
            (OSError(28, "No space left on device"), "set XDG_CACHE_HOME to another folder"),
        ],
    )
    def test_error_is_one_line(
        self, run: RunVerb, fake: type[FakeRunner], failure: GraphkilnError | OSError, message: str
    ) -> None:
        fake.failure = failure
        finished = run("story", *MODEL)
        assert (finished.code, finished.out) == (1, "")
        assert message in finished.err
