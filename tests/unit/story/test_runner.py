"""A complete story with fake variants."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from stories import ON_CPU, story_request

from graphkiln.story import runner as module
from graphkiln.story.digits import split_digits
from graphkiln.story.preparation import ImageSet, choose_images
from graphkiln.story.results import Record, Round
from graphkiln.story.runner import (
    Progress,
    StoryRunner,
)
from graphkiln.story.variants import GraphSpec, Platform, StoryRequest, Variant
from graphkiln.story.workloads import Predictions
from graphkiln_backend.graph.errors import ConversionError, InvalidInput, MeasurementError
from graphkiln_backend.graph.precision import Precision

IMAGES = 20
CHAIN = ["eager", "static", "reduced", "parallel", "compiled", "served"]
SWITCHES = ["engine", "mixed", "pad", "add", "int8"]
SCORES = np.random.default_rng(0).normal(0, 0.1, (IMAGES, 10)) + 8 * np.eye(10)[np.arange(IMAGES) % 10]
GRADIENTS = np.arange(1.0, 9.0)


@dataclass
class FakeWorker:
    """A worker with slightly perturbed reference scores."""

    stage: Stage
    key: str

    def predict(self, jpegs: Sequence[bytes]) -> Predictions:
        assert len(jpegs) == (16 if self.key == "static" else IMAGES)  # its forward graph is proven by step 2
        self.stage.events.append(f"predict {self.key}")
        if self.key in self.stage.failing:
            raise self.stage.failing[self.key]
        scores = SCORES[: len(jpegs)] * (1 + self.stage.errors.get(self.key, 1e-6 if self.key != "eager" else 0))
        return Predictions(scores=scores[:, ::-1].copy() if self.key in self.stage.wrong else scores)

    def parameter_gradients(self, _: bytes) -> tuple[np.ndarray, float]:
        return GRADIENTS * (self.stage.gradient_factor if self.key == "static" else 1), 1e-6


@dataclass
class FakeRunning:
    variant: Variant
    worker: FakeWorker

    def measure(self, number: int, jpegs: Sequence[bytes], seconds: float) -> Round:
        stage = self.worker.stage
        stage.events.append(f"measure {self.variant.key} {number}")
        assert len(jpegs) == IMAGES
        stage.seconds += seconds
        if stage.interrupt_after is not None and len(stage.measured()) > stage.interrupt_after:
            raise KeyboardInterrupt
        return Round(number=number, per_second=10.0, latencies_ms=(100.0,), cores=1.0, memory_mb=50.0)


@dataclass
class Stage:
    """Events of a story.

    Attributes:
        failing: Errors of predictions, by key of the variant.
        refused: Errors of starts.
        wrong: Keys of variants whose predictions are other classes.
        errors: Relative errors of the scores.
        ordered: Graphs that were requested.
        events: What was started, proven, measured and stopped, in order.
    """

    failing: dict[str, Exception] = field(default_factory=dict)
    refused: dict[str, Exception] = field(default_factory=dict)
    wrong: set[str] = field(default_factory=set)
    errors: dict[str, float] = field(default_factory=dict)
    gradient_factor: float = 1 + 1e-7
    interrupt_after: int | None = None
    ordered: list[GraphSpec] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    reports: list[Progress] = field(default_factory=list)
    seconds: float = 0.0

    @contextmanager
    def start(self, variant: Variant, _: object, request: StoryRequest, platform: Platform) -> Iterator[FakeRunning]:
        assert platform == ON_CPU
        assert request.source == "torchvision:resnet18"
        if variant.unavailable:
            raise MeasurementError(variant.unavailable)
        if variant.key in self.refused:
            raise self.refused[variant.key]
        self.events.append(f"start {variant.key}")
        try:
            yield FakeRunning(variant, FakeWorker(self, variant.key))
        finally:
            self.events.append(f"stop {variant.key}")

    def of(self, verb: str) -> list[str]:
        """Return the keys of the variants with an event."""
        return [event.split()[1] for event in self.events if event.startswith(verb)]

    def measured(self) -> list[str]:
        return [event.removeprefix("measure ") for event in self.events if event.startswith("measure")]


NewRunner = Callable[..., StoryRunner]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Stage:
    """Replace the platform's variants by fakes."""
    stage = Stage()
    model = SimpleNamespace(classes=10, derivative="output:image")
    conversions = nullcontext(SimpleNamespace(model=model, order=stage.ordered.extend))
    images = ImageSet(
        description=f"{IMAGES} digits",
        evaluation=tuple(bytes([number]) for number in range(IMAGES)),
        targets=np.arange(IMAGES) % 10,
        calibration=(b"c",),
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "Conversions", lambda *_: conversions)
    monkeypatch.setattr(module, "choose_images", lambda *_: images)
    monkeypatch.setattr(ImageSet, "write", lambda *_: None)
    monkeypatch.setattr(module, "start_variant", stage.start)
    return stage


