"""Samples for the proof: the user's or synthetic ones, with the source's outputs."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir
from PIL import Image

from graphkiln_backend.graph.arrays import as_text, read_npz
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ConversionError, GraphkilnError, InvalidInput, ManifestError
from graphkiln_backend.graph.files import MIB, read_bytes
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Detection, Embedding, Segmentation, Task
from graphkiln_backend.images.decoding import load_sample, open_image
from graphkiln_backend.images.formats import image_files, list_images
from graphkiln_backend.images.frame import Frame, frame_of
from graphkiln_backend.passes.edge import Arrays, Edge
from graphkiln_backend.proof.comparison import compare
from graphkiln_backend.proof.policy import EXPORT
from graphkiln_backend.proof.tasks import UNKNOWN, Objects, TaskTargets, is_judged, judge
from graphkiln_backend.repository.records import Record, is_record
from graphkiln_converters.prove import ReferenceSamples
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.sources.base import InputSpec, SourceModel, run_in_batches, synthetic_samples, with_progress

SEED = 20260101
_log = logging.getLogger("graphkiln.converters")
# True classes, `[samples]`.
Targets = npt.NDArray[np.int64]
# Input -> axis of the sample -> size, for dynamic axes.
Sizes = Mapping[str, Mapping[int, int]]
# Digest of a batch of the source's inputs -> its outputs.
Answers = dict[bytes, Arrays]
SYNTHETIC_SAMPLES = 6
MOST_READ = 256
_WHOLE_SAMPLES = 3
_MOST_WHOLE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampler:
    """Make samples for a graph.

    Attributes:
        model: The source.
        edge: Differences of the graph's inputs and outputs from the source's.
        preprocess: Preprocessing for the graph's input, or None.
        answers: Remembered outputs of the source, for other graphs of the same source; None to remember none.
    """

    model: SourceModel
    edge: Edge
    preprocess: Preprocess | None
    answers: Answers | None = None

    @property
    def inputs(self) -> dict[str, InputSpec]:
        """Inputs of the source, by the graph's names."""
        return {self.edge.input_name(spec.name): spec for spec in self.model.inputs}

    def samples(self, recipe: Recipe) -> list[ReferenceSamples]:
        """Samples at the default sizes (the user's, if given), then synthetic ones at the smallest and largest sizes.

        Raises:
            ConversionError: The user's samples cannot be read, or the source mixes the rows of a batch.
        """
        if self.model.whole:
            return self._whole_samples(recipe)
        found = []
        if recipe.samples:
            found.append(self._referenced(self._read(recipe.samples), self._targets(recipe.samples)))
        if not recipe.samples or self.model.inputs[0].known is not None:
            found.append(self._referenced(self._usual_feeds()))
        _, *ends = sizes_to_try(self.model.inputs)  # the default sizes come first
        return [*found, *(self._referenced(self._synthetic(sizes, SEED + i)) for i, sizes in enumerate(ends, 1))]

    def _whole_samples(self, recipe: Recipe) -> list[ReferenceSamples]:
        """Like `samples`, with whole tensors."""
        own = read_samples(recipe.samples, self.inputs, None, _MOST_WHOLE) if recipe.samples else {}
        feeds = [self._as_feeds(sample) for sample in each_sample(own)]
        for number, sizes in enumerate(sizes_to_try(self.model.inputs)):
            count = 1 if number else 0 if own else _WHOLE_SAMPLES
            made = synthetic_samples(self.model.inputs, count, sizes, seed=SEED + number)
            whole = each_sample(made) or [{} for _ in range(count)]  # a graph without inputs has empty samples
            feeds += [self.edge.to_graph_feeds(sample) for sample in whole]
        return [self._referenced(each) for each in with_progress(feeds, "samples")]

    def calibration(self, recipe: Recipe) -> Arrays:
        """Calibration samples of an int8 graph; empty without any.

        Raises:
            ConversionError: They cannot be read.
        """
        return self._read(recipe.calibration) if recipe.calibration else {}

    def beside_fp64(self, samples: Sequence[ReferenceSamples]) -> tuple[list[ReferenceSamples], float] | None:
        """Recompute the outputs with the source in fp64, and compare its fp32 with them.

        Returns:
            The samples in their original types, and the largest relative L2 error of an output in fp32; None if the
            source cannot run in fp64.
        """
        if self.model.whole:
            return None
        precise = []
        try:
            for group in samples:
                exact = self._outputs(self.model.run_in_fp64, group.feeds)
                outputs = {name: exact[name].astype(array.dtype) for name, array in group.outputs.items()}
                precise.append(replace(group, outputs=outputs))
        except GraphkilnError:
            return None
        errors = [
            error.relative_l2
            for group, in_fp64 in zip(samples, precise, strict=True)
            # Independent of the order of detections.
            for error in compare(in_fp64.outputs, judge(group.task, in_fp64.outputs, group.outputs, EXPORT).outputs)
        ]
        return precise, max(errors)

    def _read(self, path: Path) -> Arrays:
        return self._as_feeds(read_samples(path, self.inputs, self.preprocess, MOST_READ))

    def _as_feeds(self, feeds: Arrays) -> Arrays:
        """Convert a user's samples to inputs of the graph; samples with the source's names are inputs of the source.

        Where the graph keeps these names, samples with the types and sizes of the source's inputs are its inputs.
        """
        if feeds.keys() == self.inputs.keys() and (
            self.edge.inputs or not all(_fits_source(feeds[spec.name], spec) for spec in self.model.inputs)
        ):
            return feeds
        return self.edge.to_graph_feeds(feeds)

    def _targets(self, path: Path) -> TaskTargets | None:
        """Ground truth of a folder of images for the task, or None."""
        task, labels = self.model.task, self.model.labels
        if not is_judged(task):
            return read_targets(path, labels, MOST_READ)
        if self.preprocess is None or not path.is_dir():
            return None
        return read_task_targets(path, _chosen(path, MOST_READ), task, labels, self.preprocess)

    def _usual_feeds(self) -> Arrays:
        (first, *others) = self.model.inputs
        takes_known = first.known is not None and self.preprocess and self.preprocess.dtype is not DType.UINT8
        if self.preprocess is None or others or len(first.shape) != 3 or takes_known:
            return self._synthetic({}, SEED)
        channels, height, width = first.shape
        images = synthetic_images((height, width, channels), SYNTHETIC_SAMPLES)
        return {self.edge.input_name(first.name): np.stack([self.preprocess.normalize(image) for image in images])}

    def _synthetic(self, sizes: Sizes, seed: int) -> Arrays:
        count = max([SYNTHETIC_SAMPLES, *(len(spec.known) for spec in self.model.inputs if spec.known is not None)])
        return self.edge.to_graph_feeds(synthetic_samples(self.model.inputs, count, sizes, seed=seed))

    def _referenced(self, feeds: Arrays, targets: TaskTargets | None = None) -> ReferenceSamples:
        """Inputs of the graph with the expected outputs, computed by the source."""
        model, edge = self.model, self.edge
        return ReferenceSamples(
            feeds=feeds,
            outputs=self._outputs(self._run, feeds),
            gradients=frozenset({edge.output_name(model.gradient)} if model.gradient else ()),
            gradient_noise=model.gradient_noise(edge.to_source_feeds(feeds)),
            ranking=edge.ranking,
            task=edge.to_graph_task(model.task),
            targets=targets,
            whole=bool(model.whole),
        )

    def _run(self, feeds: Arrays) -> Arrays:
        if self.answers is None:
            return self.model.run(feeds)
        digest = hashlib.sha256()
        for name, array in feeds.items():
            digest.update(f"{name} {array.dtype} {array.shape} ".encode())
            digest.update(array.tobytes())
        key = digest.digest()
        if key not in self.answers:
            self.answers[key] = self.model.run(feeds)
        return self.answers[key]

    def _outputs(self, run: Callable[[Arrays], Arrays], feeds: Arrays) -> dict[str, AnyArray]:
        """Expected outputs of the graph, computed by the source."""
        given = self.edge.to_source_feeds(feeds)
        if self.model.whole:
            return self.edge.to_graph_outputs(self.edge.keep(run(given)))
        found = run_in_batches(lambda batch: self.edge.keep(run(batch)), given, self.model.reference_batch)
        return self.edge.to_graph_outputs(found)


