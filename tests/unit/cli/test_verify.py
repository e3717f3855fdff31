"""`graphkiln verify`: a line for each reference, and what ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import convert, run


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(tmp_path_factory.mktemp("tiny"))


def test_a_line_for_each_reference_and_what_ran(version: Path) -> None:
    lines = run("verify", version).output.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "fp32 on onnxruntime, source model",
        "fp32 on onnxruntime, saved graph",
        "ran",
    ]
    assert lines[-1].endswith("mostly in fp32")


def test_json(version: Path) -> None:
    document = json.loads(run("verify", version, "--json").output)
    assert len(document["verdicts"]) == 2
    assert document["placement"]["precision"] == "fp32"
