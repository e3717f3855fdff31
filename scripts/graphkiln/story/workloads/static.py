"""Step 1: as step 0, with saved graphs instead of PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from graphkiln.story.workloads.base import Predictor, load_batch, parameter_gradients_of
from graphkiln.story.workloads.session import open_session, predict_one_by_one
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.preprocess import Preprocess


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticWorkload:
    """A saved training step, then a saved forward graph; one image at a time.

    Attributes:
        training_graph: Scores, then gradients with respect to the parameters.
        forward_graph: Scores.
        preprocess: How an image becomes the input.
        device: Where it runs.
    """

    training_graph: Path
    forward_graph: Path
    preprocess: Preprocess
    device: Device

    @contextmanager
    def open(self) -> Iterator[Predictor]:
        """See `Workload`."""
        with (
            open_session(self.training_graph, self.device) as training,
            open_session(self.forward_graph, self.device) as forward,
        ):

            def run_one(jpeg: bytes) -> None:
                feeds = {"INPUT_0": load_batch([jpeg], self.preprocess)}
                training.run(feeds)
                forward.run(feeds)

            def parameter_gradients(jpeg: bytes) -> tuple[AnyArray, float]:
                return parameter_gradients_of(training.run({"INPUT_0": load_batch([jpeg], self.preprocess)})), 0.0

            yield Predictor(
                run_one=run_one,
                predict=lambda jpegs: predict_one_by_one(training, jpegs, self.preprocess, outputs=1),
                parameter_gradients=parameter_gradients,
            )