def _fits_source(samples: AnyArray, spec: InputSpec) -> bool:
    sizes = samples.shape[-len(spec.shape) :] if spec.shape else ()
    fits = all(axis in spec.dynamic or size == sizes[axis] for axis, size in enumerate(spec.shape))
    return samples.dtype == spec.dtype.numpy and fits


def each_sample(arrays: Arrays) -> list[dict[str, AnyArray]]:
    """Yield whole samples one by one; scalars become arrays."""
    count = len(next(iter(arrays.values()), ()))
    return [{name: np.asarray(array[i]) for name, array in arrays.items()} for i in range(count)]


def recorded_samples(recipe: Recipe, model: SourceModel, values: Sequence[onnx_ir.Value]) -> list[ReferenceSamples]:
    """Recorded inputs and outputs of the source, by its names; empty without a file.

    Args:
        recipe: Names the file.
        model: The source.
        values: Outputs of its graph.

    Raises:
        ConversionError: The file cannot be read or does not match, or the graph has other inputs than the source.
    """
    if recipe.reference is None:
        return []
    if recipe.gradient or recipe.input != "source":
        raise ConversionError(
            "--reference has inputs and outputs of the unchanged source",
            hint="leave out --gradient and --input, or prove with --samples",
        )
    feeds, recorded = read_reference(recipe.reference, model.inputs, [str(value.name) for value in values])
    recorded = {str(value.name): _as_answered(recorded[str(value.name)], value) for value in values}
    if not model.whole:
        return [ReferenceSamples(feeds=feeds, outputs=recorded, task=model.task)]
    pairs = zip(each_sample(feeds), each_sample(recorded), strict=True)
    return [ReferenceSamples(feeds=one, outputs=outputs, whole=True, task=model.task) for one, outputs in pairs]