@pytest.fixture
def new_runner(stage: Stage) -> NewRunner:
    def make(*, resume: bool = False, **fields: Any) -> StoryRunner:
        return StoryRunner(story_request(**fields), ON_CPU, resume=resume, report=stage.reports.append)

    return make


def steps(runner: StoryRunner) -> dict[str, dict[str, Any]]:
    return {step["key"]: step for step in runner.document()["steps"]}


class TestWholeStory:
    def test_every_variant_is_proven_and_measured(self, stage: Stage, new_runner: NewRunner) -> None:
        runner = new_runner()
        runner.run(10.0)
        found = steps(runner)
        assert list(found) == ["eager", "static", "reduced", "parallel", "search", *SWITCHES, "compiled", "served"]
        assert runner.proven
        for key in (*CHAIN, *SWITCHES):
            assert found[key]["counts"], found[key]
            assert found[key]["judgment"]["right"] == 1
        assert found["search"]["refused"] == "cuDNN's search needs a GPU"
        assert found["static"]["judgment"]["gradient_error"] == pytest.approx(1e-7, rel=0.01)
        assert stage.seconds == pytest.approx(10 * len(stage.of("start")))

    def test_graphs_are_ordered_in_the_order_of_the_starts(self, stage: Stage, new_runner: NewRunner) -> None:
        """While the training graph is exported, the variants of the first graph are proven."""
        new_runner().run(1.0)
        assert stage.of("predict")[:5] == ["eager", "reduced", "parallel", "engine", "mixed"]
        names = dict.fromkeys(spec.name for spec in stage.ordered)
        assert [*names] == ["base", "training", "pad-fused", "add-fused", "int8", "compiled", "served"]

    def test_rounds_rotate_variants(self, stage: Stage, new_runner: NewRunner) -> None:
        new_runner().run(1.0, ["static"])
        assert stage.measured() == [
            f"{key} {number}"
            for number, keys in enumerate(
                [
                    ("eager", "static", "reduced"),
                    ("static", "reduced", "eager"),
                    ("reduced", "eager", "static"),
                    ("eager", "static", "reduced"),
                    ("static", "reduced", "eager"),
                ]
            )
            for key in keys
        ]

    def test_lower_precision_is_judged_by_fp32_noise(self, stage: Stage, new_runner: NewRunner) -> None:
        stage.errors = {"reduced": 1e-6, "mixed": 1e-3}
        runner = new_runner()
        runner.run(1.0, ["mixed"])
        found = steps(runner)
        assert found["mixed"]["judgment"]["passed"]
        assert found["reduced"]["judgment"]["difference"] == pytest.approx(np.abs(SCORES).max() * 1e-6, rel=0.01)


