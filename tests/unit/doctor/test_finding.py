"""Findings, and the JSON document that programs read."""

from __future__ import annotations

import json

import pytest

from graphkiln.doctor.finding import SCHEMA, Examination, Finding, Level, format_size


def finding(level: Level) -> Finding:
    return Finding(check="ports", subject="HTTP port 8000", level=level, message="free", facts={"port": 8000})


@pytest.mark.parametrize(
    ("levels", "worst"),
    [
        ([], Level.OK),
        ([Level.OK], Level.OK),
        ([Level.WARNING, Level.OK], Level.WARNING),
        ([Level.OK, Level.ERROR, Level.WARNING], Level.ERROR),
    ],
)
def test_the_worst_level_counts(levels: list[Level], worst: Level) -> None:
    examination = Examination(findings=tuple(map(finding, levels)))
    assert examination.level is worst
    assert sum(examination.count(level) for level in Level) == len(levels)


def test_the_document_is_stable() -> None:
    document = Examination(findings=(finding(Level.OK),), seconds=0.5).to_document()
    assert json.loads(json.dumps(document)) == {
        "schema": SCHEMA,
        "level": "ok",
        "seconds": 0.5,
        "findings": [
            {
                "check": "ports",
                "subject": "HTTP port 8000",
                "level": "ok",
                "message": "free",
                "hint": "",
                "facts": {"port": 8000},
            }
        ],
    }


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 kB"), (5 << 20, "5 MB"), (3 << 29, "1.5 GB"), (2 << 40, "2048.0 GB")],
)
def test_sizes(count: int, text: str) -> None:
    assert format_size(count) == text
