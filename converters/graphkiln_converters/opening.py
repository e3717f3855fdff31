"""Opens the source model of a recipe, with what the recipe adds to what the source knows of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from graphkiln_backend.graph.decoding import decode
from graphkiln_backend.graph.errors import ConversionError, ManifestError
from graphkiln_backend.graph.labels import read_labels
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Task
from graphkiln_backend.system.closing import Closeable
from graphkiln_converters.detection.options import DetectorOptions
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.sources.base import InputSpec, SourceModel, SourceOptions, WholeSource, open_source


@dataclass(frozen=True, kw_only=True)
class OpenModel(Closeable):
    """A source model that is ready to be exported.

    Attributes:
        source: The model.
        inputs: Its inputs, with all dimensions that vary.
        preprocess: How an image becomes its input, or None.
        labels: Class names; empty for none.
        task: What it answers about an image, by the source's names of outputs; None until the graph is known.
    """

    source: SourceModel
    inputs: tuple[InputSpec, ...]
    preprocess: Preprocess | None
    labels: tuple[str, ...]
    task: Task | None = None

    @property
    def whole(self) -> str:
        """Why its requests cannot be batched, or empty where they can."""
        return self.source.whole if isinstance(self.source, WholeSource) else ""

    def close(self) -> None:
        """Frees what the source holds."""
        self.source.close()


def open_model(recipe: Recipe) -> OpenModel:
    """Opens the recipe's source.

    Raises:
        ConversionError: The source cannot be opened, or the recipe says something of it that does not fit.
        EngineUnavailable: The source's library is not installed.
        ManifestError: The recipe's preprocess is not one.
    """
    source = _open_source(recipe)
    try:
        return OpenModel(
            source=source,
            inputs=with_dynamic_axes(source.inputs, recipe.dynamic_axes, whole=_is_whole(source)),
            preprocess=_preprocess(recipe, source),
            labels=_labels(recipe, source),
        )
    except BaseException:
        source.close()
        raise


def _open_source(recipe: Recipe) -> SourceModel:
    options = SourceOptions(
        weights=recipe.weights,
        pretrained=recipe.pretrained,
        features_only=recipe.features_only,
        out_indices=recipe.out_indices,
        shapes=recipe.shapes,
        allow_code=recipe.allow_code,
        free_batch=recipe.batch == "free",
        samples=recipe.samples,
        task=recipe.task,
        detection=DetectorOptions(
            head=recipe.head,
            boxes=recipe.boxes,
            iou_threshold=recipe.iou_threshold,
            max_detections=recipe.max_detections,
        ),
    )
    source = open_source(recipe.source, options)
    if recipe.batch == "fixed" and not isinstance(source, WholeSource):
        source.close()
        raise ConversionError(
            "--batch fixed is for what was saved with a fixed batch: FILE.onnx, FILE.pt2, torchscript:FILE",
            hint="leave it out",
        )
    if not recipe.gradient:
        return source
    from graphkiln_converters.gradient import add_gradient

    return add_gradient(source, recipe.gradient)


def with_dynamic_axes(
    inputs: Sequence[InputSpec], requested: Mapping[str, Mapping[int, tuple[int, int]]], *, whole: bool = False
) -> tuple[InputSpec, ...]:
    """Lets further dimensions of inputs vary.

    Args:
        inputs: The inputs as the source knows them.
        requested: Input -> axis with the batch as 0 -> smallest and largest size.
        whole: Whether there is no batch, and axis 0 is one as others are.

    Raises:
        ConversionError: There is no such input or axis, or a range is empty.
    """
    specs, batch_axes = {spec.name: spec for spec in inputs}, 0 if whole else 1
    for name, axes in requested.items():
        if name not in specs:
            raise ConversionError(f"--dynamic: there is no input '{name}'", hint=f"inputs: {', '.join(specs)}")
        sizes = specs[name].shape
        for axis, (least, most) in axes.items():
            if not batch_axes <= axis < len(sizes) + batch_axes or not 0 < least <= most:
                raise ConversionError(
                    f"--dynamic: {name}:{axis}={least}..{most} does not fit {name} [batch, "
                    f"{', '.join(map(str, sizes))}]",
                    hint="axis 0 is the batch and varies always",
                )
        of_sample = {axis - batch_axes: ends for axis, ends in axes.items()}
        specs[name] = replace(specs[name], dynamic={**specs[name].dynamic, **of_sample})
    return tuple(specs.values())


def _is_whole(source: SourceModel) -> bool:
    return isinstance(source, WholeSource) and bool(source.whole)


def _preprocess(recipe: Recipe, source: SourceModel) -> Preprocess | None:
    if recipe.preprocess is None:
        return source.preprocess
    return decode(Preprocess, recipe.preprocess, path="preprocess")


def _labels(recipe: Recipe, source: SourceModel) -> tuple[str, ...]:
    if recipe.labels is None:
        return () if recipe.features_only else source.labels
    try:
        labels = read_labels(recipe.labels)
    except ManifestError as error:
        raise ConversionError(error.message) from error
    while labels and not labels[-1].strip():
        labels = labels[:-1]
    return labels
