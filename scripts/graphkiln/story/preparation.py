"""Prepare a story: its images, and the saved graphs of its variants, from one export of the model."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from graphkiln.story.digits import CLASSES, split_digits
from graphkiln.story.training_step import TrainingStep
from graphkiln.story.variants import (
    TRAINING_GRAPH,
    GraphSpec,
    Platform,
    StoryRequest,
    convert_options,
    version_folder,
)
from graphkiln.story.workloads import Worker, open_source_model, source_preprocess
from graphkiln_backend.graph.errors import GraphkilnError, InvalidInput, MeasurementError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import open_image
from graphkiln_backend.images.formats import image_files
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.edge_passes import Rename
from graphkiln_backend.passes.graph_file import save
from graphkiln_backend.passes.pipeline import OPTIMIZATIONS, without
from graphkiln_backend.repository.version import CONFIG_FILE, GRAPH_FILE
from graphkiln_backend.system.closing import Closeable
from graphkiln_converters.convert import ExportedSource, convert, export_source, rewrite_or_leave_out
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.sources.base import synthetic_samples

EVALUATION_COUNT = 200  # images on which every variant is proven
_CALIBRATION_COUNT = 64
_CONVERSION_COUNT = 16  # of a version's own proof; the story proves each variant again, on all evaluation images
_SUFFIXES = frozenset({".jpg", ".jpeg"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSet:
    """Images of a story.

    Attributes:
        evaluation: JPEGs for proof and measurement.
        targets: Classes of the evaluation images, int64 `[evaluation]`, or None.
        calibration: Other JPEGs, for int8 calibration.
    """

    description: str
    evaluation: tuple[bytes, ...]
    targets: npt.NDArray[np.int64] | None
    calibration: tuple[bytes, ...]
    labels: tuple[str, ...] = ()

    def write(self, samples: Path, calibration: Path, labels: Path) -> None:
        """Write the files for `graphkiln convert`: samples in a folder per class, and one label per line."""
        labels.parent.mkdir(parents=True, exist_ok=True)
        if self.labels:
            labels.write_text("\n".join(self.labels) + "\n", encoding="utf-8")
        for number, jpeg in enumerate(self.evaluation[:_CONVERSION_COUNT]):
            name = self.labels[self.targets[number]] if self.targets is not None else "unknown"
            (samples / name).mkdir(parents=True, exist_ok=True)
            (samples / name / f"{number:03}.jpg").write_bytes(jpeg)
        calibration.mkdir(exist_ok=True)
        for number, jpeg in enumerate(self.calibration):
            (calibration / f"{number:03}.jpg").write_bytes(jpeg)


def choose_images(folder: Path | None, classes: int) -> ImageSet:
    """Choose evaluation and calibration images from a folder, or from scikit-learn's digits without one.

    Args:
        folder: Folder of JPEGs, or None.
        classes: Number of the model's classes; the digits' targets are used for ten.

    Raises:
        InvalidInput: The folder has too few JPEGs, or one that cannot be decoded.
    """
    if folder is None:
        training, held_out = split_digits()
        evaluation = held_out.first(EVALUATION_COUNT)
        return ImageSet(
            description=f"{EVALUATION_COUNT} held-out digits",
            evaluation=evaluation.jpegs,
            targets=evaluation.targets if classes == len(CLASSES) else None,
            labels=CLASSES if classes == len(CLASSES) else (),
            calibration=training.first(_CALIBRATION_COUNT).jpegs,
        )
    files = image_files(folder, _SUFFIXES) if folder.is_dir() else []
    if len(files) < 4:
        raise InvalidInput(f"--samples {folder} has {len(files)} JPEGs, at least 4 are needed")
    evens, odds = files[::2][:EVALUATION_COUNT], files[1::2][:_CALIBRATION_COUNT]
    return ImageSet(
        description=f"{len(evens)} images of {folder}",
        evaluation=tuple(map(_read_image, evens)),
        targets=None,
        calibration=tuple(map(_read_image, odds)),
    )


def _read_image(path: Path) -> bytes:
    open_image(path)  # raises an error for a damaged image
    return path.read_bytes()


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Facts about the source model of a story.

    Attributes:
        classes: Number of its classes.
        derivative: `OUTPUT:INPUT` of the gradient.
    """

    preprocess: Preprocess
    classes: int
    derivative: str


