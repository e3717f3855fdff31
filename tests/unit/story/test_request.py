"""What a story is requested for, where it is kept, and the platform that it runs on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from stories import ON_CPU, ON_GPU, story_request

from graphkiln.story import request as module
from graphkiln.story.request import this_platform
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.precision import Precision


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

    def test_stands_in_the_users_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert story_request().folder.parent == tmp_path / "graphkiln-story"
        assert list(tmp_path.iterdir()) == []  # nobody asked for it yet

    def test_is_that_of_older_stories(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """`--resume` and the graphs of a story must find what an older graphkiln left."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert story_request().folder.name == "4d85d096a04b"

    def test_weights_that_were_trained_again_are_others(self, tmp_path: Path) -> None:
        weights = tmp_path / "w.pth"
        weights.write_bytes(b"1")
        before = story_request(weights=weights).folder
        os.utime(weights, ns=(1, 1))
        assert story_request(weights=weights).folder != before

    def test_a_relative_path_is_the_same_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "w.pth").write_bytes(b"1")
        (tmp_path / "images").mkdir()
        monkeypatch.chdir(tmp_path)
        absolute = story_request(weights=tmp_path / "w.pth", samples=tmp_path / "images")
        assert story_request(weights=Path("w.pth"), samples=Path("images")).folder == absolute.folder

    def test_the_order_of_preprocess_keys_does_not_matter(self) -> None:
        one, other = {"resize": 1, "crop": [1, 1]}, {"crop": [1, 1], "resize": 1}
        assert story_request(preprocess=one).folder == story_request(preprocess=other).folder


class TestPlatform:
    def test_the_fastest_16_bit_type(self) -> None:
        assert (ON_CPU.mixed_precision, ON_GPU.mixed_precision) == (Precision.BF16, Precision.FP16)

    def test_two_instances_where_the_device_is(self) -> None:
        assert ON_CPU.instance_group == "instance_group { count: 2 kind: KIND_CPU }"
        assert ON_GPU.instance_group == "instance_group { count: 2 kind: KIND_GPU }"

    def test_callers_fill_both_instances_and_a_third_batch(self) -> None:
        assert (ON_CPU.callers, ON_GPU.callers) == (24, 192)

    def test_is_the_gpu_where_there_is_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "gpus", lambda: ())
        assert this_platform() == ON_CPU
        assert this_platform().device == CPU
        monkeypatch.setattr(module, "gpus", lambda: ("NVIDIA",))
        assert this_platform() == ON_GPU
        assert this_platform().device == Device.gpu()