def _as_answered(array: AnyArray, value: onnx_ir.Value) -> AnyArray:
    """Round a library's results to the graph's kind of number, and add its dimensions of one at the end.

    Libraries of trees and tables answer in float64 `[rows]` what their graphs answer in fp32 `[rows, 1]`.
    """
    wanted = None if value.dtype is None else value.dtype.numpy()
    if wanted is not None and array.dtype.kind == np.dtype(wanted).kind and array.dtype.kind in "fiu":
        array = array.astype(wanted)
    missing = 0 if value.shape is None else len(value.shape) - array.ndim
    return array.reshape(*array.shape, *[1] * missing) if missing > 0 else array


# Operators that pass indices on to where they are used.
_KEEPS_INDICES = frozenset(
    ("Cast", "Identity", "Unsqueeze", "Squeeze", "Reshape", "Flatten", "Transpose", "Expand", "Slice", "Concat")
)


def with_index_ranges(model: SourceModel, graph: onnx_ir.Model) -> SourceModel:
    """Let synthetic integers that index tables, such as ids of tokens, reach all rows of the smallest table."""
    rows: dict[str, int] = {}
    for source in graph.graph.inputs:
        waiting: list[onnx_ir.Value] = [source]
        while waiting:
            for node, position in waiting.pop().uses():
                if node.op_type == "Gather" and position == 1:
                    shape, axis = node.inputs[0].shape, node.attributes.get_int("axis", 0)  # type: ignore[union-attr]
                    if shape is not None and isinstance(size := shape[axis], int):
                        rows[str(source.name)] = min(size, rows.get(str(source.name), size))
                elif node.op_type in _KEEPS_INDICES:
                    waiting += node.outputs
    usual = InputSpec(name="", shape=()).high
    return replace(
        model,
        inputs=tuple(
            replace(spec, high=max(rows[spec.name], 1)) if spec.high == usual and spec.name in rows else spec
            for spec in model.inputs
        ),
    )


def sizes_to_try(inputs: Sequence[InputSpec]) -> Iterator[Sizes]:
    """Default, smallest and largest sizes of the dynamic axes; one empty dict without dynamic axes."""
    yield {}
    if any(spec.dynamic for spec in inputs):
        for end in (0, 1):
            yield {spec.name: {axis: ends[end] for axis, ends in spec.dynamic.items()} for spec in inputs}


