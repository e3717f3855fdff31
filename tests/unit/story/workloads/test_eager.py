"""Eager PyTorch, in the process that opens it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stories import story_request

from graphkiln.story.digits import Digits
from graphkiln.story.workloads.base import load_batch
from graphkiln.story.workloads.eager import EagerWorkload
from graphkiln_backend.graph.preprocess import Preprocess


class TestEager:
    """The eager workload on a linear model in PyTorch, whose gradients are known."""

    @pytest.fixture
    def source(self, tmp_path: Path) -> str:
        (tmp_path / "linear.py").write_text(
            "import torch\n"
            "from torch import nn\n"
            "def net():\n"
            "    torch.manual_seed(0)\n"
            "    return nn.Sequential(nn.Flatten(), nn.Linear(12, 2))\n"
        )
        return f"python:{tmp_path / 'linear.py'}:net"

    def predictions(self, source: str, jpegs: Sequence[bytes], *, gradient: bool) -> Any:
        spec = {"resize": 2, "crop": [2, 2]}
        request = story_request(source=source, image_size=2, preprocess=spec, gradient=gradient)
        with EagerWorkload(request=request, derivative="output:input").open() as predictor:
            predictor.run_one(jpegs[0])
            assert predictor.parameter_gradients is not None
            return predictor.predict(jpegs), *predictor.parameter_gradients(jpegs[0])

    def test_scores_and_gradients_by_parameters(self, source: str, held_out: Digits) -> None:
        predictions, gradients, noise = self.predictions(source, held_out.jpegs, gradient=False)
        sample = load_batch(held_out.jpegs[:1], Preprocess(resize=2, crop=(2, 2))).ravel()
        assert predictions.scores.shape == (4, 2)
        assert predictions.gradients is None
        # The sum of all scores is differentiated: by a bias that is 1, by a weight its input.
        np.testing.assert_allclose(gradients, [1, 1, *sample, *sample], rtol=1e-6)
        assert 0 < noise < 1e-5
