"""The commands that repeat a step by hand, and the conversion options behind them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from graphkiln.story.request import Platform, StoryRequest
from graphkiln.story.variants import GraphSpec, Variant
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.repository.version import CONFIG_FILE


def repeat_commands(variant: Variant, request: StoryRequest, platform: Platform, derivative: str) -> tuple[str, ...]:
    """Shell commands that execute one variant by itself, with the files that the story left.

    Args:
        variant: The variant.
        request: The story's request.
        platform: What it runs on.
        derivative: `OUTPUT:INPUT` of `graphkiln convert --gradient`.
    """
    graph = variant.graph
    if graph is None:
        return (_story_command(variant, request),)
    store = request.folder / "try"
    options = convert_options(graph, request, platform, derivative)
    words = [word for name, value in options.items() for word in _option_words(name, value)]
    convert = shlex.join(
        ["graphkiln", "convert", request.source, "--name", graph.name, "--model-store", str(store), *words]
    )
    if not variant.is_served:
        return (convert, f"graphkiln verify {store / graph.name}")
    return (
        convert,
        f"echo {shlex.quote(platform.instance_group)} >> {store / graph.name / CONFIG_FILE}",
        shlex.join(["graphkiln", "serve", "--model-store", str(store), *setting_flags(graph.name, variant)]),
        f"graphkiln bench --model {graph.name} --url grpc://localhost:8001 --concurrency {platform.callers}",
    )


def convert_options(graph: GraphSpec, request: StoryRequest, platform: Platform, derivative: str) -> dict[str, Any]:
    """Fields of the recipe beside source, name and model store; `derivative` is the `OUTPUT:INPUT` of `--gradient`."""
    samples, calibration, labels = sample_paths(request.folder)
    options: dict[str, Any] = {
        "shape": (f"3x{request.image_size}x{request.image_size}",),
        "max_batch_size": platform.batch,
        "samples": samples,
        **graph.options,
    }
    if labels.exists():
        options["labels"] = labels
    if request.weights:
        options["weights"] = request.weights
    if request.preprocess:
        options["preprocess"] = request.preprocess
    if request.gradient:
        options["gradient"] = derivative
    if options.get("precision") is Precision.INT8:
        options |= {"calibration": calibration, "calibration_method": "entropy"}
    return options


def setting_flags(model: str, variant: Variant) -> tuple[str, ...]:
    """The `--set` flags of `graphkiln serve` for a variant."""
    return tuple(word for setting in variant.settings for word in ("--set", f"{model}.{setting}"))


def sample_paths(folder: Path) -> tuple[Path, Path, Path]:
    """The folders of images that conversions are proven on and calibrated with, and the file of labels."""
    return folder / "samples", folder / "calibration", folder / "labels.txt"


def _story_command(variant: Variant, request: StoryRequest) -> str:
    words = ["graphkiln", "story", "--model", request.source, "--image-size", str(request.image_size)]
    words += ["--weights", str(request.weights)] if request.weights else []
    words += ["--samples", str(request.samples)] if request.samples else []
    words += ["--preprocess", json.dumps(request.preprocess)] if request.preprocess else []
    words += ["--gradient"] if request.gradient else []
    return shlex.join([*words, "--only", variant.key])


def _option_words(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    values = value if isinstance(value, tuple) else (json.dumps(value) if isinstance(value, dict) else value,)
    return [word for item in values for word in (flag, str(item))]
