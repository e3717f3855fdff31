"""A saved training step, then a saved forward graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from stories import FakeSession

from graphkiln.story.digits import Digits
from graphkiln.story.workloads import static as static_module
from graphkiln.story.workloads.base import load_batch
from graphkiln.story.workloads.static import StaticWorkload
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.preprocess import Preprocess


class TestStatic:
    @pytest.fixture
    def sessions(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeSession]:
        found = {
            "training.onnx": FakeSession(
                {"OUTPUT_0": np.full((1, 2), 5.0), "w_gradient": np.array([1.0, 2.0]), "a_gradient": np.array([0.0])}
            ),
            "forward.onnx": FakeSession({"OUTPUT_0": np.full((1, 2), 5.0)}),
        }

        @contextmanager
        def open_fake(graph: Path, device: Device) -> Iterator[FakeSession]:
            assert device == CPU
            with found[graph.name] as session:
                yield session

        monkeypatch.setattr(static_module, "open_session", open_fake)
        return found

    @pytest.fixture
    def workload(self, preprocess: Preprocess) -> StaticWorkload:
        return StaticWorkload(
            training_graph=Path("training.onnx"), forward_graph=Path("forward.onnx"), preprocess=preprocess, device=CPU
        )

    def test_an_image_is_a_training_step_and_a_second_forward(
        self, workload: StaticWorkload, sessions: dict[str, FakeSession], held_out: Digits, preprocess: Preprocess
    ) -> None:
        with workload.open() as predictor:
            predictor.run_one(held_out.jpegs[0])
        expected = load_batch(held_out.jpegs[:1], preprocess)
        for session in sessions.values():
            (fed,) = session.fed
            np.testing.assert_array_equal(fed, expected)
            assert session.closed

    def test_predictions_are_those_of_the_training_graph(
        self, workload: StaticWorkload, sessions: dict[str, FakeSession], held_out: Digits
    ) -> None:
        with workload.open() as predictor:
            found = predictor.predict(held_out.jpegs)
        assert found.scores.shape == (4, 2)
        assert found.gradients is None
        assert sessions["forward.onnx"].fed == []

    @pytest.mark.usefixtures("sessions")
    def test_gradients_by_parameters_are_one_row(self, workload: StaticWorkload, held_out: Digits) -> None:
        with workload.open() as predictor:
            assert predictor.parameter_gradients is not None
            gradients, noise = predictor.parameter_gradients(held_out.jpegs[0])
        assert (gradients.tolist(), noise) == ([0, 1, 2], 0)
