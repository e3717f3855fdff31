"""Variants of a story."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from stories import ON_CPU, ON_GPU, story_request
from typer.testing import CliRunner

from graphkiln.cli.main import app
from graphkiln.story.variants import (
    BASE_GRAPH,
    LOWEST_PRECISIONS,
    Platform,
    convert_options,
    final_variants,
    initial_variants,
    repeat_commands,
    version_folder,
)
from graphkiln_backend.graph.manifest import MANIFEST_FILE, Conversion, Manifest
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.settings import parse_override
from graphkiln_backend.passes.pipeline import OPTIMIZATIONS


def test_unavailable_variants() -> None:
    unavailable = {variant.key: variant.unavailable for variant in initial_variants(ON_CPU) if variant.unavailable}
    assert unavailable == {"search": "cuDNN's search needs a GPU"}
    assert {variant.key for variant in initial_variants(ON_GPU) if variant.unavailable} == {"engine", "int8"}


@pytest.mark.parametrize("platform", [ON_CPU, ON_GPU])
def test_chain_and_its_baselines(platform: Platform) -> None:
    variants = (*initial_variants(platform), *final_variants(Precision.BF16))
    keys = [variant.key for variant in variants]
    assert len(set(keys)) == len(keys)
    assert all(not variant.baseline or variant.baseline in keys[:index] for index, variant in enumerate(variants))
    chain = [variant for variant in variants if not variant.switch]
    assert [variant.step for variant in chain] == [0, 1, 2, 3, 4, 5]
    assert [variant.is_served for variant in chain] == [False, False, False, True, True, True]
    assert {variant.precision for variant in chain[:4]} == {Precision.FP32}
    switches = {variant.precision: variant for variant in variants if variant.switch}
    for precision in LOWEST_PRECISIONS[platform.device.kind]:  # these decide, and can be executed
        assert not switches[precision].unavailable
    assert all(parse_override(setting) for variant in variants for setting in variant.settings)


@pytest.mark.parametrize(
    ("precision", "settings", "saved"),
    [
        (Precision.INT8, ("engine=auto",), {"precision": Precision.INT8}),
        (Precision.BF16, ("engine=openvino", "precision=bf16"), {}),
        (Precision.FP32, ("engine=auto", "precision=fp32"), {}),
    ],
)
def test_final_variants_by_precision(precision: Precision, settings: tuple[str, ...], saved: dict[str, object]) -> None:
    compiled, served = final_variants(precision)
    assert compiled.settings == served.settings == settings
    assert compiled.graph is not None
    assert served.graph is not None
    assert compiled.graph.options == saved
    assert served.graph.options == {**saved, "input": "uint8-nhwc", "top_k": 5}
    assert str(precision) in compiled.title
    assert compiled.limits is served.limits


def test_graphs_of_other_steps_are_quantized_as_the_int8_switch_was(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    int8 = next(variant.graph for variant in initial_variants(ON_CPU) if variant.key == "int8")
    assert int8 is not None
    graphs = {"int8": int8, **{variant.key: variant.graph for variant in final_variants(Precision.INT8)}}
    request = story_request()

    def quantizers() -> list[str | None]:
        options = [convert_options(graph, request, ON_CPU, "") for graph in graphs.values() if graph]
        return [found.get("int8_by") for found in options]

    assert quantizers() == [None, None, None]
    manifest = Manifest.read(digits / "1" / MANIFEST_FILE)
    conversion = Conversion(
        recipe={"int8_by": "nncf"}, precision=Precision.INT8, passes=(), output_errors={}, graph_bytes=1, seconds=1.0
    )
    folder = version_folder(request.folder, int8)
    folder.mkdir(parents=True)
    replace(manifest, conversion=conversion).write(folder / MANIFEST_FILE)
    assert quantizers() == [None, "nncf", "nncf"]


def test_passes_that_are_skipped_exist() -> None:
    names = {each.name for each in OPTIMIZATIONS}
    assert set(BASE_GRAPH.options["skip"]) <= names


# The commands that repeat a step are ones that graphkiln takes.


@pytest.mark.parametrize("gradient", [True, False])
def test_repeat_commands_are_valid(tmp_path: Path, gradient: bool) -> None:
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


def test_shell_characters_are_quoted() -> None:
    request = story_request(source="python:my file.py:make; rm")
    for variant in initial_variants(ON_CPU):
        words = shlex.split(repeat_commands(variant, request, ON_CPU, "")[0])
        assert "python:my file.py:make; rm" in words
