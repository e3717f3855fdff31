"""Records on disk, and the table's rows: factors are medians of rounds."""

from __future__ import annotations

from pathlib import Path

import pytest
from stories import CHAIN, make_observation, story_request

from graphkiln.story.results import Observation, Record, build_rows
from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.graph.precision import Precision


class TestFactors:
    def test_are_medians_of_rounds_not_of_rates(self) -> None:
        """The machine is ten times slower in the second round: the factor does not see it."""
        found = build_rows(
            CHAIN, Record(facts={}, seen={"eager": make_observation(1, 0.1, 1), "static": make_observation(2, 0.2, 2)})
        )
        assert found[1].own == pytest.approx(2)
        assert found[1].cumulative == pytest.approx(2)

    def test_a_step_that_fails_the_policy_does_not_count_and_is_passed_over(self) -> None:
        record = Record(
            facts={},
            seen={
                "eager": make_observation(1),
                "static": make_observation(5, passed=False),
                "reduced": make_observation(10),
            },
        )
        _, static, reduced, _ = build_rows(CHAIN, record)
        assert (static.counts, static.own, static.cumulative) == (False, None, None)
        assert (reduced.beside, reduced.own, reduced.cumulative) == ("eager", 10, 10)

    def test_a_step_that_was_refused_is_passed_over(self) -> None:
        record = Record(
            facts={},
            seen={
                "eager": make_observation(1),
                "static": Observation(refused="no such graph"),
                "reduced": make_observation(3),
            },
        )
        assert build_rows(CHAIN, record)[2].beside == "eager"

    def test_a_switch_is_no_part_of_the_chain(self) -> None:
        record = Record(
            facts={},
            seen={
                "eager": make_observation(1),
                "static": make_observation(2),
                "reduced": make_observation(4),
                "int8": make_observation(12),
            },
        )
        switch = build_rows(CHAIN, record)[3]
        assert (switch.own, switch.cumulative) == (3, None)

    def test_percentiles_are_of_all_rounds(self) -> None:
        (row, *_) = build_rows(CHAIN, Record(facts={}, seen={"eager": make_observation(10, 100)}))
        assert row.p50_ms == pytest.approx(55)


class TestRecord:
    def test_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        record = Record(
            facts={"model": "m"},
            precision=Precision.INT8,
            seen={"eager": make_observation(1.5), "x": Observation(refused="why")},
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
            story_request(),
            story_request(image_size=32),
            story_request(gradient=True),
            story_request(source="timm:resnet18"),
            story_request(weights=weights),
            story_request(samples=tmp_path),
            story_request(preprocess={"resize": 1}),
        ]
        assert len({each.folder for each in different}) == len(different)
        assert story_request().folder == story_request().folder
