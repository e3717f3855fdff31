"""Requests whose right outputs are known: what a candidate is loaded with, and what its answers are held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from graphkiln.tuning.subject import Subject, vanishing_cache
from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.registry import open_reference
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import InvalidInput, MeasurementError, VerificationError
from graphkiln_backend.graph.golden import joined
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.ranking import Ranking
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.graph.task import Classification, Reading
from graphkiln_backend.lowering.acceptance import limits_of
from graphkiln_backend.proof.comparison import prove
from graphkiln_backend.proof.policy import Limits
from graphkiln_converters.samples import read_samples, read_targets
from graphkiln_converters.sources.base import InputSpec

_MOST_SAMPLES = 256
_MADE_UP = 8

Arrays = Mapping[str, AnyArray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """Requests with the outputs of the saved graph itself.

    Attributes:
        origin: Where they come from, in words.
        feeds: The inputs of each request.
        answers: The right outputs of each.
        saved: Precision that the graph was saved in.
        reading: What users read from the outputs, or None.
        targets: The right class of each, `[requests]`; None where nobody says.
    """

    origin: str
    feeds: tuple[Arrays, ...]
    answers: tuple[Arrays, ...]
    saved: Precision
    reading: Reading | None = None
    targets: npt.NDArray[np.int64] | None = None

    def objection(self, found: Mapping[int, Arrays], *, engine: str, precision: str) -> str:
        """Why outputs are not those of the saved graph within the numeric policy; empty where they are.

        Args:
            found: Number of the request -> the outputs for it; at least one.
            engine: What computed them.
            precision: What it was to compute in.
        """
        config = SessionConfig(
            engine=engine, device=CPU, threads=1, spin=False, reason="", precision=Precision(precision)
        )
        limits = limits_of(self.saved, config)
        pairs = [(self.answers[number], outputs) for number, outputs in found.items()]
        together = [pairs] if _can_be_joined([each for pair in pairs for each in pair]) else [[pair] for pair in pairs]
        return next(filter(None, (self._refuted(group, limits) for group in together)), "")

    def _refuted(self, pairs: Sequence[tuple[Arrays, Arrays]], limits: Limits) -> str:
        """Why found outputs, the second of each pair, are not the right ones; empty where they are."""
        reference, found = (joined(list(each)) for each in zip(*pairs, strict=True))
        try:
            prove(reference, found, limits, batch_sizes=(1,), reading=self.reading, samples=len(pairs))
        except VerificationError as error:
            return str(error)
        return ""

    def accuracy(self, found: Sequence[Arrays]) -> float | None:
        """Share of the requests whose best class is the right one; None where nobody says which that is.

        Args:
            found: The outputs for each request.
        """
        if self.targets is None:
            return None
        ranking = self.reading if isinstance(self.reading, Ranking) else None
        classes = [_best_class(outputs, ranking) for outputs in found]
        return float(np.mean(np.array(classes) == self.targets))


def read_questions(subject: Subject, samples: Path | None = None) -> Questions:
    """The user's samples, or else the golden ones, or else requests that are made up.

    Args:
        subject: The model.
        samples: A folder of images or an .npz with a row for each sample.

    Raises:
        ConversionError: The samples cannot be read.
        MeasurementError: The graph computes none of the requests that can be made up.
    """
    version = subject.deployment.version
    if samples is None and version.golden:
        golden = version.golden
        answers = tuple(_row(golden.graph_outputs, number, whole=golden.whole) for number in range(golden.count))
        return Questions(
            origin="golden samples", feeds=golden.feeds, answers=answers, saved=subject.deployment.saved,
            reading=version.reading,
        )  # fmt: skip
    feeds, targets = _read(subject, samples) if samples else (_make_up(subject), None)
    return Questions(
        origin=str(samples) if samples else "made up",
        feeds=feeds,
        answers=_reference_answers(subject, feeds),
        saved=subject.deployment.saved,
        reading=version.reading,
        targets=targets,
    )


def check_floor(questions: Questions, floor: float | None) -> None:
    """Refuses a floor where nothing says what is right.

    Raises:
        InvalidInput: The samples have no labels, or the model gives no classes.
    """
    if floor is not None and not _classifies(questions.reading):
        raise InvalidInput(
            "--accuracy-floor counts right classes, and this model answers with something else",
            hint="leave it out: what it answers is held to the limits of its task in any case",
        )
    if floor is not None and questions.targets is None:
        raise InvalidInput(
            "--accuracy-floor needs samples whose right classes are known",
            hint="--samples DIR with one folder of images for each label of the model",
        )


def _read(subject: Subject, samples: Path) -> tuple[tuple[Arrays, ...], npt.NDArray[np.int64] | None]:
    contract = subject.deployment.version.contract
    specs = {spec.name: _input_spec(spec, subject.signature) for spec in subject.signature.inputs}
    arrays = read_samples(samples, specs, contract.preprocess, _MOST_SAMPLES)
    count = len(next(iter(arrays.values())))
    batched = subject.signature.batchable
    feeds = tuple(
        {name: array[number : number + 1] if batched else array[number] for name, array in arrays.items()}
        for number in range(count)
    )
    classifies = _classifies(subject.deployment.version.reading)
    return feeds, read_targets(samples, contract.labels, _MOST_SAMPLES) if classifies else None


def _classifies(reading: Reading | None) -> bool:
    return reading is None or isinstance(reading, Ranking | Classification)


def _input_spec(spec: TensorSpec, signature: Signature) -> InputSpec:
    sizes = spec.shape[1:] if signature.batchable else spec.shape
    return InputSpec(
        name=spec.name, dtype=spec.dtype, shape=tuple(size if isinstance(size, int) else 1 for size in sizes)
    )


def _make_up(subject: Subject) -> tuple[Arrays, ...]:
    with vanishing_cache() as cache:
        proven = subject.deployment.build(cache)
        with proven.session:
            synthetic, signature = proven.synthetic, proven.session.signature
    if synthetic is None:
        raise MeasurementError(
            f"no request could be made up that '{subject.name}' computes", hint="give some: --samples FILE.npz"
        )
    return tuple(synthetic.feeds(signature, seed=seed) for seed in range(_MADE_UP))


def _reference_answers(subject: Subject, feeds: Sequence[Arrays]) -> tuple[Arrays, ...]:
    deployment = subject.deployment
    with open_reference(deployment.version.graph_path, deployment.settings.op_libraries) as reference:
        return tuple(reference.run(each) for each in feeds)


def _can_be_joined(outputs: Sequence[Arrays]) -> bool:
    """Whether outputs have the same names, and shapes that differ in the first dimension alone."""
    shapes = [{name: np.shape(array)[1:] for name, array in each.items() if np.ndim(array)} for each in outputs]
    return all(each == shapes[0] and len(each) == len(outputs[0]) for each in shapes)


def _row(outputs: Arrays, number: int, *, whole: bool) -> Arrays:
    return outputs if whole else {name: array[number : number + 1] for name, array in outputs.items()}


def _best_class(outputs: Arrays, ranking: Ranking | None) -> int:
    if ranking:
        return int(outputs[ranking.indices].ravel()[0])
    return int(next(iter(outputs.values())).ravel().argmax())
