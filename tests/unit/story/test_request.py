"""Folders, platform and weights of requests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from stories import ON_CPU, ON_GPU, story_request

from graphkiln.story import variants as module
from graphkiln.story.variants import find_trained_weights, this_platform, weights_path


class TestFolder:
    def test_folders_are_distinct(self, tmp_path: Path) -> None:
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

    def test_folder_name_is_stable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """`--resume` finds the folder of an older release."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert story_request().folder.name == "4d85d096a04b"


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


def test_this_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpus", lambda: ())
    assert this_platform() == ON_CPU
    monkeypatch.setattr(module, "gpus", lambda: ("NVIDIA",))
    assert this_platform() == ON_GPU
