"""Predictions and workloads of a story."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest
from PIL import Image
from stories import FakeSession, story_request

import graphkiln_client
from graphkiln.story import workloads as module
from graphkiln.story.digits import Digits
from graphkiln.story.workloads import (
    Predictions,
    Predictor,
    eager_workload,
    flatten_gradients,
    load_batch,
    open_session,
    open_source_model,
    parameter_gradients_of,
    served_workload,
    session_workload,
    source_preprocess,
    static_workload,
)
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError, ManifestError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.preprocess import Preprocess


def jpeg(gray: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (4, 4), gray).save(file, "JPEG", quality=95)
    return file.getvalue()


class TestPredictions:
    def test_predictions_round_trip(self, tmp_path: Path) -> None:
        generator = np.random.default_rng(0)
        written = Predictions(
            scores=generator.normal(size=(3, 10)).astype(np.float32),
            gradients=generator.normal(size=(3, 3, 2, 2)).astype(np.float32),
            noise=1.5e-7,
        )
        written.write(tmp_path / "reference.npz")
        read = Predictions.read(tmp_path / "reference.npz")
        np.testing.assert_array_equal(read.scores, written.scores)
        assert read.scores.dtype == np.float32
        assert read.gradients is not None
        np.testing.assert_array_equal(read.gradients, written.gradients)
        assert (read.noise, read.indices) == (1.5e-7, None)


class TestGradients:
    def test_saved_gradients_are_sorted_by_name(self) -> None:
        """`b.weight` and `b` sort differently with the suffix."""
        eager = {"b": np.array([1.0]), "b.weight": np.array([2.0]), "a": np.array([0.0])}
        outputs = {f"{name}_gradient": array for name, array in reversed(eager.items())}
        saved = parameter_gradients_of({"OUTPUT_0": np.zeros((1, 2)), **outputs})
        np.testing.assert_array_equal(saved, flatten_gradients(eager))
        np.testing.assert_array_equal(saved, [0, 1, 2])


def test_eager_pytorch(tmp_path: Path, held_out: Digits) -> None:
    """A linear model, whose gradients are known."""
    (tmp_path / "linear.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def net():\n"
        "    torch.manual_seed(0)\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(12, 2))\n"
    )
    request = story_request(source=f"python:{tmp_path / 'linear.py'}:net", image_size=2, preprocess=SPEC_OF_SOURCE)
    jpegs = held_out.jpegs
    with eager_workload(request, "output:input") as predictor:
        predictor.run_one(jpegs[0])
        assert predictor.parameter_gradients is not None
        predictions, (gradients, noise) = predictor.predict(jpegs), predictor.parameter_gradients(jpegs[0])
    sample = load_batch(jpegs[:1], Preprocess(resize=2, crop=(2, 2))).ravel()
    assert predictions.scores.shape == (4, 2)
    assert predictions.gradients is None
    # The sum of all scores is differentiated: by a bias that is 1, by a weight its input.
    np.testing.assert_allclose(gradients, [1, 1, *sample, *sample], rtol=1e-6)
    assert 0 < noise < 1e-5


def test_session_classifies_real_digits(digits: Path, preprocess: Preprocess, held_out: Digits) -> None:
    with session_workload(digits / "1" / "model.onnx", preprocess, CPU) as predictor:
        predictions = predictor.predict(held_out.jpegs)
        predictor.run_one(held_out.jpegs[0])
        assert predictor.callers == 1
        assert predictor.parameter_gradients is None
    assert predictions.scores.shape == (4, 10)
    assert predictions.gradients is None
    np.testing.assert_array_equal(predictions.scores.argmax(axis=1), held_out.targets)


def test_session_runs_in_fp32_by_default(digits: Path) -> None:
    with open_session(digits / "1" / "model.onnx", CPU) as session:
        placement = session.placement({"INPUT_0": np.zeros((1, 1, 32, 32), np.float32)})
    assert placement is not None
    assert set(placement.products) == {Precision.FP32}


def test_static_workload_runs_both_graphs(
    monkeypatch: pytest.MonkeyPatch, held_out: Digits, preprocess: Preprocess
) -> None:
    scores = {"OUTPUT_0": np.full((1, 2), 5.0)}
    sessions = {
        "training.onnx": FakeSession({**scores, "w_gradient": np.array([1.0, 2.0]), "a_gradient": np.array([0.0])}),
        "forward.onnx": FakeSession(scores),
    }

    @contextmanager
    def open_fake(graph: Path, device: Device) -> Iterator[FakeSession]:
        assert device == CPU
        with sessions[graph.name] as session:
            yield session

    monkeypatch.setattr(module, "open_session", open_fake)
    with static_workload(Path("training.onnx"), Path("forward.onnx"), preprocess, CPU) as predictor:
        predictor.run_one(held_out.jpegs[0])
        assert predictor.parameter_gradients is not None
        gradients, noise = predictor.parameter_gradients(held_out.jpegs[0])
    expected = load_batch(held_out.jpegs[:1], preprocess)
    assert [len(session.fed) for session in sessions.values()] == [2, 1]
    for session in sessions.values():
        np.testing.assert_array_equal(session.fed[0], expected)
        assert session.closed
    assert (gradients.tolist(), noise) == ([0, 1, 2], 0)  # one row, by the parameters' names


# Requests to a server that is not there.


class FakeClient:
    """A client of one model; the score of an image is its mean, and dark images take longer."""

    opened: list[FakeClient]

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url, self.timeout_s = url, timeout_s
        self.preprocess = Preprocess(resize=2, crop=(2, 2))
        self.classified: list[tuple[bytes, int]] = []
        self.threads: set[int] = set()
        self.closed = False
        self.opened.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def model(self, name: str) -> Self:
        assert name == "compiled"
        return self

    def infer(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        self.threads.add(threading.get_ident())
        mean = float(feeds["INPUT_0"].mean())
        time.sleep(0.02 * (1 - mean))
        return {"OUTPUT_0": np.array([[mean, -mean]]), "INDEX_0": np.array([[0, 1]])}

    def classify(self, jpeg: bytes, top_k: int) -> str:
        self.classified.append((jpeg, top_k))
        return "seven"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[FakeClient]:
    """The clients that were opened."""
    clients: list[FakeClient] = []

    class Client(FakeClient):
        opened = clients

    monkeypatch.setattr(graphkiln_client, "Client", Client)
    return clients


def workload(*, top_k: int = 0, gradient: bool = False) -> AbstractContextManager[Predictor]:
    return served_workload("grpc://h:1", "compiled", 3, top_k=top_k, gradient=gradient)


def test_predictions_are_in_the_order_of_the_images(opened: list[FakeClient], held_out: Digits) -> None:
    with workload() as predictor:
        found = predictor.predict(held_out.jpegs)
    means = [load_batch([jpeg], Preprocess(resize=2, crop=(2, 2))).mean() for jpeg in held_out.jpegs]
    np.testing.assert_allclose(found.scores[:, 0], means, rtol=1e-6)
    assert found.indices is not None
    assert len(opened[0].threads) > 1


@pytest.mark.parametrize(("top_k", "gradient", "labeled"), [(0, False, False), (5, False, True), (5, True, False)])
def test_served_workload_method(
    opened: list[FakeClient], held_out: Digits, top_k: int, gradient: bool, labeled: bool
) -> None:
    with workload(top_k=top_k, gradient=gradient) as predictor:
        found = predictor.run_one(held_out.jpegs[0])
    assert (found == "seven") is labeled
    assert opened[0].classified == ([(held_out.jpegs[0], 5)] if labeled else [])


# The source model: a PyTorch classifier of one image, and how an image becomes its input.

SPEC_OF_SOURCE = {"resize": 2, "crop": [2, 2]}


def model(preprocess: Preprocess | None) -> Any:
    return SimpleNamespace(preprocess=preprocess)


class TestPreprocess:
    def test_unknown_preprocess_spec(self) -> None:
        with pytest.raises(ConversionError, match=r"no preprocess spec"):
            source_preprocess(model(None), story_request())

    def test_invalid_preprocess_key_is_named(self) -> None:
        with pytest.raises(ManifestError, match=r"preprocess\.resise"):
            source_preprocess(model(None), story_request(preprocess={"resise": 2}))


class TestOpen:
    def test_saved_graph_is_refused(self, digits: Path) -> None:
        source = str(digits / "1" / "model.onnx")
        with pytest.raises(ConversionError, match=r"needs a PyTorch model"):
            open_source_model(story_request(source=source, image_size=32, preprocess=SPEC_OF_SOURCE))
