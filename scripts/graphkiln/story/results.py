"""Measurements of a story as stored on disk, their judgment by the numeric policy, and the document of `--json`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from graphkiln.story.variants import Variant
from graphkiln.story.workloads import Predictions
from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ManifestError, MeasurementError, VerificationError
from graphkiln_backend.graph.files import read_text
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.proof.comparison import prove
from graphkiln_backend.proof.decision import decide, scatter_scores
from graphkiln_backend.proof.policy import EXPORT, Limits, gradient_limits


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgment:
    """Result of comparing a variant with eager PyTorch.

    Attributes:
        passed: True if the policy allows the variant.
        error: Relative L2 error of the scores.
        limit: Maximum error that the policy allows.
        difference: Largest absolute difference of a score.
        same: Number of images with the same top-1 class.
        interval: 95% confidence interval of the share of equal top-1 classes.
        undecided: Reason why the agreement cannot be judged, or empty.
        right: Top-1 accuracy, or None if the true classes are unknown.
        gradient_error: Relative L2 error of the gradient, or None without one.
    """

    passed: bool
    verdict: str
    error: float
    limit: float
    difference: float
    samples: int
    same: int
    interval: tuple[float, float]
    undecided: str = ""
    right: float | None = None
    gradient_error: float | None = None


def judge(
    reference: Predictions, found: Predictions, limits: Limits, *, noise: float, targets: npt.NDArray[np.int64] | None
) -> Judgment:
    """Judge the predictions for the same images.

    Args:
        reference: Predictions of eager PyTorch, all scores `[images, classes]`.
        found: Predictions of the variant, all scores or the top k.
        limits: Row of the policy.
        noise: Largest score difference between fp32 variants; 0 for a variant in fp32.
        targets: True classes, int64 `[images]`, or None.
    """
    expected, scores, everything = reference.scores, found.scores, found.scores
    if found.indices is not None:
        expected = np.take_along_axis(expected, found.indices.astype(np.int64), axis=1)
        everything = scatter_scores(scores, found.indices, reference.scores.shape[1])
    difference = float(np.abs(np.subtract(scores, expected)).max())
    decision = decide(reference.scores, everything, limits, noise=noise or difference, targets=targets)
    failures = [] if decision.within(limits) else [str(decision)]
    verdict, error = _compare(expected, scores, limits, failures)
    verdicts, gradient_error = [verdict], None
    if found.gradients is not None and reference.gradients is not None:
        row = gradient_limits(limits, reference.noise)
        verdict, gradient_error = _compare(reference.gradients, found.gradients, row, failures)
        verdicts.append(verdict)
    return Judgment(
        passed=not failures,
        verdict="; ".join((*verdicts, str(decision))),
        error=error,
        limit=limits.relative_l2,
        difference=difference,
        samples=decision.samples,
        same=decision.agreeing,
        interval=decision.interval,
        undecided=decision.inconclusive,
        right=decision.accuracy[1] if decision.accuracy else None,
        gradient_error=gradient_error,
    )


def judge_parameter_gradients(judgment: Judgment, reference: AnyArray, found: AnyArray, noise: float) -> Judgment:
    """Add the gradients of the parameters to the judgment of an fp32 variant.

    Args:
        judgment: Judgment of the scores.
        reference: Gradients of eager PyTorch, `[values]`.
        found: Gradients of the variant, `[values]`.
        noise: Relative change of the gradients that fp32 rounding causes.
    """
    limits = gradient_limits(replace(EXPORT, name="static", worst_element=None), noise)
    failures: list[str] = []
    rows = reference[np.newaxis], found[np.newaxis]
    verdict, gradient_error = _compare(*rows, limits, failures)
    return replace(
        judgment,
        passed=judgment.passed and not failures,
        verdict=f"{judgment.verdict}; {verdict}",
        gradient_error=gradient_error,
    )


def _compare(expected: AnyArray, found: AnyArray, limits: Limits, failures: list[str]) -> tuple[str, float]:
    """Return the verdict and the relative L2 error; append the verdict to `failures` if the limits are exceeded."""
    try:
        proof = prove({"answers": expected}, {"answers": found}, limits, batch_sizes=(len(expected),))
    except VerificationError as error:
        failures.append(error.report)
        return error.report, error.relative_l2
    return proof.verdict, proof.relative_l2


_REFERENCE = "eager"  # baseline of all cumulative factors


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One measurement of one variant.

    Attributes:
        number: Number of the round, in which all variants are measured in turn.
        cores: CPU seconds per second of the process and its server.
        memory_mb: Memory of the process and its server at the end.
    """

    number: int
    per_second: float
    latencies_ms: tuple[float, ...]
    cores: float
    memory_mb: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Results of one variant.

    Attributes:
        refused: Reason why the variant was not executed, or empty.
        judgment: Judgment of its predictions, or None before the proof.
    """

    refused: str = ""
    judgment: Judgment | None = None
    rounds: tuple[Round, ...] = ()

    @property
    def passed(self) -> bool:
        """True if the predictions passed their judgment."""
        return self.judgment is not None and self.judgment.passed


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """Results of a complete or partial story. The field names are the keys of its file.

    Attributes:
        facts: Machine, versions and request, for display.
        derivative: `OUTPUT:INPUT` of the gradient; empty before the model is opened.
        precision: Lowest proven precision, or None before the proof.
        seen: Observations by key of the variant.
    """

    facts: dict[str, Any]
    derivative: str = ""
    precision: Precision | None = None
    seen: dict[str, Observation] = field(default_factory=dict)

    def observation(self, key: str) -> Observation:
        """Return the observation of a variant, or an empty one."""
        return self.seen.get(key, Observation())

    def write(self, path: Path) -> None:
        """Write the record atomically."""
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(encode(self)))
        partial.rename(path)

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a record.

        Raises:
            MeasurementError: The file cannot be read, is damaged, or has another version's format.
        """
        try:
            return decode(cls, json.loads(read_text(path)))
        except (OSError, ValueError, RecursionError, ManifestError) as error:
            raise MeasurementError(
                f"cannot resume from {path}: {error}", hint="start again without --resume"
            ) from error


