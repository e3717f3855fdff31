"""Requests with reference outputs: the load of a candidate, and the check of its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from graphkiln.tuning.statistics import requests_needed
from graphkiln.tuning.subject import Subject, vanishing_cache
from graphkiln.tuning.target import CONFIDENCE
from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.registry import open_reference
from graphkiln_backend.graph.contract import Contract
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import (
    ConversionError,
    InvalidInput,
    MeasurementError,
    SignatureError,
    VerificationError,
)
from graphkiln_backend.graph.golden import joined
from graphkiln_backend.graph.manifest import Adoption
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.graph.task import Classification, Ranking, Reading
from graphkiln_backend.images.formats import image_files
from graphkiln_backend.lowering.acceptance import limits_of
from graphkiln_backend.proof.comparison import prove
from graphkiln_backend.proof.policy import Limits
from graphkiln_converters.samples import read_samples, read_targets
from graphkiln_converters.sources.base import InputSpec

# Maximum number of samples sent as requests; more are read only to compare labels.
MOST_SAMPLES = 256
_MADE_UP = 8
Arrays = Mapping[str, AnyArray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Requests:
    """Requests with the reference outputs of the saved graph.

    Attributes:
        origin: Description of the source, for reports.
        feeds: Inputs of each request.
        answers: Reference outputs of each request.
        saved: Precision of the saved graph.
        reading: Interpretation of the outputs (classes, boxes, ...), or None.
        targets: True class of each request, `[requests]`; None if unknown.
        unlabelled: Reason for missing targets, for error messages.
        output: Name of the output whose classes the labels name; "" for the first one.
        is_batched: The first dimension of a request is Triton's batch dimension.
        adoption: Origin of golden samples of a graph that another tool wrote, or None.
    """

    origin: str
    feeds: tuple[Arrays, ...]
    answers: tuple[Arrays, ...]
    saved: Precision
    reading: Reading | None = None
    targets: npt.NDArray[np.int64] | None = None
    unlabelled: str = ""
    output: str = ""
    is_batched: bool = False
    adoption: Adoption | None = None

    def objection(self, found: Mapping[int, Arrays], *, engine: str, precision: str) -> str:
        """Compare outputs with those of the saved graph; return the violation of the numeric policy, or "".

        Args:
            found: Request number -> outputs; at least one.
            engine: Engine that computed them.
            precision: Requested precision.
        """
        config = SessionConfig(
            engine=engine, device=CPU, threads=1, spin=False, reason="", precision=Precision(precision)
        )
        limits = limits_of(self.saved, config, self.adoption)
        pairs = [(self.answers[number], outputs) for number, outputs in found.items()]
        together = [pairs] if _can_be_joined([each for pair in pairs for each in pair]) else [[pair] for pair in pairs]
        return next(filter(None, (self._refuted(group, limits) for group in together)), "")

    def _refuted(self, pairs: Sequence[tuple[Arrays, Arrays]], limits: Limits) -> str:
        """Compare pairs of (reference, found) outputs; return the violation, or ""."""
        reference, found = (joined(list(each)) for each in zip(*pairs, strict=True))
        try:
            prove(reference, found, limits, batch_sizes=(1,), reading=self.reading, samples=len(pairs))
        except VerificationError as error:
            return str(error)
        return ""

    def accuracy(self, found: Sequence[Arrays]) -> float | None:
        """Return the share of requests whose top class is the true one; None without labels."""
        if self.targets is None:
            return None
        ranking = self.reading if isinstance(self.reading, Ranking) else None
        classes = [_best_class(outputs, ranking, self.output) for outputs in found]
        return float(np.mean(np.array(classes) == self.targets))

    @property
    def sent(self) -> tuple[Arrays, ...]:
        """All feeds as requests, or an evenly spaced selection of at most `MOST_SAMPLES`."""
        return tuple(map(self.request, range(0, len(self.feeds), -(-len(self.feeds) // MOST_SAMPLES))))

    def request(self, number: int) -> Arrays:
        """Return the feeds in the server's shapes: one number per row becomes `[rows, 1]`, as Triton has no scalars."""
        scalar = int(self.is_batched)  # number of dimensions of a scalar
        feeds = self.feeds[number].items()
        return {name: np.asarray(array)[..., None] if np.ndim(array) == scalar else array for name, array in feeds}

    def answer(self, number: int, found: Arrays) -> Arrays:
        """Restore the graph's shapes in a server's answer: the reverse of `request`."""
        shapes = {name: np.shape(array) for name, array in self.answers[number].items()}
        return {
            name: array.reshape(shapes[name]) if array.shape == (*shapes.get(name, array.shape), 1) else array
            for name, array in found.items()
        }