def synthetic_images(shape_hwc: tuple[int, int, int], count: int) -> AnyArray:
    """Seeded uint8 images `[count, height, width, channels]`: smooth blobs with noise, of different contrast."""
    generator = np.random.default_rng(SEED)
    height, width, channels = shape_hwc
    coarse = generator.random((count, 5, 5, channels))
    rows, columns = np.linspace(0, 4, height), np.linspace(0, 4, width)
    top, left = np.minimum(rows.astype(int), 3), np.minimum(columns.astype(int), 3)
    down, right = (rows - top)[:, None, None], (columns - left)[None, :, None]
    corners = [coarse[:, top + i][:, :, left + j] for i in (0, 1) for j in (0, 1)]
    weights = [(1 - down) * (1 - right), (1 - down) * right, down * (1 - right), down * right]
    smooth = sum(corner * weight for corner, weight in zip(corners, weights, strict=True))
    contrast = generator.uniform(0.3, 1.0, (count, 1, 1, 1))
    noisy = 0.5 + contrast * (smooth - 0.5) + generator.normal(0, 0.05, smooth.shape)
    pixels: AnyArray = (noisy * 255).clip(0, 255).astype(np.uint8)
    return pixels


# Samples of users, from files.


def read_samples(
    path: Path, inputs: Mapping[str, InputSpec], preprocess: Preprocess | None, most: int, *, keep_types: bool = False
) -> dict[str, AnyArray]:
    """Read a user's samples: an .npz of arrays by input name, a folder of images, or a record of requests.

    Args:
        path: The file or folder.
        inputs: Expected inputs, by the names of the saved graph.
        preprocess: Preprocessing of an image, for a single input.
        most: Maximum number of samples; evenly spread ones are selected.
        keep_types: Keep the precision of the file instead of that of the inputs.

    Returns:
        `[samples, ...]` arrays by the names of the saved graph, or of the source if the file has those.

    Raises:
        ConversionError: The file cannot be read, or has no matching samples.
    """
    if is_record(path):
        arrays = _recorded_arrays(path, inputs, most)
    elif path.is_dir():
        return _images(path, inputs, preprocess, most)
    else:
        arrays = _read_arrays(path, "samples")
    names = _names_in(arrays, path, inputs)
    if names == _by_position(inputs):
        arrays, names = dict(zip(inputs, (arrays[name] for name in names), strict=True)), list(inputs)
    specs = dict(zip(names, inputs.values(), strict=True))
    for name, spec in specs.items():
        if arrays[name].ndim == len(spec.shape):  # a single sample may lack the axis of samples
            arrays[name] = arrays[name][None]
        if not arrays[name].ndim:
            raise ConversionError(f"{path}: '{name}' is a scalar, expected [samples, ...]")
    count = min(len(arrays[name]) for name in specs)
    if not count:
        raise ConversionError(f"{path} has no sample")
    samples = {name: np.ascontiguousarray(arrays[name][spread(count, most)]) for name in specs}
    for name, spec in specs.items():  # numpy has no bf16, and recordings are rarely fp16
        if spec.dtype.is_float and samples[name].dtype.kind == "f" and not keep_types:
            samples[name] = samples[name].astype(spec.dtype.numpy)
    return samples


