"""Reports from the JSON of pip-audit 2.10."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from releasing import audit
from releasing.audit import main, report, report_failure

CLEAN = {"name": "wrapt", "version": "2.5.2", "vulns": []}
SKIPPED = {"name": "sh", "skip_reason": "Dependency not found on PyPI and could not be audited: sh (2.4.0)"}
FOUND = {
    "name": "requests",
    "version": "2.31.0",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.32.0"], "aliases": ["CVE-1"], "description": "..."}],
}
NO_FIX = {"name": "sh", "version": "2.4.0", "vulns": [{"id": "GHSA-2", "fix_versions": [], "aliases": []}]}


def test_vulnerabilities_are_listed_with_the_fixed_versions() -> None:
    code, lines = report([CLEAN, FOUND, NO_FIX])
    assert code == 1
    assert lines[:2] == ["requests 2.31.0: PYSEC-1, not in 2.32.0", "sh 2.4.0: GHSA-2, not in no version"]


def test_unknown_packages_are_counted() -> None:
    assert report([CLEAN, SKIPPED]) == (0, ["no advisory is known of 1 packages; 1 not found"])


def test_an_index_without_advisories_is_not_good_news() -> None:
    code, (line,) = report([SKIPPED, SKIPPED])
    assert code == 0
    assert line.startswith("skipped: ")


def test_unreachable_advisories_are_skipped() -> None:
    code, (line,) = report_failure("Traceback\nrequests.exceptions.ProxyError: HTTPSConnectionPool(host='pypi.org')\n")
    assert code == 0
    assert line.startswith("skipped: the list of advisories cannot be reached: requests")


@pytest.mark.parametrize("words", ["", "error: invalid requirements input: lock.txt\n"])
def test_any_other_failure_is_reported(words: str) -> None:
    code, (line,) = report_failure(words)
    assert code == 2
    assert line.startswith("pip-audit ")


def test_the_worst_of_several_lock_files_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {"a.txt": json.dumps({"dependencies": [FOUND]}), "b.txt": ""}

    def run(line: tuple[str, ...], **_options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(line, 1, answers[line[-1]], "ConnectionError: no route\n")

    monkeypatch.setattr(audit.subprocess, "run", run)
    assert main(["a.txt", "b.txt"]) == 1
    assert "a.txt: requests 2.31.0" in capsys.readouterr().out
