"""Tensors of a form: what is offered, what is refused, and what is told of the outputs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_transport import echo
from shown_server import Shown, config

from graphkiln.page import tensors
from graphkiln.page.tensors import answer_tensors, golden_sample
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_client.transports.base import InferRequest, InferResponse

PIXEL = {"datatype": "FP32", "shape": [1, 2], "data": [1.5, -2]}
GOLDEN = GoldenSamples(
    inputs={"X": np.array([[3, 4], [0, 0]], np.float32)},
    source_outputs={"Y": np.array([[3, 4], [0, 0]], np.float32)},
    graph_outputs={"Y": np.array([[3, 4], [0, 0]], np.float32)},
)


@pytest.fixture
def stored(shown: Shown, digits: Path) -> Shown:
    """A version of two numbers with golden samples, whose outputs are its inputs."""
    folder = shown.folder / "m" / "1"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text((digits / "1" / "manifest.json").read_text())
    GOLDEN.write(folder / "golden.npz")
    shown.transport.responses |= {
        "model_config": config(takes_images=False),
        "model_metadata": {
            "inputs": [{"name": "X", "datatype": "FP32", "shape": [-1, 2]}],
            "outputs": [{"name": "Y", "datatype": "FP32", "shape": [-1, 2]}],
        },
        "infer": renamed,
    }
    return shown


def renamed(request: InferRequest, timeout_s: float) -> InferResponse:
    response = echo(request, timeout_s)
    return InferResponse(model="m", version="1", outputs={"Y": response.outputs["X"]})


def ask(shown: Shown, document: Any) -> dict[str, Any]:
    return asyncio.run(answer_tensors(shown.server(), "m", "1", document))


def test_the_first_golden_sample_is_offered(stored: Shown) -> None:
    sample = asyncio.run(golden_sample(stored.server(), "m", "1"))
    assert sample == {"X": {"datatype": "FP32", "shape": [1, 2], "data": [3, 4]}}


def test_a_version_without_golden_samples(shown: Shown) -> None:
    assert asyncio.run(golden_sample(shown.server(), "m", "1")) == {}


def test_a_large_tensor_is_not_offered_for_editing(stored: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "EDITED", 1)
    sample = asyncio.run(golden_sample(stored.server(), "m", "1"))
    assert sample["X"]["data"] is None
    assert ask(stored, {"X": {"golden": True}})["outputs"]["Y"]["data"] == [3, 4]


def test_outputs_with_their_figures(stored: Shown) -> None:
    answer = ask(stored, {"X": PIXEL})
    assert answer["outputs"] == {
        "Y": {"datatype": "FP32", "shape": [1, 2], "data": [1.5, -2], "least": -2, "most": 1.5, "mean": -0.25}
    }
    assert answer["times"]["queue_ms"] == 2


@pytest.mark.parametrize("row", [{"golden": True}, {"datatype": "FP32", "shape": [1, 2], "data": [3, 4]}])
def test_golden_inputs_are_held_to_the_golden_outputs(stored: Shown, row: dict[str, Any]) -> None:
    assert ask(stored, {"X": row})["outputs"]["Y"]["golden_error"] == 0
    stored.answer_in_turn(3, 3, 4)
    stored.transport.responses["infer"] = InferResponse(model="m", version="1", outputs={"Y": np.float32([[3, 9]])})
    assert ask(stored, {"X": row})["outputs"]["Y"]["golden_error"] == pytest.approx(1), "5 of a length of 5"


def test_of_a_large_output_the_first_elements(stored: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "_SHOWN", 1)
    row = ask(stored, {"X": PIXEL})["outputs"]["Y"]
    assert (row["data"], row["shape"], row["least"]) == ([1.5], [1, 2], -2)


def test_text(stored: Shown) -> None:
    stored.transport.responses["model_metadata"] = {
        "inputs": [{"name": "X", "datatype": "BYTES", "shape": [1]}],
        "outputs": [{"name": "Y", "datatype": "BYTES", "shape": [1]}],
    }
    answer = ask(stored, {"X": {"datatype": "BYTES", "shape": [1], "data": ["<b>é"]}})
    assert answer["outputs"]["Y"] == {"datatype": "BYTES", "shape": [1], "data": ["<b>é"]}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "no JSON object"),
        ({"X": 3}, "no JSON object"),
        ({"X": {**PIXEL, "shape": [3]}}, "not a FP32 tensor"),
        ({"X": {**PIXEL, "shape": "all"}}, "must be a list of numbers"),
        ({"X": {**PIXEL, "shape": [-1, 2]}}, "must be a list of numbers"),
        ({"X": {**PIXEL, "data": ["a", "b"]}}, "not a FP32 tensor"),
        ({"X": {**PIXEL, "datatype": "INT8", "data": [1, 300]}}, "out of the range"),
        ({"X": {**PIXEL, "datatype": "COMPLEX"}}, "unknown datatype"),
        ({"Z": {"golden": True}}, "no golden sample of 'Z'"),
    ],
)
def test_what_is_refused(stored: Shown, document: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        ask(stored, document)
    assert not stored.transport.sent("infer")
