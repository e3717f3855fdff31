"""What every workload has in common: plain data that another process opens, then calls with one image after another.

Modules that compute are imported where a workload is opened: the memory of a process is that of its own variant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import load_sample

_GRADIENT_SUFFIX = "_gradient"


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictions:
    """What a variant predicts for some images.

    Attributes:
        scores: `[images, classes]`, or the top k of them, `[images, k]`.
        indices: The classes of the top k, `[images, k]`; None where `scores` holds all of them.
        gradients: With respect to the image, `[images, 3, height, width]`, where requested.
        noise: Relative L2 change of the gradients when the image changes by as little as fp32 can tell.
    """

    scores: AnyArray
    indices: AnyArray | None = None
    gradients: AnyArray | None = None
    noise: float = 0.0

    def write(self, path: Path) -> None:
        """Writes scores, gradients and noise as .npz; indices are not kept."""
        gradients = np.zeros(0) if self.gradients is None else self.gradients
        np.savez(path, scores=self.scores, gradients=gradients, noise=np.float64(self.noise))

    @classmethod
    def read(cls, path: Path) -> Predictions:
        """Reads what `write` wrote."""
        with np.load(path) as arrays:
            gradients = arrays["gradients"]
            return cls(
                scores=arrays["scores"], gradients=gradients if gradients.size else None, noise=float(arrays["noise"])
            )

    @classmethod
    def concatenate(cls, outputs: Sequence[Mapping[str, AnyArray]]) -> Predictions:
        """Joins the outputs of several runs by their names in the saved graph: scores, top-k indices, gradient."""
        arrays = {name: np.concatenate([row[name] for row in outputs]) for name in outputs[0]}
        return cls(scores=arrays["OUTPUT_0"], indices=arrays.get("INDEX_0"), gradients=arrays.get("OUTPUT_1"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictor:
    """An open workload.

    Attributes:
        run_one: Does all the work for one JPEG, as a user would have it; thread-safe where there are several callers.
        predict: Predictions for several JPEGs, for the proof.
        callers: Concurrent callers of `run_one`.
        parameter_gradients: The gradients of one image with respect to all parameters, `[values]`, and their noise;
            None where the variant makes none.
    """

    run_one: Callable[[bytes], object]
    predict: Callable[[Sequence[bytes]], Predictions]
    callers: int = 1
    parameter_gradients: Callable[[bytes], tuple[AnyArray, float]] | None = None


class Workload(Protocol):
    """A variant's work as plain data that another process can open."""

    def open(self) -> AbstractContextManager[Predictor]:
        """Loads all that it needs."""
        ...


def load_batch(jpegs: Sequence[bytes], preprocess: Preprocess) -> AnyArray:
    """Preprocesses images into one array, `[images, ...]`."""
    if len(jpegs) == 1:
        return load_sample(jpegs[0], preprocess)[np.newaxis]
    return np.stack([load_sample(jpeg, preprocess) for jpeg in jpegs])


def flatten_gradients(gradients: Mapping[str, AnyArray]) -> AnyArray:
    """Gradients by name of the parameter as one row, `[values]`, in the order of the names."""
    return np.concatenate([gradients[name].ravel() for name in sorted(gradients)])


def parameter_gradients_of(outputs: Mapping[str, AnyArray]) -> AnyArray:
    """The outputs `NAME_gradient` of a saved training step as one row, `[values]`, in the order of the names."""
    return flatten_gradients(
        {
            name.removesuffix(_GRADIENT_SUFFIX): array
            for name, array in outputs.items()
            if name.endswith(_GRADIENT_SUFFIX)
        }
    )
