"""The run of checks, and its JSON document."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator

import pytest

from graphkiln.doctor.examination import CHECKS, SCHEMA, Examination, Finding, Level, Request, examine

HERE = __name__
RELEASE = threading.Event()


def check_well(request: Request) -> list[Finding]:
    return [Finding(subject="all", message=f"is well, {request.cache}")]


def check_badly(_: Request) -> Iterator[Finding]:
    yield Finding(subject="half", message="seen")
    raise RecursionError("too deep")


def check_fatally(_: Request) -> list[Finding]:
    sys.exit("an import ends the process")


def check_for_ever(_: Request) -> list[Finding]:
    RELEASE.wait(30)
    return []


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, HERE, sys.modules.get(HERE) or sys.modules[check_well.__module__])
    RELEASE.clear()
    yield
    RELEASE.set()


def test_findings_are_in_the_order_of_checks() -> None:
    found = examine(Request(cache="off"), [("b", f"{HERE}:check_well"), ("a", f"{HERE}:check_well")]).findings
    assert [(each.check, each.message) for each in found] == [("b", "is well, off"), ("a", "is well, off")]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (f"{HERE}:check_fatally", "failed: SystemExit"),
        ("graphkiln.doctor.no_such_module:check", "failed: ModuleNotFoundError"),
        (f"{HERE}:no_such_function", "failed: AttributeError"),
    ],
)
def test_failed_check_is_a_finding(place: str, words: str) -> None:
    failed, well = examine(Request(), [("bad", place), ("well", f"{HERE}:check_well")]).findings
    assert (failed.check, failed.level) == ("bad", Level.WARNING)
    assert failed.message.startswith(words)
    assert failed.hint
    assert well.level is Level.OK


def test_findings_before_a_failure_count() -> None:
    seen, failed = examine(Request(), [("bad", f"{HERE}:check_badly")]).findings
    assert (seen.check, seen.message) == ("bad", "seen")
    assert failed.message == "failed: RecursionError: too deep"


def test_hanging_check_times_out() -> None:
    checks = [("hangs", f"{HERE}:check_for_ever"), ("well", f"{HERE}:check_well")]
    examination = examine(Request(), checks, deadline_s=0.2)
    assert [each.level for each in examination.findings] == [Level.WARNING, Level.OK]
    assert examination.findings[0].message == "did not end within 0 s"
    assert examination.seconds < 20


def test_all_checks_run() -> None:
    examination = examine(Request(cache="off"))
    assert {each.check for each in examination.findings} == {name for name, _ in CHECKS} - {"models"}
    assert [each for each in examination.findings if each.subject == "the check itself"] == []


def test_worst_level_and_json_document() -> None:
    assert Examination(findings=()).level is Level.OK
    findings = tuple(
        Finding(check="ports", subject="HTTP port", level=level, message="m", facts={"port": 1}) for level in Level
    )
    for count, worst in enumerate(Level, 1):
        assert Examination(findings=findings[:count]).level is worst
    examination = Examination(findings=findings, seconds=0.5)
    assert [examination.count(level) for level in Level] == [1, 1, 1]
    document = json.loads(json.dumps(examination.to_document()))
    assert document.pop("findings")[0] == {
        "check": "ports", "subject": "HTTP port", "level": "ok", "message": "m", "hint": "", "facts": {"port": 1},
    }  # fmt: skip
    assert document == {"schema": SCHEMA, "level": "error", "seconds": 0.5}
