"""The story's figures: segments, factors, judgments, what is kept on disk, commands, and the page."""

from __future__ import annotations

import itertools
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from graphkiln.cli.main import app
from graphkiln.story.images import choose
from graphkiln.story.judging import Judgment, judge, judge_parameter_gradients
from graphkiln.story.measuring import run_segment
from graphkiln.story.page import factor_chart, latency_chart, page
from graphkiln.story.requests import Machine, Request
from graphkiln.story.results import Record, Round, Seen, document, rows
from graphkiln.story.tables import show
from graphkiln.story.ways import Way, commands, convert_options, first_ways, last_ways
from graphkiln.story.work import Answers, SessionWork
from graphkiln.story.worker import Worker
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.errors import InvalidInput, MeasurementError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.proof.policy import BF16, INT8, OTHER_ENGINE
from graphkiln_backend.repository.version import read_version

ON_CPU = Machine(device=CPU, batch=8)
ON_GPU = Machine(device=Device.gpu(), batch=64)
JPEGS = (b"one", b"two", b"three")


def request(**facts: Any) -> Request:
    return Request(
        **{
            "source": "torchvision:resnet18",
            "image_size": 64,
            "weights": None,
            "gradient": False,
            "samples": None,
            **facts,
        }
    )


def judgment(*, passed: bool = True, **facts: Any) -> Judgment:
    return Judgment(
        **{"verdict": "fp32: PASS", "error": 1e-6, "limit": 1e-4, "difference": 1e-6, "samples": 200, "same": 200,
           "interval": (0.98, 1.0), "passed": passed, **facts}
    )  # fmt: skip


def seen(*rates: float, passed: bool = True) -> Seen:
    found = tuple(
        Round(number=number, per_second=rate, latencies_ms=(1e3 / rate,) * 3, cores=1.5, memory_mb=100.0)
        for number, rate in enumerate(rates)
    )
    return Seen(judgment=judgment(passed=passed), rounds=found)


CHAIN = (
    Way(key="eager", step=0, title="eager", kind="eager"),
    Way(key="static", step=1, title="static", kind="static", beside="eager", source="1.25"),
    Way(key="reduced", step=2, title="reduced", kind="session", beside="static", source="2.33"),
    Way(key="int8", step=4, title="int8", kind="tensors", beside="reduced", switch=True),
)


def told(**ways: Seen) -> dict[str, Any]:
    record = Record(
        facts={"model": "m", "image size": 64, "machine": "here", "date": "today", "weights": "w"}, seen=ways
    )
    return document(CHAIN, record, {way.key: ("graphkiln bench",) for way in CHAIN})


class TestSegments:
    def test_one_caller_is_busy_all_the_time(self) -> None:
        found = run_segment(lambda _: time.sleep(0.01), 1, JPEGS, 0.1)
        assert found.per_second == pytest.approx(found.images / found.seconds)
        assert len(found.latencies_ms) == found.images
        assert min(found.latencies_ms) >= 10

    def test_a_slow_image_is_answered_although_the_time_is_over(self) -> None:
        assert run_segment(lambda _: time.sleep(0.05), 1, JPEGS, 0.001).images == 1

    def test_batches_count_from_answer_to_answer(self) -> None:
        """A stand-in for a server that answers all who wait at every tick; filling and emptying must not count."""
        begun = time.perf_counter()
        waiting = iter([0.4] * 4)  # the first batch is late

        def ask(_: bytes) -> None:
            time.sleep(next(waiting, 0))
            time.sleep(0.05 - (time.perf_counter() - begun) % 0.05)

        found = run_segment(ask, 4, JPEGS, 0.92)
        assert found.per_second == pytest.approx(80, rel=0.3)

    def test_images_are_taken_in_turn(self) -> None:
        taken: list[bytes] = []

        def ask(jpeg: bytes) -> None:
            taken.append(jpeg)
            time.sleep(0.002)

        run_segment(ask, 1, JPEGS, 0.05)
        assert taken[:4] == [*JPEGS, JPEGS[0]]

    def test_an_error_ends_it(self) -> None:
        def ask(_: bytes) -> None:
            raise MeasurementError("no more")

        with pytest.raises(MeasurementError, match="no more"):
            run_segment(ask, 3, JPEGS, 60)