def _can_be_joined(outputs: Sequence[Arrays]) -> bool:
    """Return true if outputs have the same names, and shapes that differ only in the first dimension."""
    shapes = [{name: np.shape(array)[1:] for name, array in each.items() if np.ndim(array)} for each in outputs]
    return all(each == shapes[0] and len(each) == len(outputs[0]) for each in shapes)


def _best_class(outputs: Arrays, ranking: Ranking | None, name: str) -> int:
    if ranking:
        return int(outputs[ranking.indices].ravel()[0])
    scores = outputs[name] if name in outputs else next(iter(outputs.values()))
    return int(scores.ravel().argmax())


def read_requests(subject: Subject, samples: Path | None = None, most: int = MOST_SAMPLES) -> Requests:
    """Read the user's samples, otherwise the golden samples, otherwise generate requests.

    Raises:
        ConversionError: The samples cannot be read or do not fit the model.
        MeasurementError: The graph fails on all generated requests.
    """
    version, is_batched = subject.deployment.version, subject.config.max_batch_size > 0
    if samples is None and version.golden:
        golden = version.golden
        outputs = golden.graph_outputs
        answers = tuple(
            outputs if golden.whole else {name: array[number : number + 1] for name, array in outputs.items()}
            for number in range(golden.count)
        )
        return Requests(
            origin="golden samples", feeds=golden.feeds, answers=answers, saved=subject.deployment.saved,
            reading=version.reading, unlabelled="golden samples have none", is_batched=is_batched,
            adoption=version.adoption,
        )  # fmt: skip
    feeds, targets = _read(subject, samples, most) if samples else (_make_up(subject), None)
    with open_reference(version.graph_path, subject.deployment.settings.op_libraries) as reference:
        answers = tuple(map(reference.run, feeds))
    return Requests(
        origin=str(samples) if samples else "made up",  # part of a journal's identity
        feeds=feeds,
        answers=answers,
        saved=subject.deployment.saved,
        reading=version.reading,
        targets=targets,
        unlabelled="" if targets is not None else _why_unlabelled(samples, _labels_of(version.contract)),
        output=version.contract.output,
        is_batched=is_batched,
    )


def classifies(reading: Reading | None) -> bool:
    """Return true if the outputs are, or may be, class scores."""
    return reading is None or isinstance(reading, Ranking | Classification)


def _read(subject: Subject, samples: Path, most: int) -> tuple[tuple[Arrays, ...], npt.NDArray[np.int64] | None]:
    contract = subject.deployment.version.contract
    specs = {spec.name: _input_spec(spec, subject.signature) for spec in subject.signature.inputs}
    arrays = read_samples(samples, specs, contract.preprocess, most)
    count = len(next(iter(arrays.values())))
    batched = subject.signature.batchable
    feeds = tuple(
        {name: array[number : number + 1] if batched else array[number] for name, array in arrays.items()}
        for number in range(count)
    )
    try:
        subject.signature.check(feeds[0])  # all feeds have the same shape
    except SignatureError as error:
        raise ConversionError(f"the samples of {samples} do not fit the model: {error}") from error
    is_labelled = classifies(subject.deployment.version.reading)
    return feeds, read_targets(samples, _labels_of(contract), most) if is_labelled else None


