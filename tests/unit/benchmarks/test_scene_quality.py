"""Figures of the trained examples are those of the proven version that was written."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import scene_quality
from torch import nn

from graphkiln.training.train_scenes import EXAMPLES


@pytest.fixture
def written(repository: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what is written: the committed detector, under each name; nothing is trained."""
    found: list[str] = []

    def write_example(name: str, network: nn.Module, store: Path, number: int) -> str:
        assert isinstance(network, nn.Identity)
        found.append(name)
        shutil.copytree(repository / "model_repository" / "scenes-detector" / "1", store / f"scenes-{name}" / "1")
        assert number == 1
        return "PASS"

    monkeypatch.setattr(scene_quality, "write_example", write_example)
    return found


def test_a_row_for_each_example(written: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = dict.fromkeys(("detector", "other"), replace(EXAMPLES["detector"], train=nn.Identity))
    monkeypatch.setattr(scene_quality, "EXAMPLES", made)
    first, second = scene_quality.benchmark_scenes(5, 3.0)
    assert written == ["detector", "other"]
    assert {**first, "training s": 0, "of a core s": 0} == {
        "example": "detector", "metric": "mAP at IoU 0.5", "value": 0.9932, "at least": 0.9, "images": 200,
        "training s": 0, "of a core s": 0, "kB": 393,
    }  # fmt: skip
    assert second["example"] == "other"


def test_every_metric_has_a_name_for_people() -> None:
    assert {example.metric for example in EXAMPLES.values()} == set(scene_quality._METRICS)
