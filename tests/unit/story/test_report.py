"""Tables and HTML report of a story."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stories import CHAIN, ON_CPU, make_judgment, make_observation, story_document

from graphkiln.story.report import factor_chart, latency_chart, print_tables, render_page
from graphkiln.story.results import Observation, Record, Round, build_document
from graphkiln.story.variants import final_variants, initial_variants
from graphkiln_backend.graph.precision import Precision


def test_tables_fit_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    variants = (*initial_variants(ON_CPU), *final_variants(Precision.INT8))
    each = Observation(
        judgment=make_judgment(interval=(0.982, 0.9999), right=0.935),
        rounds=(Round(number=0, per_second=1234.5, latencies_ms=(12345.6,), cores=16.1, memory_mb=12345.0),),
    )
    facts = {**story_document()["facts"], "machine": "Some(R) Processor, 2 cores"}
    record = Record(facts=facts, precision=Precision.INT8, seen={variant.key: each for variant in variants})
    print_tables(json.loads(json.dumps(build_document(variants, record, {variant.key: () for variant in variants}))))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "\u2026" not in shown
    for variant in variants:
        assert variant.title in shown


def shown(capsys: pytest.CaptureFixture[str], **observations: Observation) -> str:
    print_tables(json.loads(json.dumps(story_document(**observations))))
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def row(text: str, title: str) -> list[str]:
    return next(line for line in text.splitlines() if title in line).split()


def test_speed_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, eager=make_observation(2.0), static=make_observation(5.0))
    assert row(text, "1 static") == ["1", "static", "5.0", "2.50x", "2.50x", "1.25", "200", "200", "100", "1.5"]
    assert row(text, "0 eager")[2:5] == ["2.0", "-", "1x"]


def test_accuracy_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    observation = Observation(
        judgment=make_judgment(error=1.26e-3, limit=1e-2, same=195, interval=(0.91, 1.0), right=0.935)
    )
    text = shown(capsys, eager=observation)
    assert row(text, "195/200")[2:] == ["1.3e-03", "1e-02", "195/200", "[91-100%]", "93.5%", "PASS"]


def test_failed_step_has_reason_and_no_factors(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, eager=make_observation(1.0), static=make_observation(9.0, passed=False))
    assert row(text, "1 static")[2:5] == ["9.0", "fails", "-"]
    assert "FAIL" in text
    assert "static: does not count: fp32: PASS" in text
    assert "all together: 1.0x" in text


def test_switches_are_indented_and_not_part_of_the_total(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, eager=make_observation(1.0), reduced=make_observation(2.0), int8=make_observation(8.0))
    assert "  int8" in text
    assert row(text, "  int8")[1:4] == ["8.0", "4.00x", "-"]
    assert "all together: 2.0x (the source reports 25x and more)" in text


def test_refused_step_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, eager=make_observation(1.0), int8=Observation(refused="no [bold]kernels[/]"))
    assert "int8: not done: no [bold]kernels[/]" in text


# The report: charts, text, and nothing from outside.


class TestPage:
    whole = story_document(
        eager=make_observation(1.0),
        static=make_observation(1.25),
        reduced=make_observation(3.0),
        int8=make_observation(9.0),
    )

    def test_bars_are_a_waterfall(self) -> None:
        bars = factor_chart(self.whole["steps"])["rows"]
        for before, after in itertools.pairwise(bars):
            assert after["x"] == pytest.approx(
                before["x"] + before["width"] if before["label"] != "1x" else before["x"]
            )
        assert bars[1]["source"] == pytest.approx(bars[1]["x"] + bars[1]["width"])  # it has the source's own factor

    @given(st.lists(st.floats(1e-2, 1e6), min_size=4, max_size=4))
    def test_charts_stay_inside_image(self, rates: list[float]) -> None:
        steps = story_document(
            **{variant.key: make_observation(rate) for variant, rate in zip(CHAIN, rates, strict=True)}
        )["steps"]
        chart = factor_chart(steps)
        for bar in chart["rows"]:
            assert chart["left"] <= bar["x"] <= bar["x"] + bar["width"] <= chart["width"]
        times = latency_chart(steps)
        for row in times["rows"]:
            assert times["left"] <= row["low"] <= row["high"] <= times["width"]

    def test_report_is_self_contained_and_escaped(self) -> None:
        facts = {**self.whole["facts"], "model": "<script>alert(1)</script>"}
        text = render_page({**self.whole, "facts": facts})
        assert not re.search(r"(?:src|href|url)\s*[=(]|@import|https?://|<script>", text)

    def test_partial_story_report(self) -> None:
        half = story_document(
            eager=make_observation(1.0),
            static=Observation(judgment=make_judgment(passed=False)),
            reduced=Observation(refused="no <room>"),
        )
        assert "no &lt;room&gt;" in render_page(half)
        render_page(story_document())


def test_text_of_the_page() -> None:
    judged = Observation(judgment=make_judgment(undecided="random"), rounds=make_observation(1.25).rounds)
    page = render_page(story_document(eager=make_observation(1.0), static=judged, int8=Observation(refused="no")))
    assert "<h1>1.2x: m</h1>" in page  # the factor of the chain
    assert page.count("<svg") == 2
    assert page.count("<table") == 3
    commands = page.partition('<pre class="commands"')[2]
    assert "1 static" in commands
    assert "int8" not in commands, "it was refused"
    assert "int8: not done: no" in page
    assert "not judged: random" in page