@dataclass(kw_only=True, slots=True)
class PreparedModel(Closeable):
    """A model of a story, from which saved graphs are converted."""

    request: StoryRequest
    platform: Platform
    facts: ModelFacts
    _exported: ExportedSource | None = None
    _resources: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Close the source of the conversions."""
        self._exported = None
        self._resources.close()

    def describe(self) -> ModelFacts:
        """Return the facts about the model."""
        return self.facts

    def saved_graph(self, spec: GraphSpec) -> Path:
        """Convert a proven version to its own model store, configured with two instances, or the training graph.

        Raises:
            ConversionError: The model cannot be converted.
            VerificationError: The outputs changed.
            MeasurementError: The fusion of the variant changes nothing in this model.
        """
        if spec.name == TRAINING_GRAPH.name:
            return self._training_graph()
        version = version_folder(self.request.folder, spec)
        if not version.exists():
            options = convert_options(spec, self.request, self.platform, self.facts.derivative)
            recipe = Recipe(source=self.request.source, name=spec.name, model_store=version.parents[1], **options)
            if self._exported is None:
                self._exported = self._resources.enter_context(export_source(recipe))
            if spec.fusion:
                preprocess = self.facts.preprocess
                reports = rewrite_or_leave_out(self._exported.graph, recipe, preprocess, {}).rewritten.reports
                if all(each.nodes_before == each.nodes_after for each in reports if each.name == spec.fusion):
                    raise MeasurementError(f"the pass {spec.fusion} changes nothing in this model")
            convert(recipe, command=shlex.join(["graphkiln", "story"]), exported=self._exported)
            with (version.parent / CONFIG_FILE).open("a") as config:
                config.write(f"\n{self.platform.instance_group}\n")
        return version / GRAPH_FILE

    def _training_graph(self) -> Path:
        """Export a graph of forward and backward pass, with a `NAME_gradient` output for each parameter."""
        path = self.request.folder / TRAINING_GRAPH.name / GRAPH_FILE
        if not path.exists():
            with closing(open_source_model(self.request)) as model:
                graph, _ = TrainingStep(model=model).export()
                names = str(graph.graph.inputs[0].name), str(graph.graph.outputs[0].name)
                rename = Rename({names[0]: "INPUT_0"}, {names[1]: "OUTPUT_0"})
                run_passes(graph, (*without(OPTIMIZATIONS, ("share-weights",)), rename))
            path.parent.mkdir(exist_ok=True)
            save(graph, path)
        return path


def prepare_model(request: StoryRequest, platform: Platform) -> PreparedModel:
    """Open the source model and check that it is a classifier.

    Raises:
        ConversionError: The model cannot be opened.
        MeasurementError: The model is not a classifier.
    """
    with closing(open_source_model(request)) as model:
        outputs = model.run(synthetic_samples(model.inputs, 1, {}, seed=0))
        output, scores = next(iter(outputs.items()))
        if scores.ndim != 2:
            raise MeasurementError(
                f"the output of {request.source} has shape {list(scores.shape)}",
                hint="a story needs a classifier with an output [batch, classes]",
            )
        facts = ModelFacts(
            preprocess=source_preprocess(model, request),
            classes=scores.shape[1],
            derivative=f"{output}:{model.inputs[0].name}",
        )
    return PreparedModel(request=request, platform=platform, facts=facts)


class Conversions(Closeable):
    """Saved graphs of a story, converted in order by a process of its own while others are proven.

    Another process exports the training graph, which takes about as long as all the others.

    Attributes:
        model: Facts about the source model.

    Raises:
        GraphkilnError: The model cannot be opened, or is not a classifier.
    """

    def __init__(self, request: StoryRequest, platform: Platform) -> None:
        self._prepare = partial(prepare_model, request, platform)
        self._workers: dict[str, Worker] = {}
        self._pending: dict[str, Worker] = {}
        self._found: dict[str, Path | GraphkilnError] = {}
        try:
            self.model: ModelFacts = self._worker("conversions").call("describe")
        except BaseException:
            self.close()
            raise

    def order(self, specs: Iterable[GraphSpec]) -> None:
        """Request graphs, unless that was done before."""
        for spec in specs:
            if spec.name not in (*self._pending, *self._found):
                worker = self._worker("training graph" if spec.name == TRAINING_GRAPH.name else "conversions")
                worker.send("saved_graph", spec)
                self._pending[spec.name] = worker

    def graph(self, spec: GraphSpec) -> Path:
        """Return a graph, when it is converted.

        Raises:
            GraphkilnError: As `PreparedModel.saved_graph`.
        """
        self.order([spec])
        while spec.name not in self._found:
            self._receive(self._pending[spec.name])
        found = self._found[spec.name]
        if isinstance(found, GraphkilnError):
            raise found
        return found

    def wait(self) -> None:
        """Wait until all requested graphs are converted."""
        while self._pending:
            self._receive(next(iter(self._pending.values())))

    def close(self) -> None:
        """End the processes, also during a conversion."""
        for worker in self._workers.values():
            worker.close()

    def _worker(self, title: str) -> Worker:
        if title not in self._workers:
            self._workers[title] = Worker(self._prepare, title)
        return self._workers[title]

    def _receive(self, worker: Worker) -> None:
        """Receive the first graph that a process has not delivered yet."""
        name = next(name for name, each in self._pending.items() if each is worker)
        del self._pending[name]
        try:
            self._found[name] = worker.receive()
        except GraphkilnError as error:
            self._found[name] = error
