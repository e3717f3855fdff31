"""Makes the saved graphs that the ways need, with `graphkiln convert`'s own code; each is made once."""

from __future__ import annotations

import shlex
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from graphkiln.story.requests import Machine, Request
from graphkiln.story.training_step import TrainingStep
from graphkiln.story.ways import Model, convert_options
from graphkiln.story.work import open_model, published
from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.graph.manifest import MANIFEST_FILE, Manifest
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.edges import Rename
from graphkiln_backend.passes.graph_file import save
from graphkiln_backend.passes.pipeline import OPTIMIZATIONS, without
from graphkiln_backend.repository.version import CONFIG_FILE, GRAPH_FILE
from graphkiln_converters.convert import convert
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.sources.base import synthetic_samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The model, and where its graphs are.

    Attributes:
        request: What is asked for.
        preprocess: How an image becomes the input.
        classes: How many the model tells apart.
        derivative: `OUTPUT:INPUT`, what the gradient is of and by.
    """

    request: Request
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
            with closing(open_model(self.request)) as model:
                graph, _ = TrainingStep(model=model).export()
                names = str(graph.graph.inputs[0].name), str(graph.graph.outputs[0].name)
            run_passes(
                graph,
                (*without(OPTIMIZATIONS, ("share-weights",)), Rename({names[0]: "INPUT_0"}, {names[1]: "OUTPUT_0"})),
            )
            path.parent.mkdir(exist_ok=True)
            save(graph, path)
        return path

    def version(self, model: Model, machine: Machine) -> Path:
        """A saved graph in a model store of its own, with two instances in its configuration.

        Raises:
            ConversionError: It cannot be made.
            VerificationError: Its answers changed.
            MeasurementError: It would be the same graph as the base.
        """
        store = self.request.folder / "models" / model.name
        folder = store / model.name
        if not (folder / "1").exists():
            options = convert_options(model, self.request, machine, self.derivative)
            recipe = Recipe(source=self.request.source, name=model.name, model_store=store, **options)
            convert(recipe, command=shlex.join(["graphkiln", "story"]))
            with (folder / CONFIG_FILE).open("a") as config:
                config.write(f"\n{machine.instance_group}\n")
        if model.fusion:
            _check_changed(folder / "1", model.fusion)
        return folder / "1" / GRAPH_FILE


def prepare(request: Request) -> Prepared:
    """Opens the model once, to see that a story can be told of it.

    Raises:
        ConversionError: It cannot.
    """
    with closing(open_model(request)) as model:
        answers = model.run(synthetic_samples(model.inputs, 1, {}, seed=0))
        output, scores = next(iter(answers.items()))
        if scores.ndim != 2:
            raise MeasurementError(
                f"{request.source} answers {list(scores.shape)}",
                hint="a story is told of classifiers: [batch, classes]",
            )
        return Prepared(
            request=request,
            preprocess=published(model, request),
            classes=scores.shape[1],
            derivative=f"{output}:{model.inputs[0].name}",
        )


def _check_changed(version: Path, fusion: str) -> None:
    conversion = Manifest.read(version / MANIFEST_FILE).conversion
    for record in conversion.passes if conversion else ():
        if record.name == fusion and record.nodes_before == record.nodes_after:
            raise MeasurementError(f"the pass {fusion} finds nothing to do in this model")