def build_document(
    variants: Sequence[Variant], record: Record, commands: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Build the document of `--json`; factors are relative to the nearest baseline that counts."""
    steps: list[dict[str, Any]] = []
    for variant in variants:
        counting = {step["key"] for step in steps if step["counts"]}
        step = _step(variant, record, _baseline(variant, counting, variants))
        steps.append({**step, "commands": list(commands[variant.key])})
    return {"facts": record.facts, "precision": record.precision, "steps": steps}


def _baseline(variant: Variant, counting: Collection[str], variants: Sequence[Variant]) -> str:
    """Find the key of the nearest baseline that counts."""
    parents = {other.key: other.baseline for other in variants}
    key = variant.baseline
    while key and key not in counting:
        key = parents.get(key, "")
    return key


def _step(variant: Variant, record: Record, baseline: str) -> dict[str, Any]:
    """Describe one variant; values that were not measured are None."""
    observation = record.observation(variant.key)
    rounds, passed = observation.rounds, observation.passed
    latencies = [latency for measured in rounds for latency in measured.latencies_ms]
    return {
        "key": variant.key,
        "step": variant.step,
        "title": variant.title,
        "switch": variant.switch,
        "per_second": _median(measured.per_second for measured in rounds),
        "rounds": {measured.number: measured.per_second for measured in rounds},
        "p50_ms": float(np.percentile(latencies, 50)) if latencies else None,
        "p99_ms": float(np.percentile(latencies, 99)) if latencies else None,
        "own": _speed_up(observation, record.observation(baseline)) if passed else None,
        "beside": baseline,
        # A switch is not part of the chain of steps.
        "cumulative": _speed_up(observation, record.observation(_REFERENCE)) if passed and not variant.switch else None,
        "source": variant.reported,
        "cores": _median(measured.cores for measured in rounds),
        "memory_mb": _median(measured.memory_mb for measured in rounds),
        "judgment": encode(observation.judgment) if observation.judgment else None,
        "refused": observation.refused,
        "counts": passed and bool(rounds),
    }


def _speed_up(observation: Observation, reference: Observation) -> float | None:
    """Compute the median ratio over common rounds, so that changes of the machine's speed cancel out."""
    rates = {measured.number: measured.per_second for measured in reference.rounds}
    return _median(
        measured.per_second / rates[measured.number] for measured in observation.rounds if measured.number in rates
    )


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None