class TestFactors:
    def test_are_medians_of_rounds_not_of_rates(self) -> None:
        """The machine is ten times slower in the second round: the factor does not see it."""
        found = rows(CHAIN, Record(facts={}, seen={"eager": seen(1, 0.1, 1), "static": seen(2, 0.2, 2)}))
        assert found[1].own == pytest.approx(2)
        assert found[1].cumulative == pytest.approx(2)

    def test_a_step_that_fails_the_policy_does_not_count_and_is_passed_over(self) -> None:
        record = Record(facts={}, seen={"eager": seen(1), "static": seen(5, passed=False), "reduced": seen(10)})
        _, static, reduced, _ = rows(CHAIN, record)
        assert (static.counts, static.own, static.cumulative) == (False, None, None)
        assert (reduced.beside, reduced.own, reduced.cumulative) == ("eager", 10, 10)

    def test_a_step_that_was_refused_is_passed_over(self) -> None:
        record = Record(facts={}, seen={"eager": seen(1), "static": Seen(refused="no such graph"), "reduced": seen(3)})
        assert rows(CHAIN, record)[2].beside == "eager"

    def test_a_switch_is_no_part_of_the_chain(self) -> None:
        record = Record(facts={}, seen={"eager": seen(1), "static": seen(2), "reduced": seen(4), "int8": seen(12)})
        switch = rows(CHAIN, record)[3]
        assert (switch.own, switch.cumulative) == (3, None)

    def test_percentiles_are_of_all_rounds(self) -> None:
        (row, *_) = rows(CHAIN, Record(facts={}, seen={"eager": seen(10, 100)}))
        assert row.p50_ms == pytest.approx(55)


class TestRecord:
    def test_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        record = Record(
            facts={"model": "m"}, precision=Precision.INT8, seen={"eager": seen(1.5), "x": Seen(refused="why")}
        )
        record.write(tmp_path / "record.json")
        assert Record.read(tmp_path / "record.json") == record
        assert [path.name for path in tmp_path.iterdir()] == ["record.json"]

    @pytest.mark.parametrize("content", ["", "{", '{"facts": {}, "seen": {"eager": {"rounds": 5}}}', '{"other": 1}'])
    def test_one_that_is_spoiled_says_how_to_go_on(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "record.json").write_text(content)
        with pytest.raises(MeasurementError, match=r"cannot resume .*start anew, without --resume"):
            Record.read(tmp_path / "record.json")

    def test_other_requests_have_other_folders(self, tmp_path: Path) -> None:
        weights = tmp_path / "w.pth"
        weights.write_bytes(b"1")
        different = [
            request(),
            request(image_size=32),
            request(gradient=True),
            request(source="timm:resnet18"),
            request(weights=weights),
            request(samples=tmp_path),
            request(preprocess={"resize": 1}),
        ]
        assert len({each.folder for each in different}) == len(different)
        assert request().folder == request().folder


class TestFaults:
    def test_a_image_that_is_cut_short_is_named(self, repository: Path, tmp_path: Path) -> None:
        for number in range(5):
            image = Image.open(repository / "docs" / "digits" / "seven.png").convert("RGB")
            image.save(tmp_path / f"{number}.jpg")
        (tmp_path / "3.jpg").write_bytes((tmp_path / "3.jpg").read_bytes()[:-200])
        with pytest.raises(InvalidInput, match=r"3\.jpg cannot be decoded"):
            choose(tmp_path, 10)

    def test_a_process_that_is_killed_is_told_by_its_step(self, digits: Path) -> None:
        spec = read_version(digits / "1").manifest
        assert spec is not None
        assert spec.preprocess is not None
        work = SessionWork(graph=digits / "1" / "model.onnx", preprocess=spec.preprocess, device=CPU)
        with Worker(work, "2: reduced") as worker:
            psutil.Process(worker.pid).kill()
            with pytest.raises(MeasurementError, match=r"process of '2: reduced' ended with code -9 .*--resume"):
                worker.answers(JPEGS)


