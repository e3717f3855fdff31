"""Samples for the proof of a graph: what it is fed, and what its source returns for that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError, GraphkilnError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Task
from graphkiln_backend.passes.edge import Arrays, Edge
from graphkiln_backend.proof.comparison import OutputError, compare
from graphkiln_backend.proof.metrics import TaskTargets
from graphkiln_backend.proof.policy import EXPORT
from graphkiln_backend.proof.tasks import judge
from graphkiln_converters.opening import OpenModel
from graphkiln_converters.proving import ReferenceSamples
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.row_batches import run_in_batches
from graphkiln_converters.samples import (
    SEED,
    Sizes,
    read_reference,
    read_samples,
    read_targets_of,
    sizes_to_try,
    synthetic_images,
)
from graphkiln_converters.sources.base import GradientSource, InputSpec, PreciseSource, synthetic_samples

_SYNTHETIC_SAMPLES = 6
_MOST_READ = 256
_REFERENCE_BATCH = 4
_WHOLE_SAMPLES = 3
_MOST_WHOLE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """Makes samples for a graph.

    Attributes:
        model: The source.
        edge: How the graph's inputs and outputs differ from the source's.
        preprocess: How an image becomes the graph's input, or None.
    """

    model: OpenModel
    edge: Edge
    preprocess: Preprocess | None

    @property
    def inputs(self) -> dict[str, InputSpec]:
        """The source's inputs, by the graph's names."""
        return {self.edge.input_name(spec.name): spec for spec in self.model.inputs}

    @property
    def task(self) -> Task | None:
        """What users read from the outputs, by the graph's names."""
        return self.edge.to_graph_task(self.model.task)

    def samples(self, recipe: Recipe) -> list[ReferenceSamples]:
        """Samples at the usual sizes (the user's own where given), then synthetic ones at the smallest and largest.

        Raises:
            ConversionError: The user's samples cannot be read, or the source mixes the rows of a batch.
        """
        if self.model.whole:
            return self._whole_samples(recipe)
        usual, *ends = sizes_to_try(self.model.inputs)
        own = recipe.samples
        feeds = self._read(own) if own else self._usual_feeds(usual)
        targets = self._targets(own) if own else None
        further = [self._synthetic_feeds(sizes, SEED + number) for number, sizes in enumerate(ends, 1)]
        return [self._referenced(feeds, targets), *(self._referenced(synthetic) for synthetic in further)]

    def _whole_samples(self, recipe: Recipe) -> list[ReferenceSamples]:
        """As `samples`, each of whole tensors."""
        own = read_samples(recipe.samples, self.inputs, None, _MOST_WHOLE) if recipe.samples else {}
        feeds = [self._as_feeds(_one(own, i)) for i in range(_rows(own))]
        for number, sizes in enumerate(sizes_to_try(self.model.inputs)):
            count = 1 if number else 0 if own else _WHOLE_SAMPLES
            made = synthetic_samples(self.model.inputs, count, sizes, seed=SEED + number)
            feeds += [self.edge.to_graph_feeds(_one(made, i)) for i in range(count)]
        return [self._whole_reference(each) for each in feeds]

    def _whole_reference(self, feeds: Arrays) -> ReferenceSamples:
        edge = self.edge
        outputs = edge.to_graph_outputs(edge.keep(self.model.source.run(edge.to_source_feeds(feeds))))
        return ReferenceSamples(feeds=feeds, outputs=outputs, ranking=edge.ranking, task=self.task, whole=True)

    def beside_fp64(self, samples: Sequence[ReferenceSamples]) -> tuple[list[ReferenceSamples], float]:
        """The samples with what the source computes for them in fp64, and how far its own fp32 is from that.

        Returns:
            The samples, in the types that they had, and the largest relative L2 error of an output; no samples where
            the source cannot be computed in fp64.
        """
        source = self.model.source
        if not isinstance(source, PreciseSource) or self.model.whole or not samples:
            return [], 0.0
        try:
            precise = [self._in_fp64(source, sample) for sample in samples]
        except GraphkilnError:
            return [], 0.0
        pairs = zip(samples, precise, strict=True)
        errors = [error for sample, exact in pairs for error in _errors(exact, sample)]
        return precise, max(error.relative_l2 for error in errors)

    def _in_fp64(self, source: PreciseSource, sample: ReferenceSamples) -> ReferenceSamples:
        edge, feeds = self.edge, self.edge.to_source_feeds(sample.feeds)
        outputs = run_in_batches(lambda batch: edge.keep(source.run_in_fp64(batch)), feeds, _REFERENCE_BATCH)
        exact = edge.to_graph_outputs(outputs)
        return replace(
            sample, outputs={name: exact[name].astype(array.dtype) for name, array in sample.outputs.items()}
        )

    def calibration(self, recipe: Recipe) -> Arrays:
        """Feeds to calibrate an int8 graph on; others than those of the proof.

        Raises:
            ConversionError: There are none, they cannot be read, or they are those of the proof.
        """
        if recipe.calibration is None:
            raise ConversionError(
                "--precision int8 needs samples to calibrate on",
                hint="give real ones: --calibration DIR or NPZ, not those of --samples",
            )
        if recipe.samples and recipe.samples.resolve() == recipe.calibration.resolve():
            raise ConversionError(
                "--calibration and --samples are the same: a proof on calibrated samples proves nothing"
            )
        return self._read(recipe.calibration)

    def _read(self, path: Path) -> Arrays:
        return self._as_feeds(read_samples(path, self.inputs, self.preprocess, _MOST_READ))

    def _targets(self, path: Path) -> TaskTargets | None:
        return read_targets_of(self.model.task, path, self.model.labels, _MOST_READ, self.preprocess)

    def _as_feeds(self, feeds: Arrays) -> Arrays:
        """A user's samples as feeds of the graph: those by the source's names are what the source takes."""
        return feeds if feeds.keys() == self.inputs.keys() else self.edge.to_graph_feeds(feeds)

    def _usual_feeds(self, sizes: Sizes) -> Arrays:
        (first, *others) = self.model.inputs
        if self.preprocess is None or others or len(first.shape) != 3:
            return self._synthetic_feeds(sizes, SEED)
        channels, height, width = first.shape
        images = synthetic_images((height, width, channels), _SYNTHETIC_SAMPLES)
        return {self.edge.input_name(first.name): np.stack([self.preprocess.normalize(image) for image in images])}

    def _synthetic_feeds(self, sizes: Sizes, seed: int) -> Arrays:
        feeds = synthetic_samples(self.model.inputs, _SYNTHETIC_SAMPLES, sizes, seed=seed)
        return self.edge.to_graph_feeds(feeds)

    def _referenced(self, feeds: Arrays, targets: TaskTargets | None = None) -> ReferenceSamples:
        """Feeds of the graph, and what the source returns for them, as the graph should."""
        source, edge = self.model.source, self.edge
        source_feeds = edge.to_source_feeds(feeds)
        outputs = run_in_batches(lambda batch: edge.keep(source.run(batch)), source_feeds, _REFERENCE_BATCH)
        differentiated = source if isinstance(source, GradientSource) else None
        return ReferenceSamples(
            feeds=feeds,
            outputs=edge.to_graph_outputs(outputs),
            gradients=frozenset({edge.output_name(differentiated.gradient)} if differentiated else ()),
            gradient_noise=differentiated.gradient_noise(source_feeds) if differentiated else 0.0,
            ranking=edge.ranking,
            task=self.task,
            targets=targets,
        )


