"""Requests, their folders, the platform, trained weights and facts."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from stories import ON_CPU, ON_GPU, story_request

from graphkiln.story import variants as module
from graphkiln.story.variants import find_trained_weights, machine_facts, this_platform, weights_path


class TestFolder:
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
        assert len({request.folder for request in different}) == len(different)
        assert story_request().folder == story_request().folder
        before = story_request(weights=weights).folder
        os.utime(weights, ns=(1, 1))  # trained again
        assert story_request(weights=weights).folder != before

    def test_is_that_of_older_stories(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """`--resume` must find the graphs of an older graphkiln."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert story_request().folder.name == "4d85d096a04b"


# Where trained weights are written and found.


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_trained_weights_are_found_for_their_model_and_size() -> None:
    path = weights_path("resnet18", 64)
    assert find_trained_weights("torchvision:resnet18", 64) is None
    path.parent.mkdir()
    path.write_bytes(b"")
    assert find_trained_weights("torchvision:resnet18", 64) == path
    others = [("torchvision:resnet18", 32), ("torchvision:resnet50", 64), ("timm:resnet18", 64), ("resnet18", 64)]
    assert not any(find_trained_weights(*each) for each in others)


# The facts beside every figure.


def test_of_this_machine() -> None:
    facts = machine_facts()
    assert list(facts) == ["machine", "gpu", "system", "versions", "date"]
    assert re.search(r", \d+ cores, \d+ GiB$", facts["machine"])
    assert "numpy " in facts["versions"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", facts["date"])


def test_the_platform_is_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpus", lambda: ())
    assert this_platform() == ON_CPU
    monkeypatch.setattr(module, "gpus", lambda: ("NVIDIA",))
    assert this_platform() == ON_GPU
