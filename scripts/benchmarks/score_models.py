"""What scoring is measured on: ResNet-50 in fp32 and int8 as a model store has it, and folders of JPEGs."""

from __future__ import annotations

import json
from pathlib import Path

from inputs import add_model, synthetic_photograph
from precision_speed import prepare
from score_requests import PREPROCESS

ENGINES = {"fp32": "onnxruntime", "int8": "auto"}  # in fp32 the runtime that the peer has, too
_WIDTH, _HEIGHT = 500, 375
_PHOTOGRAPHS = 64


def add_resnet(store: Path, precision: str) -> Path:
    """Adds ResNet-50 with random weights to a store.

    Args:
        store: The store.
        precision: `fp32` or `int8`.

    Returns:
        The model's folder.
    """
    graphs = prepare("resnet50")
    graph = graphs.int8 if precision == "int8" else graphs.fp32
    if graph is None:
        raise SystemExit("ResNet-50 cannot be quantized here")
    said = {"preprocess": PREPROCESS.to_json(), "engine": ENGINES[precision]}
    parameters = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: {json.dumps(value)} }} }}\n' for key, value in said.items()
    )
    name = f"resnet50_{precision}"
    add_model(store, name, graph, f"\n{parameters}")
    return store / name


def write_photographs(folder: Path, count: int, size: tuple[int, int] = (_WIDTH, _HEIGHT)) -> Path:
    """A folder of JPEGs: some photographs, again and again, each a file of its own."""
    contents = [synthetic_photograph(*size, seed) for seed in range(_PHOTOGRAPHS)]
    folder.mkdir(parents=True)
    for number in range(count):
        # Ray Data takes files of one content for one file no more than we do; a trailer makes each another one.
        (folder / f"{number:07}.jpg").write_bytes(contents[number % len(contents)] + number.to_bytes(8, "big"))
    return folder