def _errors(exact: ReferenceSamples, sample: ReferenceSamples) -> tuple[OutputError, ...]:
    """How far samples are off, whatever the order of what was detected."""
    return compare(exact.outputs, judge(sample.task, exact.outputs, sample.outputs, EXPORT).outputs)


def _one(arrays: Arrays, number: int) -> dict[str, AnyArray]:
    """A whole sample; one of a scalar is an array, too."""
    return {name: np.asarray(array[number]) for name, array in arrays.items()}


def _rows(arrays: Arrays) -> int:
    return len(next(iter(arrays.values()), ()))


def recorded_samples(
    recipe: Recipe,
    inputs: Sequence[InputSpec],
    outputs: Sequence[str],
    *,
    whole: bool = False,
    task: Task | None = None,
) -> list[ReferenceSamples]:
    """Inputs and outputs of the source that were recorded where it ran, by the source's names; none without a file.

    Args:
        recipe: Names the file.
        inputs: The source's inputs.
        outputs: Names of the source's outputs.
        whole: Whether each sample is one of whole tensors.
        task: What users read from the outputs, by the source's names.

    Raises:
        ConversionError: The file cannot be read or does not fit, or the graph will take other inputs than the source.
    """
    if recipe.reference is None:
        return []
    if recipe.gradient or recipe.input != "source":
        raise ConversionError(
            "--reference holds inputs and outputs of the source as it is",
            hint="leave out --gradient and --input, or prove with --samples",
        )
    feeds, recorded = read_reference(recipe.reference, inputs, outputs)
    if not whole:
        return [ReferenceSamples(feeds=feeds, outputs=recorded, task=task)]
    return [
        ReferenceSamples(feeds=_one(feeds, i), outputs=_one(recorded, i), whole=True, task=task)
        for i in range(_rows(feeds))
    ]
