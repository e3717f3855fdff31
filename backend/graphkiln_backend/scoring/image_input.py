"""What a graph takes of images: one input, batches of it or one image at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.scoring.errors import ScoringError

_SAMPLE_RANK = 3


class BatchBuffer:
    """Memory of a batch, used again by the next one: new memory is cleared by the system before it is written to.

    Of 8 images of 224 x 224 that took five times as long as copying them.
    """

    def __init__(self) -> None:
        self._memory: AnyArray = np.empty(0, np.uint8)

    def stack(self, samples: Sequence[AnyArray]) -> AnyArray:
        """Samples as a batch `[rows, ...]`, which the next call overwrites.

        Args:
            samples: Of one shape and dtype.
        """
        first = samples[0]
        size = len(samples) * first.nbytes
        if len(self._memory) < size:
            self._memory = np.empty(size, np.uint8)
        batch = self._memory[:size].view(first.dtype).reshape(len(samples), *first.shape)
        return np.stack(samples, out=batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageInput:
    """The input of a graph that takes images.

    Attributes:
        name: Of the tensor.
        batched: Whether its first dimension is the batch.
        most_rows: Most images that it takes at once.
    """

    name: str
    batched: bool
    most_rows: int

    @classmethod
    def of(cls, signature: Signature, preprocess: Preprocess, max_batch_size: int) -> ImageInput:
        """The image input of a graph.

        Args:
            signature: Of the graph.
            preprocess: How an image becomes a sample.
            max_batch_size: Of the configuration. With 0 rows are computed one by one, whatever the graph would take:
                nobody has said that they are independent.

        Raises:
            ScoringError: What images become is not what the graph takes.
        """
        if len(signature.inputs) != 1:
            names = ", ".join(spec.name for spec in signature.inputs) or "none"
            raise ScoringError(f"expected a model with one input, the image; it has {len(signature.inputs)}: {names}")
        spec = signature.inputs[0]
        batched = len(spec.shape) == _SAMPLE_RANK + 1
        if problem := _problem(spec, preprocess, batched=batched):
            raise ScoringError(
                f"input '{spec.name}' does not take what images become: {problem}",
                hint="correct the preprocess spec: graphkiln convert --preprocess JSON",
            )
        return cls(name=spec.name, batched=batched, most_rows=max(1, max_batch_size) if batched else 1)

    def signature_of_rows(self, signature: Signature) -> Signature:
        """A signature whose outputs all have the row as their first dimension."""
        if self.batched:
            return signature
        outputs = [
            TensorSpec(name=spec.name, dtype=spec.dtype, shape=("batch", *spec.shape) if spec.has_rank else spec.shape)
            for spec in signature.outputs
        ]
        return Signature(inputs=signature.inputs, outputs=tuple(outputs))

    def feeds(self, samples: Sequence[AnyArray], batches: BatchBuffer) -> dict[str, AnyArray]:
        """What a session is fed for some images.

        Args:
            samples: Of one shape, at most `most_rows`.
            batches: Where they become a batch; its next one replaces this one.
        """
        if not self.batched:
            return {self.name: samples[0]}
        return {self.name: batches.stack(samples) if len(samples) > 1 else samples[0][np.newaxis]}

    def rows(self, outputs: dict[str, AnyArray], count: int) -> dict[str, AnyArray]:
        """Outputs with the row as their first dimension.

        Args:
            outputs: As the session returned them.
            count: How many images it was fed.

        Raises:
            ExecutionError: An output has another number of rows: what belongs to which image is not known.
        """
        if not self.batched:
            return {name: values[np.newaxis] for name, values in outputs.items()}
        for name, values in outputs.items():
            if values.shape[:1] != (count,):
                raise ExecutionError(f"output '{name}' has the shape {list(values.shape)} for {count} images")
        return outputs


def _problem(spec: TensorSpec, preprocess: Preprocess, *, batched: bool) -> str:
    """Why samples do not fit an input; empty where they may."""
    sample = _sample_shape(preprocess)
    if preprocess.dtype is not spec.dtype:
        return f"they are {preprocess.dtype}, it is {spec}"
    if not spec.has_rank or len(spec.shape) not in (_SAMPLE_RANK, _SAMPLE_RANK + 1):
        return f"it is {spec}"
    taken = spec.shape[1:] if batched else spec.shape
    if batched and isinstance(spec.shape[0], int) and spec.shape[0] != 1:
        return f"it takes {spec.shape[0]} images at once, no more and no fewer: {spec}"
    differ = [1 for size, own in zip(taken, sample, strict=True) if isinstance(size, int) and own and own != size]
    return f"they are {[size or 'any' for size in sample]}, it is {spec}" if differ else ""


def _sample_shape(preprocess: Preprocess) -> tuple[int, int, int]:
    """Shape of one sample; 0 where it follows from the image."""
    height, width = preprocess.crop or (preprocess.resize if isinstance(preprocess.resize, tuple) else (0, 0))
    if preprocess.layout == "HWC":
        return height, width, preprocess.channels
    return preprocess.channels, height, width