def _input_spec(spec: TensorSpec, signature: Signature) -> InputSpec:
    sizes = spec.shape[1:] if signature.batchable else spec.shape
    return InputSpec(
        name=spec.name, dtype=spec.dtype, shape=tuple(size if isinstance(size, int) else 1 for size in sizes)
    )


def _labels_of(contract: Contract) -> tuple[str, ...]:
    """Return the labels of the scores or of an embedded top-k."""
    return contract.labels or (contract.ranking.labels if contract.ranking else ())


def _why_unlabelled(samples: Path | None, labels: Sequence[str]) -> str:
    """Return the reason why the samples have no labels."""
    if samples is None:
        return "generated requests have no labels"
    if not labels:
        return "the model has no labels"
    if not samples.is_dir():
        return f"{samples} is not a folder of images"
    unknown = sorted({file.parent.name for file in image_files(samples)} - {*labels})
    return f"'{unknown[0]}' is not a label of the model" if unknown else "its folders are not named after labels"


def _make_up(subject: Subject) -> tuple[Arrays, ...]:
    with vanishing_cache() as cache:
        proven = subject.deployment.build(cache)
        with proven.session:
            synthetic, signature = proven.synthetic, proven.session.signature
    if synthetic is None:
        raise MeasurementError(
            f"'{subject.name}' fails on generated requests", hint="provide samples: --samples FILE.npz"
        )
    return tuple(synthetic.feeds(signature, seed=seed) for seed in range(_MADE_UP))


# `--accuracy-floor`: check that the model and the samples support it, and the smallest loss that they can exclude.

# Every candidate's session computes all of them, and the outputs are held in memory.
_MOST_LABELLED = 2048


def samples_to_read(floor: float | None) -> int:
    """Return the number of samples to read: with a floor, enough to detect such a loss, within bounds."""
    if floor is None:
        return MOST_SAMPLES
    return min(_MOST_LABELLED, max(MOST_SAMPLES, samples_needed(floor) or 0))


def samples_needed(floor: float) -> int | None:
    """Return how many samples, all answered correctly, exclude a larger loss at 95%; None for a floor of 0.

    598 for 0.5%.

    Source: J. A. Hanley, A. Lippman-Hand, "If Nothing Goes Wrong, Is Everything All Right?" (1983), exact.
    """
    return requests_needed(0, 1 - floor) if floor else None


def check_floor(requests: Requests, floor: float | None) -> None:
    """Check that the model gives classes and the samples have labels if there is an accuracy floor.

    Raises:
        InvalidInput: The samples have no labels, or the model does not give classes.
    """
    if floor is None:
        return
    if not classifies(requests.reading):
        raise InvalidInput(
            "--accuracy-floor counts correct classes, but this model does not classify",
            hint="leave it out: the outputs are held to the limits of their task in any case",
        )
    if requests.targets is None:
        raise InvalidInput(
            f"--accuracy-floor needs labelled samples: {requests.unlabelled}",
            hint="--samples DIR with one folder of images for each label of the model",
        )


def undecided(requests: Requests, floor: float | None) -> str:
    """Return a warning if the samples are too few to verify the floor; "" otherwise."""
    if floor is None or requests.targets is None:
        return ""
    count, needed = len(requests.targets), samples_needed(floor)
    if needed is not None and count >= needed:
        return ""
    undetected = 1 - (1 - CONFIDENCE) ** (1 / count)
    enough = "no number of samples verifies a floor of 0" if needed is None else f"{needed} are needed"
    return (
        f"{count} labelled samples cannot verify an accuracy floor of {floor * 100:.3g}%: "
        f"even if all stay correct, a loss below {undetected * 100:.2g}% is possible (at 95%); {enough}"
    )
