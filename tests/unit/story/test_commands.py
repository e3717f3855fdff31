"""The commands that repeat a step are ones that graphkiln takes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from stories import ON_CPU, ON_GPU, story_request
from typer.testing import CliRunner

from graphkiln.cli.main import app
from graphkiln.story.commands import convert_options, repeat_commands, sample_paths, setting_flags
from graphkiln.story.variants import GraphSpec, Variant, final_variants, initial_variants
from graphkiln_backend.graph.precision import Precision


@pytest.mark.parametrize("gradient", [True, False])
def test_their_commands_are_ones_that_graphkiln_takes(tmp_path: Path, gradient: bool) -> None:
    weights = tmp_path / "with space.pth"
    weights.write_bytes(b"")
    complete = story_request(gradient=gradient, weights=weights, preprocess={"resize": 64, "crop": [64, 64]})
    known = {verb: CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200"}).stdout for verb in
             ("convert", "serve", "bench", "verify", "story")}  # fmt: skip
    for variant in (*initial_variants(ON_CPU), *final_variants(Precision.INT8)):
        for line in repeat_commands(variant, complete, ON_CPU, "output:image"):
            program, verb, *words = line.split()
            if program == "graphkiln":
                flags = [word.partition("=")[0] for word in words if word.startswith("--")]
                assert all(flag in known[verb] for flag in flags if flag != "--set"), line


def test_int8_is_calibrated_on_other_images() -> None:
    options = convert_options(final_variants(Precision.INT8)[0].graph, story_request(), ON_CPU, "")  # type: ignore[arg-type]
    assert options["calibration"] != options["samples"]


class TestRepeatCommands:
    def variant(self, key: str) -> Variant:
        return next(v for v in (*initial_variants(ON_CPU), *final_variants(Precision.INT8)) if v.key == key)

    def test_pytorch_is_repeated_by_the_story_itself(self, tmp_path: Path) -> None:
        weights = tmp_path / "w x.pth"
        weights.write_bytes(b"")
        request = story_request(weights=weights, samples=tmp_path, preprocess={"resize": 8}, gradient=True)
        (command,) = repeat_commands(self.variant("eager"), request, ON_CPU, "")
        assert shlex.split(command) == [
            "graphkiln", "story", "--model", "torchvision:resnet18", "--image-size", "64", "--weights", str(weights),
            "--samples", str(tmp_path), "--preprocess", '{"resize": 8}', "--gradient", "--only", "eager",
        ]  # fmt: skip

    def test_a_session_is_a_version_that_is_verified(self) -> None:
        convert, verify = repeat_commands(self.variant("reduced"), story_request(), ON_CPU, "")
        assert shlex.split(convert)[:3] == ["graphkiln", "convert", "torchvision:resnet18"]
        assert verify == f"graphkiln verify {story_request().folder / 'try' / 'base'}"
        assert convert.count("--skip") == 2

    def test_a_server_is_configured_started_and_measured(self) -> None:
        convert, configure, serve, bench = repeat_commands(self.variant("engine"), story_request(), ON_CPU, "")
        store = story_request().folder / "try"
        assert f"--model-store {store}" in convert
        assert configure == f"echo '{ON_CPU.instance_group}' >> {store / 'base' / 'config.pbtxt'}"
        assert shlex.split(serve)[-2:] == ["--set", "base.engine=openvino"]
        assert bench.endswith("--concurrency 24")

    def test_shell_characters_are_quoted(self) -> None:
        request = story_request(source="python:my file.py:make; rm")
        for variant in initial_variants(ON_CPU):
            words = shlex.split(repeat_commands(variant, request, ON_CPU, "")[0])
            assert "python:my file.py:make; rm" in words


class TestConvertOptions:
    spec = GraphSpec(name="m", options={"precision": Precision.INT8, "skip": ("a",)})

    def test_defaults(self) -> None:
        folder = story_request().folder
        assert convert_options(GraphSpec(name="m"), story_request(), ON_GPU, "o:i") == {
            "shape": ("3x64x64",), "max_batch_size": 64, "samples": folder / "samples",
        }  # fmt: skip

    def test_of_the_request(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        weights = tmp_path / "w.pth"
        weights.write_bytes(b"")
        request = story_request(weights=weights, gradient=True, preprocess={"resize": 3})
        options = convert_options(self.spec, request, ON_CPU, "output:image")
        assert (options["weights"], options["gradient"], options["preprocess"]) == (
            weights, "output:image", {"resize": 3},
        )  # fmt: skip
        assert options["calibration_method"] == "entropy"
        assert options["skip"] == ("a",)

    def test_labels_only_where_they_are_known(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        labels = sample_paths(story_request().folder)[2]
        assert "labels" not in convert_options(self.spec, story_request(), ON_CPU, "")
        labels.parent.mkdir(parents=True)
        labels.write_text("one\n")
        assert convert_options(self.spec, story_request(), ON_CPU, "")["labels"] == labels


def test_settings_are_flags_of_the_model() -> None:
    variant = Variant(key="k", step=4, title="t", kind="tensors", settings=("engine=auto", "precision=bf16"))
    assert setting_flags("m", variant) == ("--set", "m.engine=auto", "--set", "m.precision=bf16")
