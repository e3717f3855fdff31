"""Violations, the page of a run, and the record of an interrupted one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

from conforming import report
from conforming.cases import Case
from conforming.outcome import OTHER, PASSED, Outcome, Record, Verdict

REFUSED = Outcome(Verdict.REFUSED, "x: the ONNX element type INT4 is not one that Triton can carry")
WRONG = Outcome(Verdict.DIFFERS, "y: Not equal")


def document(bare: Outcome = PASSED, name: str = "a", **others: Outcome) -> dict[str, Any]:
    case = Case(kind="node", name=name, model=onnx.ModelProto(), samples=(), rtol=0, atol=0)
    ways = {"bare": bare, **others}
    return report.to_document([case], {way: {case.served_name: outcome} for way, outcome in ways.items()})


@pytest.mark.parametrize(
    "found",
    [
        document(served=PASSED, converted=PASSED, openvino=PASSED),
        pytest.param(document(served=REFUSED), id="Triton cannot carry it"),
        pytest.param(document(Outcome(Verdict.REFUSED, "no kernel"), served=Outcome(Verdict.REFUSED, "no")), id="bare"),
        pytest.param(document(WRONG, served=WRONG), id="as ONNX Runtime alone"),
        pytest.param(document(openvino=Outcome(Verdict.REFUSED, "no such operator")), id="OpenVINO need not know all"),
        pytest.param(document(name="dynamicquantizelinear", openvino=WRONG), id="a tie"),
    ],
)
def test_accepted_outcomes(found: dict[str, Any]) -> None:
    assert report.find_violations(found) == []


@pytest.mark.parametrize(
    ("found", "violation"),
    [
        (document(served=WRONG), "served node_a: differs: y: Not equal"),
        (document(openvino=WRONG), "openvino node_a: differs: y: Not equal"),
        (document(Outcome(Verdict.FAILS, "f"), served=Outcome(Verdict.FAILS, "f")), "served node_a: fails: f"),
        (document(served=Outcome(Verdict.REFUSED, "no")), "served node_a: refused: another reason"),
        (document(Outcome(Verdict.REFUSED, "no"), openvino=WRONG), "openvino node_a: differs: y: Not equal"),
        (
            document(name="dynamicquantizelinear", served=WRONG),
            "served node_dynamicquantizelinear: differs: y: Not equal",
        ),
    ],
)
def test_violations(found: dict[str, Any], violation: str) -> None:
    assert report.find_violations(found) == [violation]


def test_the_page_counts() -> None:
    page = report.to_page(document(served=REFUSED, openvino=PASSED))
    assert "The 1 cases of ONNX's backend test suite (1 node)" in page
    assert "| ONNX Runtime alone | 1 | 1 | 0 | 0 | 0 | 0 |" in page
    assert "| served by the real server, with ONNX Runtime | 1 | 0 | 1 | 0 | 0 | 0 |" in page
    assert "| refused: Triton has no such element type: 8-bit floats, 2 and 4 bits | 1 |" in page


class TestKept:
    """The page and the data in docs/ are of one run without violations."""

    @pytest.fixture
    def kept(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(report.RESULTS.read_text())
        return found

    def test_the_page_is_written_from_the_data(self, kept: dict[str, Any]) -> None:
        assert report.PAGE.read_text() == report.to_page(kept), "scripts/conformance --page writes it"

    def test_no_violations(self, kept: dict[str, Any]) -> None:
        assert report.find_violations(kept) == []

    def test_every_case_ran_in_every_way(self, kept: dict[str, Any]) -> None:
        assert {each["asked"] for each in kept["ways"].values()} == {sum(kept["cases"].values())}
        assert set(kept["ways"]) == set(report.WAYS)

    def test_every_reason_has_a_kind(self, kept: dict[str, Any]) -> None:
        assert [each["refused"][OTHER] for each in kept["ways"].values() if OTHER in each["refused"]] == []


def case(name: str) -> Case:
    return Case(kind="node", name=f"test_{name}", model=onnx.ModelProto(), samples=(), rtol=0, atol=0)


def test_an_interrupted_run_continues(tmp_path: Path) -> None:
    one, two = case("one"), case("two")
    record = Record(tmp_path / "served.jsonl")
    assert record.pending([one, two]) == [one, two]
    record.add(one, Outcome(Verdict.FAILS, "why"))
    again = Record(tmp_path / "served.jsonl")
    assert again.pending([one, two]) == [two]
    assert again.outcomes == {"node_one": Outcome(Verdict.FAILS, "why")}


def test_an_incomplete_line_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "served.jsonl"
    Record(path).add(case("one"), PASSED)
    path.write_text(f'{path.read_text()}{{"case": "node_tw')
    assert list(Record(path).outcomes) == ["node_one"]