class TestJudging:
    reference = np.random.default_rng(0).normal(0, 1, (50, 10)) + 8 * np.eye(10)[np.arange(50) % 10]
    targets = np.arange(50) % 10

    def judged(self, found: Answers, **facts: Any) -> Judgment:
        usual = {"limits": OTHER_ENGINE, "noise": 0, "targets": None}
        return judge(Answers(scores=self.reference), found, **{**usual, **facts})

    def test_the_same_answers(self) -> None:
        found = self.judged(Answers(scores=self.reference * (1 + 1e-6)), targets=self.targets)
        assert found.passed
        assert (found.same, found.samples, found.right) == (50, 50, 1.0)
        assert found.error == pytest.approx(1e-6, rel=1e-2)

    def test_other_scores(self) -> None:
        assert not self.judged(Answers(scores=self.reference * 1.01)).passed

    def flipped(self, count: int) -> Answers:
        """So many images decided otherwise, by a hair."""
        scores = self.reference.copy()
        for row in range(count):
            best = scores[row].argmax()
            scores[row, (best + 1) % 10] = scores[row, best] + 0.01
        return Answers(scores=scores)

    def test_other_decisions(self) -> None:
        found = self.judged(self.flipped(3), limits=BF16, noise=1e-6)
        assert not found.passed
        assert "top-1 agreement 47/50" in found.verdict

    def test_int8_may_decide_otherwise_where_as_many_are_right(self) -> None:
        """Two wrong answers instead of two right ones elsewhere: the metric did not drop."""
        wrong = self.targets.copy()
        wrong[:2] = (self.targets[:2] + 1) % 10
        limits, found = INT8, self.flipped(2)
        assert not self.judged(found, limits=limits, noise=1e-6).passed
        assert self.judged(found, limits=limits, noise=1e-6, targets=wrong).passed
        assert not self.judged(found, limits=limits, noise=1e-6, targets=self.targets).passed

    def test_the_best_few_are_compared_with_the_same_classes(self) -> None:
        order = np.argsort(-self.reference, axis=1)[:, :5]
        scores = np.take_along_axis(self.reference, order, axis=1)
        assert self.judged(Answers(scores=scores, indices=order)).passed
        assert not self.judged(Answers(scores=scores, indices=(order + 1) % 10)).passed
        near = order.copy()
        near[:, [3, 4]] = near[:, [4, 3]]  # with their scores: the same answer in another order
        swapped = scores.copy()
        swapped[:, [3, 4]] = swapped[:, [4, 3]]
        assert self.judged(Answers(scores=swapped, indices=near)).passed

    def test_undecided_answers_are_not_judged(self) -> None:
        flat = np.full((20, 10), 1.0) + np.random.default_rng(0).normal(0, 1e-3, (20, 10))
        found = judge(Answers(scores=flat), Answers(scores=flat * 1.001), INT8, noise=1e-6, targets=None)
        assert found.passed
        assert "give samples and weights that decide" in found.undecided

    def test_gradients_have_a_row_of_their_own(self) -> None:
        gradients = np.random.default_rng(1).normal(size=(50, 3, 4, 4))
        reference = Answers(scores=self.reference, gradients=gradients)
        for factor, passed in ((1 + 4e-4, True), (1 + 6e-4, False)):
            found = Answers(scores=self.reference, gradients=gradients * factor)
            assert judge(reference, found, OTHER_ENGINE, noise=0, targets=None).passed is passed

    def test_gradients_by_parameters(self) -> None:
        row = np.random.default_rng(2).normal(size=1000)
        good = judge_parameter_gradients(judgment(), row, row * (1 + 1e-6), 0.0)
        assert good.passed
        assert good.gradient_error == pytest.approx(1e-6, rel=1e-2)
        assert not judge_parameter_gradients(judgment(), row, row[::-1].copy(), 0.0).passed
        assert not judge_parameter_gradients(judgment(), row, row * 1.001, 1e-5).passed
        assert judge_parameter_gradients(judgment(), row, row * 1.001, 1e-3).passed  # fp32 knows no better


