"""Converts the source model into the saved graphs that the variants need, each once."""

from __future__ import annotations

import shlex
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from graphkiln.story.request import Platform, StoryRequest
from graphkiln.story.training_step import TrainingStep
from graphkiln.story.variants import GraphSpec, convert_options
from graphkiln.story.workloads import open_source_model, source_preprocess
from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.graph.manifest import MANIFEST_FILE, Manifest
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.graph_file import save
from graphkiln_backend.passes.pipeline import OPTIMIZATIONS, without
from graphkiln_backend.passes.renaming import Rename
from graphkiln_backend.repository.version import CONFIG_FILE, GRAPH_FILE
from graphkiln_converters.convert import convert
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.sources.base import synthetic_samples


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedModel:
    """A model that the story can be run with, and its saved graphs.

    Attributes:
        request: The story's request.
        preprocess: Preprocessing of an image.
        classes: Number of the model's classes.
        derivative: `OUTPUT:INPUT` of the gradient.
    """

    request: StoryRequest
    preprocess: Preprocess
    classes: int
    derivative: str

    def training_graph(self) -> Path:
        """Forward and backward by the parameters: `INPUT_0` to `OUTPUT_0` and `NAME_gradient` for each.

        Raises:
            ConversionError: The model has no such graph.
        """
        path = self.request.folder / "training" / GRAPH_FILE
        if not path.exists():
            with closing(open_source_model(self.request)) as model:
                graph, _ = TrainingStep(model=model).export()
                names = str(graph.graph.inputs[0].name), str(graph.graph.outputs[0].name)
                rename = Rename({names[0]: "INPUT_0"}, {names[1]: "OUTPUT_0"})
                run_passes(graph, (*without(OPTIMIZATIONS, ("share-weights",)), rename))
            path.parent.mkdir(exist_ok=True)
            save(graph, path)
        return path

    def saved_graph(self, spec: GraphSpec, platform: Platform) -> Path:
        """A proven version in a separate model store, with two instances in its configuration.

        Raises:
            ConversionError: It cannot be converted.
            VerificationError: Its outputs changed.
            MeasurementError: It would be the same graph as the base.
        """
        store = self.request.folder / "models" / spec.name
        folder = store / spec.name
        if not (folder / "1").exists():
            options = convert_options(spec, self.request, platform, self.derivative)
            recipe = Recipe(source=self.request.source, name=spec.name, model_store=store, **options)
            convert(recipe, command=shlex.join(["graphkiln", "story"]))
            with (folder / CONFIG_FILE).open("a") as config:
                config.write(f"\n{platform.instance_group}\n")
        if spec.fusion:
            _check_fused(folder / "1", spec.fusion)
        return folder / "1" / GRAPH_FILE


def prepare_model(request: StoryRequest) -> PreparedModel:
    """Open the source model once to check that the story can be run with it.

    Raises:
        ConversionError: It cannot be opened.
        MeasurementError: It is no classifier.
    """
    with closing(open_source_model(request)) as model:
        outputs = model.run(synthetic_samples(model.inputs, 1, {}, seed=0))
        output, scores = next(iter(outputs.items()))
        if scores.ndim != 2:
            raise MeasurementError(
                f"{request.source} answers {list(scores.shape)}",
                hint="a story needs a classifier: [batch, classes]",
            )
        return PreparedModel(
            request=request,
            preprocess=source_preprocess(model, request),
            classes=scores.shape[1],
            derivative=f"{output}:{model.inputs[0].name}",
        )


def _check_fused(version: Path, fusion: str) -> None:
    """Raise where a fusion changed nothing: its variant would be the base under another name."""
    conversion = Manifest.read(version / MANIFEST_FILE).conversion
    for record in conversion.passes if conversion else ():
        if record.name == fusion and record.nodes_before == record.nodes_after:
            raise MeasurementError(f"the pass {fusion} finds nothing to do in this model")
