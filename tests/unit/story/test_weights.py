"""Where trained weights are written and found."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln.story.weights import find_trained_weights, weights_path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_stand_in_the_users_cache_by_architecture_and_size(cache: Path) -> None:
    assert weights_path("resnet101", 224) == cache / "graphkiln-story" / "resnet101-digits-224.safetensors"


def test_are_found_where_training_left_them() -> None:
    path = weights_path("resnet18", 64)
    assert find_trained_weights("torchvision:resnet18", 64) is None
    path.parent.mkdir()
    path.write_bytes(b"")
    assert find_trained_weights("torchvision:resnet18", 64) == path


@pytest.mark.parametrize(
    ("source", "size"),
    [("torchvision:resnet18", 32), ("torchvision:resnet50", 64), ("timm:resnet18", 64), ("resnet18", 64)],
)
def test_of_another_model_or_size_are_not_taken(source: str, size: int) -> None:
    path = weights_path("resnet18", 64)
    path.parent.mkdir()
    path.write_bytes(b"")
    assert find_trained_weights(source, size) is None


def test_a_folder_of_that_name_is_no_file() -> None:
    weights_path("resnet18", 64).mkdir(parents=True)
    assert find_trained_weights("torchvision:resnet18", 64) is None
