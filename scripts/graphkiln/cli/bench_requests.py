"""Requests of `graphkiln bench`: arrival times (loads) and contents (inputs)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from graphkiln.bench.arrivals import bursts, constant, poisson, read_trace
from graphkiln.bench.generator import MAX_CALLERS
from graphkiln.bench.processes import Load
from graphkiln.cli.tensor_input import parse_inputs, read_archive, to_feeds
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.files import MIB, read_bytes

if TYPE_CHECKING:
    from graphkiln_client import Model

# Default duration of a run in seconds.
DEFAULT_S = 10.0
# Maximum number of requests of a run, whose due times are held in memory.
_MOST_REQUESTS = 1e8
# Maximum duration of a run in seconds (three years), which is within the range of timers.
_LONGEST_S = 1e8
# Maximum number of callers, each of which is a thread.
_MOST_CALLERS = 4096


def plan_loads(
    *,
    concurrency: str | None = None,
    rate: float | None = None,
    arrivals: str | None = None,
    burst: int | None = None,
    trace: Path | None = None,
    seconds: float | None = None,
    warmup_s: float = 1.0,
) -> list[tuple[str, Load]]:
    """Create the named loads of a command from its options.

    Raises:
        InvalidInput: Options conflict, or a value is invalid.
    """
    given = {"--concurrency": concurrency, "--rate": rate, "--trace": trace}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise InvalidInput(f"{' and '.join(named)} are mutually exclusive", hint="keep one of them")
    if not rate and (arrivals or burst):
        raise InvalidInput("--arrivals and --burst require a rate", hint="add --rate, such as --rate 100")
    _check_size(rate or 0.0, warmup_s + (seconds or DEFAULT_S))
    if trace:
        return [("trace", _trace_load(trace, seconds, warmup_s))]
    if rate:
        return [_rate_load(rate, arrivals, burst, seconds or DEFAULT_S, warmup_s)]
    numbers = [1] if concurrency is None else _parse(concurrency)
    return [(str(number), Load(callers=number, seconds=seconds or DEFAULT_S, warmup_s=warmup_s)) for number in numbers]


def _check_size(rate: float, seconds: float) -> None:
    if not (seconds <= _LONGEST_S and rate * seconds <= _MOST_REQUESTS):  # nor NaN
        load = f"{rate:g} requests per second for {seconds:g} s" if rate else f"a run of {seconds:g} s"
        raise InvalidInput(f"{load} is out of range", hint="give a lower --rate or a shorter --duration")


def _rate_load(
    rate: float, arrivals: str | None, burst: int | None, seconds: float, warmup_s: float
) -> tuple[str, Load]:
    whole = warmup_s + seconds
    if burst:
        if arrivals:
            raise InvalidInput("--burst and --arrivals are mutually exclusive: bursts arrive at random times")
        name, moments = f"{rate:g}/s by {burst}", bursts(rate, whole, burst)
    elif arrivals == "constant":
        name, moments = f"{rate:g}/s even", constant(rate, whole)
    else:
        name, moments = f"{rate:g}/s", poisson(rate, whole)
    if not (moments >= warmup_s).any():
        raise InvalidInput(
            f"no request is due in {seconds:g} s", hint="increase --rate or --duration, or decrease --burst"
        )
    return name, Load(callers=MAX_CALLERS, seconds=seconds, warmup_s=warmup_s, arrivals=moments)


def _trace_load(file: Path, seconds: float | None, warmup_s: float) -> Load:
    """Create the load of a trace from its start, for its length or `seconds`, after a warm-up at its mean rate."""
    moments = read_trace(file)
    seconds = seconds or max(float(moments[-1]) + 1e-3, 0.5)  # includes the last request
    _check_size(0.0, warmup_s + seconds)
    moments = moments[moments < seconds]
    before = constant(len(moments) / seconds, warmup_s) if warmup_s else moments[:0]
    arrivals = np.concatenate([before, warmup_s + moments])
    return Load(callers=MAX_CALLERS, seconds=seconds, warmup_s=warmup_s, arrivals=arrivals)


def _parse(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or max(numbers) > _MOST_CALLERS:
        raise InvalidInput(
            f"--concurrency {text}: expected numbers from 1 to {_MOST_CALLERS}",
            hint="for example --concurrency 1,4,16",
        )
    return numbers


# Inputs: random numbers, given tensors, or samples.

RANDOM = "random"
_GOLDEN = "golden.npz"
_GOLDEN_PREFIX = "input/"
_IMAGE_LIMIT = 64 * MIB
_HINT = "expected a folder of images or .npz files, an .npz with a row for each sample, or a version's golden.npz"

Feeds = dict[str, AnyArray]


def read_feeds(model: Model, inputs: list[str], batch_size: int) -> Feeds:
    """Read the tensors of `--input`.

    Raises:
        InvalidInput: It cannot be read, or does not fit the model.
    """
    if inputs == [RANDOM]:
        return _random_feeds(model, batch_size)
    if batch_size > 1:
        raise InvalidInput(
            "--batch-size applies to random inputs and samples only",
            hint="remove it, and provide arrays with that many rows",
        )
    if len(inputs) == 1 and "=" not in inputs[0] and not inputs[0].endswith(".npz"):
        return _image_feeds(model, Path(inputs[0]))
    return to_feeds(parse_inputs(inputs, model), model)


def read_samples(model: Model, path: Path, batch_size: int) -> list[Feeds]:
    """Read `--samples`: the inputs of successive requests.

    An .npz has one array per input with one row per sample, of which `batch_size` make a request; golden samples of a
    version are possible, too. In a folder, each .npz file is one request, and each other file is an image.

    Raises:
        InvalidInput: It cannot be read, or does not fit the model.
    """
    if path.is_dir() and (path / _GOLDEN).is_file():
        path /= _GOLDEN
    if path.is_dir() and batch_size > 1:
        raise InvalidInput(
            f"--batch-size {batch_size}: each file of {path} is a request",
            hint="leave it out, or give an .npz with rows",
        )
    if path.is_dir():
        visible = (file for file in sorted(path.iterdir()) if file.is_file() and not file.name.startswith("."))
        samples = [_read_samples(file) if file.suffix == ".npz" else _image_feeds(model, file) for file in visible]
    elif path.suffix == ".npz":
        arrays = _read_samples(path)
        is_whole = _are_whole(model, arrays)
        if is_whole:
            _refuse_rows(model, batch_size)
        samples = list(_batches(path, arrays, 0 if is_whole else batch_size))
    else:
        problem = "no samples found" if path.exists() else "there is no such file or folder"
        raise InvalidInput(f"--samples {path}: {problem}", hint=_HINT)
    if not samples:
        raise InvalidInput(f"--samples {path} is empty", hint=_HINT)
    return samples


def _refuse_rows(model: Model, rows: int) -> None:
    if rows > 1:
        raise InvalidInput(f"'{model.name}' does not support batches", hint=f"remove --batch-size {rows}")


def _read_samples(file: Path) -> Feeds:
    """Read the arrays of an archive, or the inputs of golden samples."""
    arrays = read_archive(file)
    golden = {name.removeprefix(_GOLDEN_PREFIX): a for name, a in arrays.items() if name.startswith(_GOLDEN_PREFIX)}
    return golden or arrays


def _are_whole(model: Model, arrays: Mapping[str, AnyArray]) -> bool:
    """Return true if each sample is a request, because the model has no batch dimension."""
    ranks = {row["name"]: len(row["shape"]) for row in model.metadata["inputs"]}
    return all(name in ranks and array.ndim == ranks[name] + 1 for name, array in arrays.items())


def _batches(path: Path, arrays: Mapping[str, AnyArray], size: int) -> Iterator[Feeds]:
    """Yield requests of `size` rows; with size 0, each row without its first dimension is a request."""
    counts = {len(array) if array.ndim else 0 for array in arrays.values()}
    if len(counts) != 1:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
        raise InvalidInput(f"--samples {path}: expected arrays with a row for each sample, got {shapes}", hint=_HINT)
    (count,) = counts
    if 0 < count < size:
        raise InvalidInput(f"--samples {path}: {count} samples are fewer than --batch-size {size}")
    for first in range(0, count - max(size, 1) + 1, max(size, 1)):
        rows = slice(first, first + size) if size else first
        yield {name: np.ascontiguousarray(array[rows]) for name, array in arrays.items()}


def _random_feeds(model: Model, rows: int) -> dict[str, AnyArray]:
    """Create reproducible arrays of the declared shapes: normal floats, small integers, short strings."""
    if _takes_encoded(model):
        raise InvalidInput(
            f"'{model.name}' requires encoded images", hint="provide them: --input IMAGE, or --samples FOLDER"
        )
    if not any(row["shape"] and row["shape"][0] < 0 for row in model.metadata["inputs"]):
        _refuse_rows(model, rows)
    generator = np.random.default_rng(0)
    feeds: dict[str, AnyArray] = {}
    for row in model.metadata["inputs"]:
        dtype, (first, *rest) = DType(row["datatype"]), row["shape"] or [1]
        if any(size < 0 for size in rest):
            raise InvalidInput(
                f"input '{row['name']}' has no fixed shape: {row['shape']}", hint="send your own: --samples FILE.npz"
            )
        shape = [rows if first < 0 else first, *rest]
        if dtype is DType.BYTES:
            feeds[row["name"]] = np.full(shape, b"text", np.object_)
        elif dtype.is_float:
            feeds[row["name"]] = generator.normal(size=shape).astype(dtype.numpy)
        else:
            feeds[row["name"]] = generator.integers(0, 2, shape).astype(dtype.numpy)
    return feeds


def _image_feeds(model: Model, image: Path) -> dict[str, AnyArray]:
    from graphkiln_backend.images.decoding import load_sample

    rows = model.metadata["inputs"]
    if len(rows) != 1:
        raise InvalidInput(f"'{model.name}' has {len(rows)} inputs", hint="use --input NAME=FILE.npy for each")
    if _takes_encoded(model):
        return {rows[0]["name"]: _as_it_is(image, len(rows[0]["shape"]))}
    sample = load_sample(image, model.preprocess)
    return {rows[0]["name"]: sample[np.newaxis] if sample.ndim + 1 == len(rows[0]["shape"]) else sample}


def _takes_encoded(model: Model) -> bool:
    """Return true for the image model of another model, which takes encoded images."""
    from graphkiln_client.published import published_tensor_model

    return bool(published_tensor_model(model.config))


def _as_it_is(image: Path, rank: int) -> AnyArray:
    """Return an encoded image as the only element of a tensor with `rank` dimensions.

    Raises:
        InvalidInput: The file is not an image.
    """
    from graphkiln_backend.images.decoding import upright_size

    element = np.empty([1] * rank, object)
    try:
        element.fill(read_bytes(image, _IMAGE_LIMIT))
        upright_size(element.item())
    except OSError as error:
        raise InvalidInput(f"cannot read {image}: {error.strerror or error}") from error
    except InvalidInput as error:
        raise InvalidInput(f"{image}: {error.message}", hint=error.hint) from error
    return element
