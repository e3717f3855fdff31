"""Step 0: eager PyTorch, as the team found the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphkiln.story.request import StoryRequest
from graphkiln.story.source import open_source_model, source_preprocess
from graphkiln.story.workloads.base import Predictions, Predictor, flatten_gradients, load_batch
from graphkiln_backend.graph.dtypes import AnyArray

if TYPE_CHECKING:
    from graphkiln.story.training_step import TrainingStep
    from graphkiln_converters.sources.pytorch import TorchModel

_BATCH = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class EagerWorkload:
    """Preprocessing, forward, backward by the parameters, a second forward; one image at a time.

    Attributes:
        request: The story's request.
        derivative: `OUTPUT:INPUT`, what the gradient is of and with respect to.
    """

    request: StoryRequest
    derivative: str

    @contextmanager
    def open(self) -> Iterator[Predictor]:
        """See `Workload`."""
        with closing(open_source_model(self.request)) as model:
            from graphkiln.story.training_step import TrainingStep

            training_step = TrainingStep(model=model)
            preprocess = source_preprocess(model, self.request)
            (graph_input,) = model.inputs

            def feeds(jpegs: Sequence[bytes]) -> dict[str, AnyArray]:
                return {graph_input.name: load_batch(jpegs, preprocess)}

            yield Predictor(
                run_one=lambda jpeg: training_step.repeat(feeds([jpeg]), by_input=self.request.gradient),
                predict=lambda jpegs: self._predict(model, feeds(jpegs)),
                parameter_gradients=lambda jpeg: _parameter_gradients(training_step, feeds([jpeg])),
            )

    def _predict(self, model: TorchModel, feeds: Mapping[str, AnyArray]) -> Predictions:
        from graphkiln_converters.gradient import add_gradient
        from graphkiln_converters.row_batches import run_in_batches

        model.module.to("cpu")
        if not self.request.gradient:
            (scores,) = run_in_batches(model.run, feeds, size=_BATCH).values()
            return Predictions(scores=scores)
        derived = add_gradient(model, self.derivative)
        scores, gradients = run_in_batches(derived.run, feeds, size=_BATCH).values()
        noise = derived.gradient_noise({name: array[:_BATCH] for name, array in feeds.items()})
        return Predictions(scores=scores, gradients=gradients, noise=noise)


def _parameter_gradients(training_step: TrainingStep, feeds: Mapping[str, AnyArray]) -> tuple[AnyArray, float]:
    """The gradients, and their relative change when the image changes by as little as fp32 can tell."""
    from graphkiln_converters.gradient import perturb

    training_step.model.module.to("cpu")
    steady = flatten_gradients(training_step.run(feeds)[1])
    generator = np.random.default_rng(0)
    perturbed = {name: perturb(array, generator) for name, array in feeds.items()}
    changed = flatten_gradients(training_step.run(perturbed)[1])
    return steady, float(np.linalg.norm(np.subtract(changed, steady)) / np.linalg.norm(steady))
