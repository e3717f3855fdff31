"""Samples for the proof: a user's own, or synthetic; at the smallest, usual and largest sizes."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.arrays import read_npz
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError, InvalidInput, ManifestError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.strings import as_text
from graphkiln_backend.graph.task import Task
from graphkiln_backend.images.decoding import load_sample
from graphkiln_backend.images.formats import image_files, list_images
from graphkiln_backend.proof.metrics import TaskTargets
from graphkiln_backend.proof.tasks import is_judged
from graphkiln_converters.annotations import read_task_targets
from graphkiln_converters.sources.base import InputSpec

SEED = 20260101
_log = logging.getLogger("graphkiln.converters")

Arrays = Mapping[str, AnyArray]
Targets = npt.NDArray[np.int64]
"""The right classes, `[samples]`."""
Sizes = Mapping[str, Mapping[int, int]]
"""Input -> axis of the sample -> size, for axes that vary."""


def sizes_to_try(inputs: Sequence[InputSpec]) -> Iterator[Sizes]:
    """The usual, the smallest and the largest sizes of the axes that vary; one empty dict where none does."""
    yield {}
    if any(spec.dynamic for spec in inputs):
        for end in (0, 1):
            yield {spec.name: {axis: ends[end] for axis, ends in spec.dynamic.items()} for spec in inputs}


def synthetic_images(shape_hwc: tuple[int, int, int], count: int) -> AnyArray:
    """Seeded uint8 images `[count, height, width, channels]`: smooth blobs under noise, of different contrast."""
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


def read_samples(
    path: Path, inputs: Mapping[str, InputSpec], preprocess: Preprocess | None, most: int
) -> dict[str, AnyArray]:
    """Reads a user's samples: an .npz of arrays by input name, or a folder of images.

    Args:
        path: The file or folder.
        inputs: What to expect, by the names of the saved graph.
        preprocess: How an image becomes the only input.
        most: Largest number of samples; of more, evenly spread ones are read.

    Returns:
        `[samples, ...]` arrays by the names of the saved graph; by the source's, where the file has those.

    Raises:
        ConversionError: The file cannot be read, or holds nothing that fits.
    """
    if path.is_dir():
        return _images(path, inputs, preprocess, most)
    arrays = _read_arrays(path, "samples")
    names = _names_in(arrays, path, inputs)
    arrays = {name: _with_samples(arrays[name], spec) for name, spec in zip(names, inputs.values(), strict=True)}
    for name in names:
        if not arrays[name].ndim:
            raise ConversionError(f"{path}: '{name}' is one number, expected [samples, ...]")
    count = min(len(arrays[name]) for name in names)
    if not count:
        raise ConversionError(f"{path} holds no sample")
    chosen = _spread(count, most)
    specs = zip(names, inputs.values(), strict=True)
    return {name: _as_input(np.ascontiguousarray(arrays[name][chosen]), spec) for name, spec in specs}


def _with_samples(array: AnyArray, spec: InputSpec) -> AnyArray:
    """One sample may come without an axis for the samples."""
    return array[None] if array.ndim == len(spec.shape) else array


def _as_input(array: AnyArray, spec: InputSpec) -> AnyArray:
    """Floating-point samples in the input's own type: numpy alone writes no bf16, and nobody records in fp16."""
    return array.astype(spec.dtype.numpy) if spec.dtype.is_float and array.dtype.kind == "f" else array


def _names_in(arrays: Arrays, path: Path, inputs: Mapping[str, InputSpec]) -> list[str]:
    """The names of all inputs in a file: the saved graph's, or else the source's."""
    sources = [spec.name for spec in inputs.values()]
    for names in (list(inputs), sources):
        if all(name in arrays for name in names):
            return names
    lacking = min(([name for name in names if name not in arrays] for names in (list(inputs), sources)), key=len)
    other = f"; the source's own names will do: {', '.join(sources)}" if sources != list(inputs) else ""
    raise ConversionError(
        f"the samples of {path} lack input {', '.join(lacking)}",
        hint=f"it holds {', '.join(arrays) or 'nothing'}{other}",
    )