class TestWays:
    def test_what_a_cpu_cannot_do_is_said(self) -> None:
        unavailable = {way.key: way.unavailable for way in first_ways(ON_CPU) if way.unavailable}
        assert unavailable == {"search": "cuDNN's search needs a GPU"}
        assert {way.key for way in first_ways(ON_GPU) if way.unavailable} == {"engine", "int8"}

    def test_each_is_compared_with_one_before_it(self) -> None:
        for machine in (ON_CPU, ON_GPU):
            ways = (*first_ways(machine), *last_ways("bf16"))
            keys = [way.key for way in ways]
            assert len(set(keys)) == len(keys)
            assert all(not way.beside or way.beside in keys[:index] for index, way in enumerate(ways))

    @pytest.mark.parametrize("gradient", [True, False])
    def test_their_commands_are_ones_that_graphkiln_takes(self, tmp_path: Path, gradient: bool) -> None:
        weights = tmp_path / "with space.pth"
        weights.write_bytes(b"")
        asked = request(gradient=gradient, weights=weights, preprocess={"resize": 64, "crop": [64, 64]})
        known = {verb: CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200"}).stdout for verb in
                 ("convert", "serve", "bench", "verify", "story")}  # fmt: skip
        for way in (*first_ways(ON_CPU), *last_ways(Precision.INT8)):
            for line in commands(way, asked, ON_CPU, "output:image"):
                program, verb, *words = line.split()
                if program == "graphkiln":
                    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
                    assert all(flag in known[verb] for flag in flags if flag != "--set"), line

    def test_int8_is_calibrated_on_other_images(self) -> None:
        options = convert_options(last_ways(Precision.INT8)[0].model, request(), ON_CPU, "")  # type: ignore[arg-type]
        assert options["calibration"] != options["samples"]

    def test_a_folder_of_too_few_images(self, tmp_path: Path) -> None:
        (tmp_path / "one.jpg").write_bytes(b"")
        with pytest.raises(InvalidInput, match="holds 1 JPEGs, at least 4"):
            choose(tmp_path, 10)

    def test_own_images_are_proven_on_some_and_calibrated_on_others(self, tmp_path: Path) -> None:
        for number in range(10):
            Image.new("L", (8, 8), 20 * number).save(tmp_path / f"{number}.jpg")
        chosen = choose(tmp_path, 10)
        assert chosen.targets is None
        assert not set(chosen.proven) & set(chosen.calibration)

    def test_held_out_digits_are_not_calibrated_on(self) -> None:
        chosen = choose(None, 10)
        assert chosen.targets is not None
        assert len(chosen.proven) == len(chosen.targets) == 200
        assert not set(chosen.proven) & set(chosen.calibration)
        assert choose(None, 1000).targets is None


class TestPage:
    whole = told(eager=seen(1.0), static=seen(1.25), reduced=seen(3.0), int8=seen(9.0))

    def test_bars_begin_where_the_one_before_ended(self) -> None:
        bars = factor_chart(self.whole["steps"])["bars"]
        for before, after in itertools.pairwise(bars):
            assert after["x"] == pytest.approx(
                before["x"] + before["width"] if before["label"] != "1x" else before["x"]
            )

    def test_a_diamond_is_where_the_source_would_end(self) -> None:
        static = factor_chart(self.whole["steps"])["bars"][1]
        assert static["source"] == pytest.approx(static["x"] + static["width"])  # it has the source's own factor

    @given(st.lists(st.floats(1e-2, 1e6), min_size=4, max_size=4))
    def test_everything_is_inside_the_image(self, rates: list[float]) -> None:
        steps = told(**{way.key: seen(rate) for way, rate in zip(CHAIN, rates, strict=True)})["steps"]
        chart = factor_chart(steps)
        for bar in chart["bars"]:
            assert chart["left"] <= bar["x"] <= bar["x"] + bar["width"] <= chart["width"]
        times = latency_chart(steps)
        for row in times["rows"]:
            assert times["left"] <= row["p50"] <= row["p99"] <= times["width"]

    def test_needs_nothing_from_outside(self) -> None:
        text = page(self.whole)
        assert not re.search(r"(?:src|href|url)\s*[=(]|@import|https?://", text)

    def test_names_are_text_not_markup(self) -> None:
        facts = {**self.whole["facts"], "model": "<script>alert(1)</script>"}
        assert "<script>" not in page({**self.whole, "facts": facts})

    def test_half_a_story_has_a_page_and_tables(self, capsys: pytest.CaptureFixture[str]) -> None:
        half = told(eager=seen(1.0), static=Seen(judgment=judgment(passed=False)), reduced=Seen(refused="no <room>"))
        assert "no &lt;room&gt;" in page(half)
        show(half)
        assert "no <room>" in capsys.readouterr().out
        page(told())

    def test_tables_fit_80_columns(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        ways = (*first_ways(ON_CPU), *last_ways(Precision.INT8))
        each = Seen(
            judgment=judgment(interval=(0.982, 0.9999), right=0.935),
            rounds=(Round(number=0, per_second=1234.5, latencies_ms=(12345.6,), cores=16.1, memory_mb=12345.0),),
        )
        facts = {**self.whole["facts"], "machine": "Some(R) Processor, 2 cores"}
        record = Record(facts=facts, precision=Precision.INT8, seen={way.key: each for way in ways})
        show(json.loads(json.dumps(document(ways, record, {way.key: () for way in ways}))))
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= 80
        assert "\u2026" not in shown
        for way in ways:
            assert way.title in shown
