"""The commands that repeat a step are ones that graphkiln takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from stories import ON_CPU, story_request
from typer.testing import CliRunner

from graphkiln.cli.main import app
from graphkiln.story.commands import convert_options, repeat_commands
from graphkiln.story.variants import final_variants, initial_variants
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
