"""The report: charts, text, and nothing from outside."""

from __future__ import annotations

import itertools
import re

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stories import CHAIN, make_judgment, make_observation, story_document

from graphkiln.story.page import _reported_factor, factor_chart, latency_chart, render_page
from graphkiln.story.results import Observation
from graphkiln.story.tables import print_tables


class TestPage:
    whole = story_document(
        eager=make_observation(1.0),
        static=make_observation(1.25),
        reduced=make_observation(3.0),
        int8=make_observation(9.0),
    )

    def test_bars_begin_where_the_one_before_ended(self) -> None:
        bars = factor_chart(self.whole["steps"])["rows"]
        for before, after in itertools.pairwise(bars):
            assert after["x"] == pytest.approx(
                before["x"] + before["width"] if before["label"] != "1x" else before["x"]
            )

    def test_a_diamond_is_where_the_source_would_end(self) -> None:
        static = factor_chart(self.whole["steps"])["rows"][1]
        assert static["source"] == pytest.approx(static["x"] + static["width"])  # it has the source's own factor

    @given(st.lists(st.floats(1e-2, 1e6), min_size=4, max_size=4))
    def test_everything_is_inside_the_image(self, rates: list[float]) -> None:
        steps = story_document(
            **{variant.key: make_observation(rate) for variant, rate in zip(CHAIN, rates, strict=True)}
        )["steps"]
        chart = factor_chart(steps)
        for bar in chart["rows"]:
            assert chart["left"] <= bar["x"] <= bar["x"] + bar["width"] <= chart["width"]
        times = latency_chart(steps)
        for row in times["rows"]:
            assert times["left"] <= row["low"] <= row["high"] <= times["width"]

    def test_needs_nothing_from_outside(self) -> None:
        text = render_page(self.whole)
        assert not re.search(r"(?:src|href|url)\s*[=(]|@import|https?://", text)

    def test_names_are_text_not_markup(self) -> None:
        facts = {**self.whole["facts"], "model": "<script>alert(1)</script>"}
        assert "<script>" not in render_page({**self.whole, "facts": facts})

    def test_half_a_story_has_a_page_and_tables(self, capsys: pytest.CaptureFixture[str]) -> None:
        half = story_document(
            eager=make_observation(1.0),
            static=Observation(judgment=make_judgment(passed=False)),
            reduced=Observation(refused="no <room>"),
        )
        assert "no &lt;room&gt;" in render_page(half)
        print_tables(half)
        assert "no <room>" in capsys.readouterr().out
        render_page(story_document())


class TestCharts:
    def test_nothing_measured_is_an_empty_chart(self) -> None:
        assert factor_chart([])["rows"] == []
        assert latency_chart([])["rows"] == []

    def test_a_step_that_is_slower_goes_back(self) -> None:
        steps = story_document(eager=make_observation(2.0), static=make_observation(1.0))["steps"]
        eager, static = factor_chart([step for step in steps if step["per_second"]])["rows"]
        assert static["x"] < eager["x"]
        assert static["label"] == "0.50x"

    def test_a_step_that_does_not_count_has_no_bar_and_a_latency(self) -> None:
        steps = story_document(eager=make_observation(1.0), static=make_observation(9.0, passed=False))["steps"]
        measured = [step for step in steps if step["per_second"]]
        assert [bar["title"] for bar in factor_chart(measured)["rows"]] == ["eager"]
        assert [row["title"] for row in latency_chart(measured)["rows"]] == ["eager", "static"]

    def test_a_switch_begins_at_its_baseline_and_has_no_total(self) -> None:
        steps = story_document(eager=make_observation(1.0), reduced=make_observation(4.0), int8=make_observation(8.0))[
            "steps"
        ]
        _, reduced, int8 = factor_chart([step for step in steps if step["per_second"]])["rows"]
        assert int8["x"] == pytest.approx(reduced["x"] + reduced["width"])
        assert (int8["label"], int8["total"], int8["number"], int8["switch"]) == ("2.00x", "", "", True)
        assert reduced["total"] == "4.0x"

    @pytest.mark.parametrize(("text", "factor"), [("4.6", 4.6), ("1.6-1.64", 1.62)])
    def test_a_range_that_the_source_reports_is_its_middle(self, text: str, factor: float) -> None:
        assert _reported_factor(text) == pytest.approx(factor)


class TestPageText:
    whole = story_document(eager=make_observation(1.0), static=make_observation(1.25), int8=Observation(refused="no"))

    def test_the_headline_is_the_factor_of_the_chain(self) -> None:
        assert "<h1>1.2x: m</h1>" in render_page(self.whole)

    def test_without_a_measurement_the_headline_is_the_model(self) -> None:
        assert "<h1>m</h1>" in render_page(story_document())

    def test_every_step_that_was_executed_can_be_repeated(self) -> None:
        page = render_page(self.whole)
        assert page.count('<pre class="commands"') == 3  # all but the refused one
        assert "int8: not done. no" in page

    def test_every_fact_is_shown(self) -> None:
        page = render_page({**self.whole, "facts": {**self.whole["facts"], "image size": 64, "gpu_name": "H<200>"}})
        assert "<dt>gpu name</dt><dd>H&lt;200&gt;</dd>" in page

    def test_a_fact_that_is_missing_is_an_error_not_an_empty_place(self) -> None:
        with pytest.raises(jinja2.UndefinedError):
            render_page({**self.whole, "facts": {}})

    def test_undecided_answers_are_not_judged(self) -> None:
        judged = Observation(judgment=make_judgment(undecided="random"), rounds=make_observation(1.0).rounds)
        assert "not judged: random" in render_page(story_document(eager=judged))
