"""What a new version tells the server and its clients about its graph."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import onnx_ir

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.manifest import Conversion, PassRecord
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.ranking import Ranking
from graphkiln_backend.graph.task import Detection, is_classification
from graphkiln_backend.passes.base import PassReport
from graphkiln_backend.passes.edge import Edge
from graphkiln_converters.opening import OpenModel
from graphkiln_converters.proving import ProvenGraph
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.remote_source import remote_part
from graphkiln_converters.sources.base import RANDOM_WEIGHTS, NotedSource, SourceModel
from graphkiln_converters.writer import NewVersion, SourceInfo

_log = logging.getLogger("graphkiln.converters")


@runtime_checkable
class ClassesSource(Protocol):
    """A source model that knows how many classes it tells apart, where no output counts them."""

    @property
    def classes(self) -> int:
        """How many; 0 where that is not known after all."""
        ...


def remaining_preprocess(model: OpenModel, edge: Edge) -> Preprocess | None:
    """How an image becomes the input of a rewritten graph: what is left for the client."""
    return edge.to_graph_preprocess(model.preprocess) if model.preprocess else None


def check_edges(recipe: Recipe, preprocess: Preprocess | None) -> None:
    """Refuses inputs that no client can make.

    Raises:
        ConversionError: The graph would take bf16 images.
    """
    lowers = recipe.lower_edges and recipe.precision is Precision.BF16
    if lowers and preprocess is not None and preprocess.dtype is not DType.UINT8:
        raise ConversionError("--lower-edges: clients make no bf16 images", hint="use --input uint8-nhwc or fp16")


def with_fitting_labels(model: OpenModel, recipe: Recipe, graph: onnx_ir.Model) -> OpenModel:
    """The model with labels that are one for each class of the output that they name; with none where they do not fit.

    Args:
        model: The source.
        recipe: Whose labels must fit; those that the source brings along may be of another task.
        graph: As exported: the classes of a graph that ranks them itself are counted before it does.

    Raises:
        ConversionError: The recipe's labels do not fit.
    """
    if isinstance(model.task, Detection):
        _check_detected_classes(model, recipe)
        return model
    outputs = {str(value.name): value for value in graph.graph.outputs}
    output = outputs.get(recipe.outputs[0]) if recipe.outputs else next(iter(outputs.values()), None)
    dims = () if output is None or output.shape is None else tuple(output.shape)
    classes = dims[-1] if len(dims) == 2 else None
    if not model.labels or not isinstance(classes, int) or len(model.labels) == classes:
        return model
    problem = f"{len(model.labels)} labels for the {classes} classes of {recipe.source}"
    if recipe.labels:
        raise ConversionError(f"{recipe.labels} has {problem}", hint="one line for each class, in their order")
    _log.warning("%s: left out; --labels FILE gives others", problem)
    return replace(model, labels=())


def warn_without_preprocess(model: OpenModel) -> None:
    """Says of a model for a task that nothing says how an image becomes its input: no client could ask it about one."""
    if not is_classification(model.task) and model.preprocess is None:
        _log.warning(
            "nothing says how an image becomes the input: clients that send images are refused; say it with "
            "--preprocess, for example '{\"resize\": [640, 640]}' (docs/tasks.md)"
        )


def _check_detected_classes(model: OpenModel, recipe: Recipe) -> None:
    """Of detections, classes are numbers, which no output counts; some sources do.

    Raises:
        ConversionError: The recipe's labels do not fit.
    """
    classes = model.source.classes if isinstance(model.source, ClassesSource) else 0
    if recipe.labels and classes and len(model.labels) != classes:
        raise ConversionError(
            f"{recipe.labels} has {len(model.labels)} labels for the {classes} classes of {recipe.source}",
            hint="one line for each class, in their order; torchvision's first one is the background",
        )


def new_version(recipe: Recipe, model: OpenModel, proven: ProvenGraph, *, command: str, seconds: float) -> NewVersion:
    """A proven graph with all that its manifest and its configuration say.

    Args:
        recipe: How it was made.
        model: What it was made from.
        proven: The graph.
        command: The command line.
        seconds: How long the conversion took.
    """
    proof, edge = proven.proof, proven.rewritten.edge
    info = SourceInfo(
        description=recipe.source if remote_part(recipe.source)[1] else model.source.description,
        command=command,
        libraries=(*model.source.libraries, "onnx", "onnxruntime"),
        metrics={},
        preprocess=remaining_preprocess(model, edge),
        labels=() if recipe.top_k else model.labels,
        ranking=_ranking(edge, model.labels),
        task=edge.to_graph_task(model.task),
    )
    conversion = Conversion(
        recipe=recipe.frozen(),
        precision=proven.precision,
        passes=tuple(map(_pass_record, proven.rewritten.reports)),
        output_errors=proof.errors,
        graph_bytes=_file_bytes(proven.graph.parent),
        seconds=round(seconds, 2),
        notes=(*notes_of(model.source), *proven.notes),
    )
    return NewVersion(
        graph=proven.graph,
        source=info,
        signature=proof.signature,
        verification=proven.verification,
        golden=proof.golden,
        conversion=conversion,
        max_batch_size=0 if proof.golden.whole else recipe.max_batch_size,
        accepts_images=recipe.input == "encoded",
    )


def notes_of(source: SourceModel) -> tuple[str, ...]:
    """What the owner of the model should know of its source."""
    if isinstance(source, NotedSource):
        return source.notes
    if RANDOM_WEIGHTS not in source.description:
        return ()
    note = "the weights are random: the graph computes what its source does, which means nothing"
    return (f"{note} (--weights FILE or --pretrained)",)


def _pass_record(report: PassReport) -> PassRecord:
    return PassRecord(
        name=report.name, nodes_before=report.nodes_before, nodes_after=report.nodes_after, note=report.note
    )


def _file_bytes(folder: Path) -> int:
    """Size of a graph and its weights: they are the only files of their folder."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _ranking(edge: Edge, labels: tuple[str, ...]) -> Ranking | None:
    return replace(edge.ranking, labels=labels) if edge.ranking else None