def read_reference(path: Path, inputs: Sequence[InputSpec], outputs: Sequence[str]) -> tuple[Arrays, Arrays]:
    """Reads the source's own outputs, recorded where it ran: an .npz of arrays by name.

    Args:
        path: The file: every input and output by the source's name, or as `INPUT_<i>` and `OUTPUT_<i>`.
        inputs: What the source takes.
        outputs: Names of what it returns.

    Returns:
        Inputs and outputs by the source's names, `[samples, ...]` each.

    Raises:
        ConversionError: The file cannot be read, lacks one of them, or holds one that does not fit.
    """
    arrays = _read_arrays(path, "reference")
    feeds = {spec.name: _recorded(arrays, path, spec.name, f"INPUT_{number}") for number, spec in enumerate(inputs)}
    recorded = {name: _recorded(arrays, path, name, f"OUTPUT_{number}") for number, name in enumerate(outputs)}
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
        raise ConversionError(f"{path} must hold as many samples of everything, and one at least: it has {listed}")
    return feeds, recorded


def _recorded(arrays: Arrays, path: Path, *names: str) -> AnyArray:
    for name in names:
        if name in arrays:
            return arrays[name]
    raise ConversionError(
        f"{path} lacks '{names[0]}'", hint=f"it holds {', '.join(arrays) or 'nothing'}: save with numpy.savez"
    )


def read_targets(path: Path, labels: Sequence[str], most: int) -> Targets | None:
    """Reads the right classes of the images that `read_samples` reads, where their folders are named after labels.

    Args:
        path: The file or folder.
        labels: Class names.
        most: As for `read_samples`.

    Returns:
        `[samples]`; None where the folders do not say.
    """
    if not labels or not path.is_dir():
        return None
    names = [file.parent.name for file in _chosen(path, most)]
    unknown = sorted({*names} - {*labels})
    if unknown and {name.casefold() for name in names} & {label.casefold() for label in labels}:
        _log.warning("%s: what is right is not known, for no label is called '%s', as a folder is", path, unknown[0])
    if unknown or not names:
        return None
    return np.array([labels.index(name) for name in names], np.int64)


def read_targets_of(
    task: Task | None, path: Path, labels: Sequence[str], most: int, preprocess: Preprocess | None
) -> TaskTargets | None:
    """Reads what is on the images that `read_samples` reads, as the task of a model takes it.

    Args:
        task: What the model answers about an image.
        path: The file or folder.
        labels: Class names.
        most: As for `read_samples`.
        preprocess: As for `read_samples`.

    Returns:
        None where nothing says it.

    Raises:
        ConversionError: What is written down cannot be read, or does not fit.
    """
    if not is_judged(task):
        return read_targets(path, labels, most)
    if preprocess is None or not path.is_dir():
        return None
    return read_task_targets(path, _chosen(path, most), task, labels, preprocess)


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
            "images can be samples of a model with one image input only",
            hint="give an .npz with an array for every input",
        )
    known = _listed(folder)
    files = [known[index] for index in _spread(len(known), most)]
    samples = [load_sample(file, preprocess) for file in files]
    for file, sample in zip(files, samples, strict=True):
        if sample.shape != samples[0].shape:
            raise ConversionError(
                f"{file} becomes {list(sample.shape)}, {files[0]} {list(samples[0].shape)}",
                hint="let --preprocess give all images one size: crop, letterbox, or resize to height and width",
            )
    return {next(iter(inputs)): np.stack(samples)}


def _listed(folder: Path) -> list[Path]:
    """The images of a folder; those that are not decoded are told of."""
    try:
        files, left_out = list_images(folder)
    except InvalidInput as error:
        raise ConversionError(error.message, hint=error.hint) from error
    if left_out:
        _log.warning("%s", left_out)
    return files


def _chosen(folder: Path, most: int) -> list[Path]:
    files = image_files(folder)
    return [files[index] for index in _spread(len(files), most)]


def _spread(count: int, most: int) -> list[int]:
    return sorted({round(position) for position in np.linspace(0, count - 1, min(count, most))})