def _recorded_arrays(path: Path, inputs: Mapping[str, InputSpec], most: int) -> dict[str, AnyArray]:
    """Inputs of evenly spread recorded requests that have the most frequent shapes, `[samples, ...]`."""
    ranks = {name: len(spec.shape) for known, spec in inputs.items() for name in (known, spec.name)}
    try:
        record = Record.find(path)
        wanted = spread(record.count(), most)
        each = -(-most // len(wanted))  # rows of a request that has an axis of samples
        groups: dict[tuple[object, ...], list[dict[str, AnyArray]]] = {}
        for request in record.requests(wanted):
            if request.inputs is not None:
                rows = {
                    name: array[:each] if array.ndim > ranks.get(name, array.ndim) else array[None]
                    for name, array in request.inputs.items()
                }
                kind = tuple((name, array.dtype, array.shape[1:]) for name, array in sorted(rows.items()))
                groups.setdefault(kind, []).append(rows)
    except InvalidInput as error:
        raise ConversionError(error.message, hint=error.hint) from error
    if not groups:
        raise ConversionError(
            f"{path} holds only digests of the inputs", hint="record with graphkiln serve --record-inputs full"
        )
    chosen = max(groups.values(), key=len)
    if left_out := sum(map(len, groups.values())) - len(chosen):
        _log.warning("%s: %d of %d requests have other shapes, and are left out", path, left_out, len(wanted))
    return {name: as_text(np.concatenate([rows[name] for rows in chosen])) for name in chosen[0]}


def _names_in(arrays: Arrays, path: Path, inputs: Mapping[str, InputSpec]) -> list[str]:
    """Names of the inputs in a file: those of the saved graph, or else of the source, or `INPUT_<i>`."""
    sources = [spec.name for spec in inputs.values()]
    for names in (list(inputs), sources, _by_position(inputs)):
        if names and all(name in arrays for name in names):
            return names
    lacking = min(([name for name in names if name not in arrays] for names in (list(inputs), sources)), key=len)
    other = f"; the source's names are also accepted: {', '.join(sources)}" if sources != list(inputs) else ""
    raise ConversionError(
        f"the samples of {path} lack input {', '.join(lacking)}",
        hint=f"it has {', '.join(arrays) or 'no arrays'}{other}",
    )


def _by_position(inputs: Collection[str], prefix: str = "INPUT") -> list[str]:
    """Names of arrays by the number of their tensor; none if a tensor has such a name, and perhaps another number."""
    numbered = [f"{prefix}_{number}" for number in range(len(inputs))]
    return [] if {*numbered} & {*inputs} else numbered


def read_reference(path: Path, inputs: Sequence[InputSpec], outputs: Sequence[str]) -> tuple[Arrays, Arrays]:
    """Read recorded inputs and outputs of the source: an .npz of arrays by name.

    Args:
        path: The file: every input and output by the source's name, or as `INPUT_<i>` and `OUTPUT_<i>`.
        inputs: Inputs of the source.
        outputs: Names of its outputs.

    Returns:
        Inputs and outputs by the source's names, `[samples, ...]` each.

    Raises:
        ConversionError: The file cannot be read, or an array is missing or does not match.
    """
    arrays = _read_arrays(path, "reference")
    feeds = _recorded(arrays, path, [spec.name for spec in inputs], "INPUT")
    recorded = _recorded(arrays, path, outputs, "OUTPUT")
    for spec in inputs:
        found = feeds[spec.name]
        if found.dtype != spec.dtype.numpy or found.ndim != len(spec.shape) + 1:
            raise ConversionError(
                f"{path}: input '{spec.name}' is {found.dtype} {list(found.shape)}, "
                f"expected {spec.dtype} [samples, {', '.join(map(str, spec.shape))}]"
            )
    counts = {name: len(array) if array.ndim else 0 for name, array in (*feeds.items(), *recorded.items())}
    if len(set(counts.values())) != 1 or 0 in counts.values():
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ConversionError(f"{path} must have the same number of samples in each array, at least one: {listed}")
    return feeds, recorded


def _recorded(arrays: Arrays, path: Path, names: Sequence[str], prefix: str) -> dict[str, AnyArray]:
    """The arrays of tensors, by name or else by number."""
    found = {}
    for name, numbered in zip(names, _by_position(names, prefix) or names, strict=True):
        if name not in arrays and numbered not in arrays:
            raise ConversionError(
                f"{path} lacks '{name}'", hint=f"it has {', '.join(arrays) or 'no arrays'}: save with numpy.savez"
            )
        found[name] = arrays[name if name in arrays else numbered]
    return found


def read_targets(path: Path, labels: Sequence[str], most: int) -> Targets | None:
    """Read the true classes of the images of `read_samples` from folder names.

    Returns:
        `[samples]`; None if the folders are not named after labels.
    """
    if not labels or not path.is_dir():
        return None
    names = [file.parent.name for file in _chosen(path, most)]
    unknown = sorted({*names} - {*labels})
    if unknown and {name.casefold() for name in names} & {label.casefold() for label in labels}:
        _log.warning(
            "%s: the accuracy is not measured, because the folder '%s' is not one of the labels", path, unknown[0]
        )
    if unknown or not names:
        return None
    return np.array([labels.index(name) for name in names], np.int64)


def _read_arrays(path: Path, kind: str) -> dict[str, AnyArray]:
    try:
        return {name: as_text(array) for name, array in read_npz(path).items()}
    except ManifestError as error:
        hint = error.hint or "an .npz of arrays by name"
        raise ConversionError(f"cannot read {kind} from {path}: {error.message}", hint=hint) from error
    except UnicodeDecodeError as error:
        raise ConversionError(f"cannot read {kind} from {path}: its text is not UTF-8: {error}") from error


def _images(
    folder: Path, inputs: Mapping[str, InputSpec], preprocess: Preprocess | None, most: int
) -> dict[str, AnyArray]:
    if preprocess is None or len(inputs) != 1:
        raise ConversionError(
            "images can be samples only of a model with one image input",
            hint="give an .npz with an array for every input",
        )
    try:
        known, left_out = list_images(folder)
    except InvalidInput as error:
        raise ConversionError(error.message, hint=error.hint) from error
    if left_out:
        _log.warning("%s", left_out)
    files = [known[index] for index in spread(len(known), most)]
    samples = [load_sample(file, preprocess) for file in files]
    for file, sample in zip(files, samples, strict=True):
        if sample.shape != samples[0].shape:
            raise ConversionError(
                f"{file} becomes {list(sample.shape)}, {files[0]} {list(samples[0].shape)}",
                hint="let --preprocess give all images one size: crop, letterbox, or resize to height and width",
            )
    return {next(iter(inputs)): np.stack(samples)}


def _chosen(folder: Path, most: int) -> list[Path]:
    """The images selected by `read_samples`."""
    files = image_files(folder)
    return [files[index] for index in spread(len(files), most)]


def spread(count: int, most: int) -> list[int]:
    """Positions of evenly spread samples, `most` at most."""
    return sorted({round(position) for position in np.linspace(0, count - 1, min(count, most))})


# Ground truth of a folder of images, in pixels of a model's input.
#
# Objects are in the folder's `annotations.json`, in COCO's format; the class of each pixel in an image of the same name
# in a folder beside it, `FOLDER.masks`; the class of an image is the name of its folder.
#
# Source: the COCO data format; the VOC devkit for 255, the pixels that do not count.

ANNOTATIONS = "annotations.json"
MASKS_SUFFIX = ".masks"
_MOST_BYTES = 512 * MIB
_IGNORED = 255
# Minimum images of a class, and minimum classes, for nearest neighbors.
_FEWEST = 2


def read_task_targets(
    folder: Path, files: Sequence[Path], task: Task | None, labels: Sequence[str], preprocess: Preprocess
) -> TaskTargets | None:
    """Read the ground truth of a task for images; None if the folder has none.

    Raises:
        ConversionError: The ground truth cannot be read, or does not match.
    """
    if isinstance(task, Detection) and (folder / ANNOTATIONS).exists():
        return _objects(folder, files, labels, preprocess)
    if isinstance(task, Segmentation) and _masks_of(folder).is_dir():
        known = len(labels) if task.scores else 0  # one label for each class
        return np.stack([_class_map(file, folder, preprocess, known) for file in files])
    if isinstance(task, Embedding):
        return _classes(files)
    return None


def _classes(files: Sequence[Path]) -> npt.NDArray[np.int64] | None:
    """Classes of images from folder names; None if no class has two images, or there is only one class."""
    names = [file.parent.name for file in files]
    classes = sorted(set(names))
    single = [name for name in classes if names.count(name) < _FEWEST]
    if len(classes) < _FEWEST or len(single) == len(classes):
        return None
    if single:
        _log.warning("recall@1 is not measured: there is only one image of '%s'", single[0])
        return None
    return np.array([classes.index(name) for name in names], np.int64)


def _masks_of(folder: Path) -> Path:
    return folder.resolve().with_name(f"{folder.resolve().name}{MASKS_SUFFIX}")


def _class_map(file: Path, folder: Path, preprocess: Preprocess, classes: int) -> npt.NDArray[np.int64]:
    """Class of each pixel of the input, `[height, width]`; unknown outside of the image.

    `classes` is the number of the model's classes; 0 if unknown.
    """
    mask = (_masks_of(folder) / file.relative_to(folder)).with_suffix(".png")
    pixels, image = _mask_pixels(mask, classes), _open(file)
    if pixels.shape != (image.height, image.width):
        raise ConversionError(
            f"{mask} has {pixels.shape[1]}x{pixels.shape[0]} pixels, its image {image.width}x{image.height}"
        )
    frame = frame_of(preprocess, pixels.shape)
    rows, columns = (_sampled(frame, axis) for axis in (0, 1))
    found = pixels[rows.clip(0, frame.height - 1)][:, columns.clip(0, frame.width - 1)].astype(np.int64)
    outside = ((rows < 0) | (rows >= frame.height))[:, None] | ((columns < 0) | (columns >= frame.width))
    known: npt.NDArray[np.int64] = np.where(outside | (found == _IGNORED), UNKNOWN, found)
    return known


def _sampled(frame: Frame, axis: int) -> npt.NDArray[np.int64]:
    """Rows (0) or columns (1) of the image that contain the centers of the input's pixels."""
    size, scale, shift = (
        (frame.input_height, frame.scale_y, frame.top) if axis == 0 else (frame.input_width, frame.scale_x, frame.left)
    )
    places: npt.NDArray[np.float64] = (np.arange(size) + 0.5 - shift) * scale
    return np.floor(places).astype(np.int64)


def _mask_pixels(mask: Path, classes: int) -> npt.NDArray[np.uint8]:
    """Class numbers, `[height, width]`, from gray or palette images, independent of colors."""
    image = _open(mask)
    if image.mode not in ("L", "P"):
        raise ConversionError(
            f"{mask} must have class numbers as 8-bit gray or palette pixels, its mode is {image.mode}"
        )
    pixels = np.asarray(image, np.uint8)
    highest = int(pixels[pixels != _IGNORED].max(initial=0))
    if classes and highest >= classes:
        raise ConversionError(
            f"{mask} contains the class {highest}, the model has {classes}: 0 to {classes - 1}",
            hint=f"number them as the lines of the labels file, from 0; {_IGNORED} marks unknown pixels",
        )
    return pixels


def _open(file: Path) -> Image.Image:
    try:
        return open_image(file)
    except InvalidInput as error:
        raise ConversionError(error.message, hint=error.hint) from error


def _objects(folder: Path, files: Sequence[Path], labels: Sequence[str], preprocess: Preprocess) -> list[Objects]:
    """The objects of each image, in pixels of the input."""
    path = folder / ANNOTATIONS
    try:
        document = json.loads(read_bytes(path, _MOST_BYTES))
        by_file = _boxes_by_file(document, labels)
    except ConversionError as error:
        raise ConversionError(f"{path}: {error.message}", hint=error.hint) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConversionError(
            f"{path} is not in COCO's format: {type(error).__name__}: {error}",
            hint="it needs images, annotations and categories",
        ) from error
    return [_placed(file, by_file.get(file.relative_to(folder).as_posix()), path, preprocess) for file in files]


def _boxes_by_file(document: Mapping[str, Any], labels: Sequence[str]) -> dict[str, list[tuple[int, list[float]]]]:
    """Class and corners of each object, by image name. Crowds are skipped."""
    names = {image["id"]: str(image["file_name"]) for image in document["images"]}
    classes: dict[Any, int] = {}
    for row in document["categories"]:
        if row["name"] not in labels:
            problem = f"category '{row['name']}' is not among the model's {len(labels)} labels"
            raise ConversionError(problem, hint="give --labels")
        classes[row["id"]] = labels.index(row["name"])
    found: dict[str, list[tuple[int, list[float]]]] = {name: [] for name in names.values()}
    for row in document["annotations"]:
        if not row.get("iscrowd"):
            left, top, width, height = map(float, row["bbox"])
            corners = [left, top, left + width, top + height]
            found[names[row["image_id"]]].append((classes[row["category_id"]], corners))
    return found


def _placed(
    file: Path, objects: Sequence[tuple[int, list[float]]] | None, path: Path, preprocess: Preprocess
) -> Objects:
    """Objects of an image in pixels of the input; those outside of a crop are skipped."""
    if objects is None:
        raise ConversionError(f"{path} does not list the image {file.name}", hint="list images without objects, too")
    image = _open(file)
    frame = frame_of(preprocess, (image.height, image.width))
    boxes = frame.to_input(np.array([corners for _, corners in objects], np.float64).reshape(-1, 4))
    boxes = boxes.clip(0, [frame.input_width, frame.input_height] * 2)
    kept = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    return Objects(boxes=boxes[kept], classes=np.array([each for each, _ in objects], np.int64)[kept])
