"""A session in the process that opens it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stories import FakeSession

from graphkiln.story.digits import Digits
from graphkiln.story.workloads.session import SessionWorkload, open_session, predict_one_by_one
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.preprocess import Preprocess


class TestSession:
    def test_classifies_real_digits(self, digits: Path, preprocess: Preprocess, held_out: Digits) -> None:
        workload = SessionWorkload(graph=digits / "1" / "model.onnx", preprocess=preprocess, device=CPU)
        with workload.open() as predictor:
            predictions = predictor.predict(held_out.jpegs)
            predictor.run_one(held_out.jpegs[0])
            assert predictor.callers == 1
            assert predictor.parameter_gradients is None
        assert predictions.scores.shape == (4, 10)
        assert predictions.gradients is None
        np.testing.assert_array_equal(predictions.scores.argmax(axis=1), held_out.targets)

    def test_runs_in_fp32_by_default(self, digits: Path) -> None:
        with open_session(digits / "1" / "model.onnx", CPU) as session:
            placement = session.placement({"INPUT_0": np.zeros((1, 1, 32, 32), np.float32)})
        assert placement is not None
        assert set(placement.products) == {Precision.FP32}

    def test_a_graph_that_is_damaged(self, tmp_path: Path, preprocess: Preprocess) -> None:
        (tmp_path / "model.onnx").write_bytes(b"nonsense")
        workload = SessionWorkload(graph=tmp_path / "model.onnx", preprocess=preprocess, device=CPU)
        with pytest.raises(GraphkilnError), workload.open():
            pytest.fail("it cannot be opened")

    @pytest.mark.parametrize(("outputs", "gradient"), [(1, False), (2, True)])
    def test_takes_outputs_by_their_order(
        self, preprocess: Preprocess, held_out: Digits, outputs: int, gradient: bool
    ) -> None:
        """A saved training step has gradients by parameters behind its scores: these are no gradient by the image."""
        session: Any = FakeSession({"any": np.ones((1, 10)), "name": np.zeros((1, 3, 2, 2)), "more": np.zeros(1)})
        found = predict_one_by_one(session, held_out.jpegs, preprocess, outputs=outputs)
        assert found.scores.shape == (4, 10)
        assert (found.gradients is not None) is gradient
        assert [len(batch) for batch in session.fed] == [1] * 4  # one by one, as it is measured
