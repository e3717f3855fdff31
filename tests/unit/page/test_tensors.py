"""Tensor requests of the page."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_transport import echo
from shown_server import Shown, config

from graphkiln.page import answers as tensors
from graphkiln.page.answers import answer_tensors, golden_sample
from graphkiln_backend.graph.dtypes import DType
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
    """An identity model of two numbers with golden samples."""
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


def answering(shown: Shown, outputs: list[list[float]], row: dict[str, Any]) -> dict[str, Any]:
    """Return the description of an output that differs from the golden one."""
    shown.answer_in_turn(3, 3, 4)
    shown.transport.responses["infer"] = InferResponse(model="m", version="1", outputs={"Y": np.float32(outputs)})
    found: dict[str, Any] = ask(shown, {"X": row})["outputs"]["Y"]
    return found


def test_golden_sample(stored: Shown) -> None:
    sample = asyncio.run(golden_sample(stored.server(), "m", "1"))
    assert sample == {"X": {"datatype": "FP32", "shape": [1, 2], "data": [3, 4]}}


def test_large_tensor_is_not_offered_for_editing(stored: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "EDITED", 1)
    sample = asyncio.run(golden_sample(stored.server(), "m", "1"))
    assert sample["X"]["data"] is None
    assert ask(stored, {"X": {"golden": True}})["outputs"]["Y"]["data"] == [3, 4]


@pytest.mark.parametrize("odd", [np.array([[math.nan, 1]], np.float32), np.array([[math.inf, 1]], np.float16)], ids=str)
def test_non_finite_golden_tensor_is_sent(stored: Shown, odd: Any) -> None:
    outputs = {"Y": np.zeros((1, 2), np.float32)}
    golden = GoldenSamples(inputs={"X": odd}, source_outputs=outputs, graph_outputs=outputs)
    golden.write(stored.folder / "m" / "1" / "golden.npz")
    for kind in ("inputs", "outputs"):  # the fake returns its input
        stored.transport.responses["model_metadata"][kind][0]["datatype"] = DType.from_numpy(odd.dtype).value
    assert asyncio.run(golden_sample(stored.server(), "m", "1"))["X"]["data"] is None
    ask(stored, {"X": {"golden": True}})
    (sent,) = stored.transport.inferred()
    assert repr(sent.inputs["X"]) == repr(odd)


def test_output_statistics(stored: Shown) -> None:
    answer = ask(stored, {"X": PIXEL})
    assert answer["outputs"] == {
        "Y": {"datatype": "FP32", "shape": [1, 2], "data": [1.5, -2], "least": -2, "most": 1.5, "mean": -0.25}
    }
    assert answer["times"]["queue_ms"] == 2


@pytest.mark.parametrize("row", [{"golden": True}, {"datatype": "FP32", "shape": [1, 2], "data": [3, 4]}])
def test_golden_inputs_are_compared(stored: Shown, row: dict[str, Any]) -> None:
    right = ask(stored, {"X": row})["outputs"]["Y"]
    assert (right["golden_error"], right["golden_limit"], right["golden_agrees"]) == (0, 1e-4, True)
    wrong = answering(stored, [[3, 9]], row)
    assert (wrong["golden_error"], wrong["golden_agrees"]) == (pytest.approx(1), False), "5 of a length of 5"


@pytest.mark.parametrize("wrong", [[[3, math.nan]], [[math.inf, 4]]], ids=str)
def test_non_finite_output_does_not_agree(stored: Shown, wrong: list[list[float]]) -> None:
    row = answering(stored, wrong, {"golden": True})
    assert not math.isfinite(row["golden_error"])
    assert row["golden_agrees"] is False


def test_unknown_precision_has_no_verdict(stored: Shown) -> None:
    server = stored.server()
    server.metrics_url = ""
    row = asyncio.run(answer_tensors(server, "m", "1", {"X": {"golden": True}}))["outputs"]["Y"]
    assert (row["golden_error"], row["golden_limit"], row["golden_agrees"]) == (0, None, None)


@pytest.mark.parametrize("shape", [[1 << 40], [1 << 30, 1 << 30], [10**30], [1] * 40])
def test_huge_zero_tensor_is_refused(stored: Shown, shape: list[int]) -> None:
    with pytest.raises(InvalidInput, match="input 'X'"):
        ask(stored, {"X": {"datatype": "FP32", "shape": shape}})


def test_large_integers_become_text(stored: Shown) -> None:
    large = 2**62 + 1
    stored.transport.responses["model_metadata"]["outputs"][0]["datatype"] = "INT64"
    stored.transport.responses["infer"] = InferResponse(model="m", version="1", outputs={"Y": np.array([[large, 3]])})
    assert ask(stored, {"X": PIXEL})["outputs"]["Y"]["data"] == [str(large), 3]


def test_large_output_is_truncated(stored: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
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
        ([], "expected a JSON object"),
        ({"X": 3}, "expected a JSON object"),
        ({"X": {**PIXEL, "shape": [3]}}, "not a FP32 tensor"),
        ({"X": {**PIXEL, "shape": "all"}}, "must be a list of"),
        ({"X": {**PIXEL, "shape": [-1, 2]}}, "must be a list of"),
        ({"X": {**PIXEL, "data": ["a", "b"]}}, "not a FP32 tensor"),
        ({"X": {**PIXEL, "datatype": "INT8", "data": [1, 300]}}, "out of the range"),
        ({"X": {**PIXEL, "datatype": "COMPLEX"}}, "unknown datatype"),
        ({"X": {**PIXEL, "datatype": "FP16", "data": [70000, 1]}}, "out of the range of FP16"),
        ({"X": {**PIXEL, "datatype": "BF16", "data": [1e39, 1]}}, "out of the range of BF16"),
        ({"X": {**PIXEL, "data": [1e39, 1]}}, "out of the range of FP32"),
        ({"X": {**PIXEL, "datatype": "FP64", "data": [math.inf, 1]}}, "out of the range of FP64"),
        ({"Z": {"golden": True}}, "no golden sample of 'Z'"),
    ],
)
def test_invalid_tensor_documents(stored: Shown, document: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        ask(stored, document)
    assert not stored.transport.sent("infer")