class TestPrecision:
    @pytest.mark.parametrize(
        ("wrong", "precision"),
        [(set(), Precision.INT8), ({"int8"}, Precision.BF16), ({"int8", "mixed"}, Precision.FP32)],
    )
    def test_lowest_proven_precision(
        self, stage: Stage, new_runner: NewRunner, wrong: set[str], precision: Precision
    ) -> None:
        stage.wrong = wrong
        runner = new_runner()
        runner.run(1.0)
        assert runner.record.precision is precision
        assert runner.document()["precision"] == precision
        assert steps(runner)["compiled"]["title"] == f"compiled ({precision})"

    def test_precision_switches_always_run(self, stage: Stage, new_runner: NewRunner) -> None:
        new_runner().run(1.0, ["served"])
        assert stage.of("start") == ["eager", "reduced", "mixed", "int8", "served"]


class TestRefusals:
    def test_variant_that_cannot_start_is_skipped(self, stage: Stage, new_runner: NewRunner) -> None:
        stage.refused = {"pad": ConversionError("no padding here"), "parallel": MeasurementError("no server")}
        runner = new_runner()
        runner.run(1.0)
        found = steps(runner)
        assert found["pad"]["refused"] == "no padding here"
        assert found["compiled"]["counts"]
        assert found["compiled"]["beside"] == "reduced"
        assert runner.proven  # what was not done proves nothing, and disproves nothing

    def test_variant_with_failed_proof_is_stopped(self, stage: Stage, new_runner: NewRunner) -> None:
        stage.failing = {"static": MeasurementError("it ended")}
        new_runner().run(1.0, ["static"])
        assert stage.events.index("stop static") < stage.events.index("measure eager 0")
        assert "static" not in {event.split()[0] for event in stage.measured()}

    def test_static_graph_is_judged_with_the_graph_of_step_2(self, stage: Stage, new_runner: NewRunner) -> None:
        stage.errors = {"reduced": 0.1}
        runner = new_runner()
        runner.run(1.0, ["static"])
        assert not steps(runner)["static"]["judgment"]["passed"]
        stage.errors, stage.refused = {}, {"reduced": ConversionError("no graph")}
        runner = new_runner()
        runner.run(1.0, ["static"])
        assert "step 2" in steps(runner)["static"]["refused"]

    def test_graph_of_a_switch_is_served_without_fusions(self, stage: Stage, new_runner: NewRunner) -> None:
        stage.refused = dict.fromkeys(("pad", "add"), MeasurementError("changes nothing"))
        runner = new_runner()
        runner.run(1.0)
        graphs = {variant.key: variant.graph for variant in runner.variants}
        assert graphs["compiled"] is graphs["int8"]
        del stage.refused["add"]
        runner = new_runner()
        runner.run(1.0)
        graphs = {variant.key: variant.graph for variant in runner.variants}
        assert graphs["compiled"] is not graphs["int8"]

    def test_eager_variant_is_required(self, stage: Stage, new_runner: NewRunner) -> None:
        stage.refused = {"eager": ConversionError("no such weights")}
        with pytest.raises(ConversionError, match="no such weights"):
            new_runner().run(1.0)
        assert stage.events == []

    def test_wrong_predictions_do_not_count(self, stage: Stage, new_runner: NewRunner) -> None:
        stage.wrong = {"parallel"}
        runner = new_runner()
        runner.run(1.0, ["parallel"])
        parallel = steps(runner)["parallel"]
        assert parallel["per_second"] == 10
        assert (parallel["counts"], parallel["own"], parallel["judgment"]["passed"]) == (False, None, False)
        assert not runner.proven

    def test_other_gradients_fail_the_static_step(self, stage: Stage, new_runner: NewRunner) -> None:
        stage.gradient_factor = 1.01
        runner = new_runner()
        runner.run(1.0, ["static"])
        assert not steps(runner)["static"]["judgment"]["passed"]

    def test_unknown_step(self, stage: Stage, new_runner: NewRunner) -> None:
        with pytest.raises(InvalidInput, match=r"unknown step 'servd'"):
            new_runner().run(1.0, ["static", "servd"])
        assert stage.reports == []


