"""The report: charts, text, and nothing from outside."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stories import CHAIN, make_judgment, make_observation, story_document

from graphkiln.story.page import factor_chart, latency_chart, render_page
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
        steps = story_document(
            **{variant.key: make_observation(rate) for variant, rate in zip(CHAIN, rates, strict=True)}
        )["steps"]
        chart = factor_chart(steps)
        for bar in chart["bars"]:
            assert chart["left"] <= bar["x"] <= bar["x"] + bar["width"] <= chart["width"]
        times = latency_chart(steps)
        for row in times["rows"]:
            assert times["left"] <= row["p50"] <= row["p99"] <= times["width"]

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
