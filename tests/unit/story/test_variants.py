"""The variants: what a platform can execute, and their baselines."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stories import ON_CPU, ON_GPU, story_request
from typer.testing import CliRunner

from graphkiln.cli.main import app
from graphkiln.story.request import Platform
from graphkiln.story.variants import (
    BASE_GRAPH,
    LOWEST_PRECISIONS,
    GraphSpec,
    Variant,
    convert_options,
    final_variants,
    initial_variants,
    repeat_commands,
    sample_paths,
    setting_flags,
)
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.settings import parse_override
from graphkiln_backend.passes.pipeline import OPTIMIZATIONS
from graphkiln_backend.proof.policy import BY_PRECISION


def test_what_a_cpu_cannot_do_is_said() -> None:
    unavailable = {variant.key: variant.unavailable for variant in initial_variants(ON_CPU) if variant.unavailable}
    assert unavailable == {"search": "cuDNN's search needs a GPU"}
    assert {variant.key for variant in initial_variants(ON_GPU) if variant.unavailable} == {"engine", "int8"}


def test_each_is_compared_with_one_before_it() -> None:
    for platform in (ON_CPU, ON_GPU):
        variants = (*initial_variants(platform), *final_variants("bf16"))
        keys = [variant.key for variant in variants]
        assert len(set(keys)) == len(keys)
        assert all(not variant.baseline or variant.baseline in keys[:index] for index, variant in enumerate(variants))


def test_the_chain_has_one_variant_for_each_step() -> None:
    for platform in (ON_CPU, ON_GPU):
        chain = [v for v in (*initial_variants(platform), *final_variants(Precision.FP16)) if not v.switch]
        assert [variant.step for variant in chain] == [0, 1, 2, 3, 4, 5]
        assert [variant.is_served for variant in chain] == [False, False, False, True, True, True]
        assert {variant.precision for variant in chain[:4]} == {Precision.FP32}


def test_switches_are_compared_with_the_plain_server() -> None:
    switches = [variant for variant in initial_variants(ON_CPU) if variant.switch]
    assert {variant.baseline for variant in switches} == {"parallel"}
    assert {variant.step for variant in switches} == {4}
    assert all(variant.is_served for variant in switches)


@pytest.mark.parametrize("platform", [ON_CPU, ON_GPU])
def test_what_decides_about_the_precision_can_be_executed(platform: Platform) -> None:
    switches = {variant.precision: variant for variant in initial_variants(platform) if variant.switch}
    for precision in LOWEST_PRECISIONS[platform.device.kind]:
        assert not switches[precision].unavailable


@pytest.mark.parametrize(
    ("precision", "settings", "saved"),
    [
        (Precision.INT8, ("engine=auto",), {"precision": Precision.INT8}),
        (Precision.BF16, ("engine=openvino", "precision=bf16"), {}),
        (Precision.FP32, ("engine=auto", "precision=fp32"), {}),
    ],
)
def test_int8_is_saved_in_the_graph_other_precisions_are_set(
    precision: Precision, settings: tuple[str, ...], saved: dict[str, object]
) -> None:
    compiled, served = final_variants(precision)
    assert compiled.settings == served.settings == settings
    assert compiled.graph is not None
    assert served.graph is not None
    assert compiled.graph.options == saved
    assert served.graph.options == {**saved, "input": "uint8-nhwc", "top_k": 5}
    assert str(precision) in compiled.title
    assert compiled.limits is served.limits


def test_a_fusion_is_by_itself() -> None:
    """Each fused graph skips the other fusion, the base skips both."""
    skipped = {
        v.key: v.graph.options["skip"] for v in initial_variants(ON_CPU) if v.graph and "skip" in v.graph.options
    }
    assert skipped["pad"] == ("add-into-producer",)
    assert skipped["add"] == ("pad-into-conv",)
    assert set(skipped["parallel"]) == {"pad-into-conv", "add-into-producer"}


def test_the_passes_that_are_skipped_exist() -> None:
    names = {each.name for each in OPTIMIZATIONS}
    assert set(BASE_GRAPH.options["skip"]) <= names


@pytest.mark.parametrize("platform", [ON_CPU, ON_GPU])
def test_settings_are_ones_that_serve_takes(platform: Platform) -> None:
    for variant in (*initial_variants(platform), *final_variants(Precision.BF16)):
        for setting in variant.settings:
            assert parse_override(setting)


@given(st.sampled_from(list(BY_PRECISION)))
def test_a_coarser_precision_is_allowed_more(precision: Precision) -> None:
    exact = initial_variants(ON_CPU)[2].limits
    assert final_variants(precision)[0].limits.relative_l2 >= exact.relative_l2


# The commands that repeat a step are ones that graphkiln takes.


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