class TestResume:
    @pytest.mark.usefixtures("stage")
    def test_story_starts_again_by_default(self, new_runner: NewRunner) -> None:
        new_runner().run(1.0, ["reduced"])
        leftover = story_request().folder / "models"
        leftover.mkdir()
        runner = new_runner()
        assert runner.record.seen == {}
        assert not leftover.exists()

    def test_resume_after_ctrl_c(self, stage: Stage, new_runner: NewRunner) -> None:
        stage.interrupt_after = 3
        runner = new_runner()
        with pytest.raises(KeyboardInterrupt):
            runner.run(1.0, ["reduced"])
        assert stage.of("stop") == ["reduced", "eager"]
        kept = Record.read(story_request().folder / "record.json")
        assert kept == runner.record
        assert sum(len(observation.rounds) for observation in kept.seen.values()) == 3

        first = stage.measured()[:3]
        stage.events.clear()
        stage.interrupt_after = None
        again = new_runner(resume=True)
        again.run(1.0, ["reduced"])
        assert stage.of("predict") == []  # what was proven is not proven again
        assert not set(first) & set(stage.measured())
        assert {key: len(o.rounds) for key, o in again.record.seen.items()} == {"eager": 5, "reduced": 5}

    @pytest.mark.usefixtures("stage")
    def test_nothing_to_resume(self, new_runner: NewRunner) -> None:
        with pytest.raises(MeasurementError, match="cannot resume"):
            new_runner(resume=True)

    def test_refused_variant_is_not_retried(self, stage: Stage, new_runner: NewRunner) -> None:
        stage.refused = {"pad": ConversionError("no padding here")}
        new_runner().run(1.0, ["pad"])
        stage.refused = {}
        stage.events.clear()
        new_runner(resume=True).run(1.0, ["pad"])
        assert "pad" not in stage.of("start")


# Images of a story.


def test_evaluation_and_calibration_are_disjoint(tmp_path: Path) -> None:
    for number in range(10):
        Image.new("L", (8, 8), 20 * number).save(tmp_path / f"{number}.jpg")
    chosen = choose_images(tmp_path, 10)
    assert chosen.targets is None
    assert not set(chosen.evaluation) & set(chosen.calibration)


def test_held_out_digits_are_not_calibrated_on(monkeypatch: pytest.MonkeyPatch) -> None:
    split = split_digits()
    monkeypatch.setattr("graphkiln.story.preparation.split_digits", lambda: split)
    chosen = choose_images(None, 10)
    assert chosen.targets is not None
    assert len(chosen.evaluation) == len(chosen.targets) == 200
    assert not set(chosen.evaluation) & set(chosen.calibration)
    assert choose_images(None, 1000).targets is None


def test_truncated_image_is_named(repository: Path, tmp_path: Path) -> None:
    for number in range(5):
        image = Image.open(repository / "docs" / "digits" / "seven.png").convert("RGB")
        image.save(tmp_path / f"{number}.jpg")
    (tmp_path / "3.jpg").write_bytes((tmp_path / "3.jpg").read_bytes()[:-200])
    with pytest.raises(InvalidInput, match=r"3\.jpg cannot be decoded"):
        choose_images(tmp_path, 10)


class TestWrite:
    def image_set(self, count: int, *, labeled: bool) -> ImageSet:
        return ImageSet(
            description="",
            evaluation=tuple(f"e{number}".encode() for number in range(count)),
            targets=np.arange(count) % 2 if labeled else None,
            calibration=(b"c0", b"c1"),
            labels=("zero", "one") if labeled else (),
        )

    def test_labelled_samples_in_class_folders(self, tmp_path: Path) -> None:
        folder = tmp_path / "deep" / "story"
        self.image_set(3, labeled=True).write(folder / "samples", folder / "calibration", folder / "labels.txt")
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.jpg")}
        assert files == {
            "samples/zero/000.jpg": b"e0", "samples/one/001.jpg": b"e1", "samples/zero/002.jpg": b"e2",
            "calibration/000.jpg": b"c0", "calibration/001.jpg": b"c1",
        }  # fmt: skip
        assert (folder / "labels.txt").read_text() == "zero\none\n"
