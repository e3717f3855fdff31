"""The facts beside every figure."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from stories import ON_CPU, story_request

from graphkiln.story import facts as module
from graphkiln.story.facts import machine_facts, story_facts


def test_of_this_machine() -> None:
    facts = machine_facts()
    assert list(facts) == ["machine", "gpu", "system", "versions", "date"]
    assert re.search(r", \d+ cores, \d+ GiB$", facts["machine"])
    assert "numpy " in facts["versions"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", facts["date"])


def test_a_library_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LIBRARIES", ("numpy", "no-such-library"))
    assert re.fullmatch(r"numpy [\d.]+", machine_facts()["versions"])


def test_a_machine_without_a_gpu_says_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpus", lambda: ())
    assert machine_facts()["gpu"] == "none"
    monkeypatch.setattr(module, "gpus", lambda: ("H200", "H200"))
    assert machine_facts()["gpu"] == "H200, H200"


def test_of_a_story_are_plain_data() -> None:
    facts = story_facts(story_request(weights=Path("w.pth"), gradient=True), ON_CPU)
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["model"], facts["image size"], facts["weights"]) == ("torchvision:resnet18", 64, "w.pth")
    assert facts["batches"] == "up to 8, two instances"
    assert "every graph" in facts["gradient"]


def test_random_weights_and_no_gradient_are_said() -> None:
    facts = story_facts(story_request(), ON_CPU)
    assert facts["weights"].startswith("random")
    assert facts["gradient"] == "none after step 1"
