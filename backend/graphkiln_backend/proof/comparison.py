"""Compares a graph's outputs with a reference, output by output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.graph.manifest import Verification
from graphkiln_backend.graph.ranking import Ranking
from graphkiln_backend.proof.decision import Decision, decide
from graphkiln_backend.proof.policy import Limits
from graphkiln_backend.proof.ranks import all_scores, comparable

_CONTROL_SCALE = 3.0
"""The negative control is perturbed by this many times the limit: far enough that a working check must fail it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputError:
    """How far one output is from its reference.

    Attributes:
        name: The output.
        relative_l2: `|y - r| / |r|`; infinite when shape, dtype or the places of NaN/Inf differ.
        worst_element: `max |y - r| / (|r| + RMS(r))`.
        disagreement: For outputs that are not floating-point (decisions: classes, indices, words): the share of
            elements that differ. Their two errors above are 0.
        fault: Why the two cannot be compared, or empty.
    """

    name: str
    relative_l2: float
    worst_element: float
    disagreement: float = 0.0
    fault: str = ""

    def within(self, limits: Limits) -> bool:
        """Whether the error is inside the limits."""
        worst_fits = limits.worst_element is None or self.worst_element <= limits.worst_element
        agrees = self.disagreement <= 1 - limits.top1_agreement
        return not self.fault and self.relative_l2 <= limits.relative_l2 and worst_fits and agrees

    def __str__(self) -> str:
        if self.fault:
            return f"{self.name}: {self.fault}"
        if self.disagreement:
            return f"{self.name}: {self.disagreement:.2%} of the elements differ"
        return f"{self.name}: relative L2 {self.relative_l2:.2g}, worst element {self.worst_element:.2g}"


def compare(reference: Mapping[str, AnyArray], outputs: Mapping[str, AnyArray]) -> tuple[OutputError, ...]:
    """Measures every output of the reference.

    Args:
        reference: Trusted outputs by name.
        outputs: Outputs to judge, by name; a missing one is a fault, a surplus one too.
    """
    surplus = [_fault(name, "is not in the reference") for name in outputs if name not in reference]
    return (*(_compare_output(name, reference[name], outputs.get(name)) for name in reference), *surplus)


def prove(
    reference: Mapping[str, AnyArray],
    outputs: Mapping[str, AnyArray],
    limits: Limits,
    *,
    batch_sizes: tuple[int, ...],
    noise: float | None = None,
    targets: npt.NDArray[np.int64] | None = None,
    ranking: Ranking | None = None,
) -> Verification:
    """Holds outputs to the policy, and the check itself to a negative control.

    Args:
        reference: Trusted outputs by name, `[samples, ...]` each.
        outputs: Outputs to judge.
        limits: Row of the policy.
        batch_sizes: Batch sizes at which the outputs were computed; recorded.
        noise: Largest difference of a score that fp32 itself makes; judges the decisions of score outputs, too. None
            where the answers are fp32 themselves.
        targets: The right classes of score outputs, `[samples]`, where they are known.
        ranking: Of a graph that ranks its classes itself: indices are judged by their scores.

    Raises:
        VerificationError: An output is outside its limits, or a perturbed copy would have passed.
    """
    if ranking and not {ranking.scores, ranking.indices} <= reference.keys() & outputs.keys():
        ranking = None  # of a part of the outputs
    scored, scored_outputs = comparable(reference, outputs, ranking) if ranking else (reference, outputs)
    errors = compare(scored, scored_outputs)
    relative_l2 = max(error.relative_l2 for error in errors)
    worst_element = max(error.worst_element for error in errors)
    samples = len(next(iter(reference.values())))
    failed: list[object] = [error for error in errors if not error.within(limits)]
    decisions = (
        [] if noise is None else _decisions(reference, outputs, limits, noise=noise, targets=targets, ranking=ranking)
    )
    failed += [decision for decision in decisions if not decision.within(limits)]
    detail = "; ".join(map(str, failed))
    verdict = (
        f"{limits.step}: error {relative_l2:.2g} of signal (limit {limits.relative_l2:.0e}), "
        + "".join(f"{decision}, " for decision in decisions)
        + f"{samples} samples, batch sizes {', '.join(map(str, batch_sizes))} - {'FAIL' if failed else 'PASS'}"
    )
    if failed:
        raise VerificationError("the answers changed", report=f"{verdict}: {detail}")
    _check_negative_control(scored, limits)
    return Verification(
        step=limits.step,
        samples=samples,
        batch_sizes=batch_sizes,
        relative_l2=relative_l2,
        relative_l2_limit=limits.relative_l2,
        worst_element=worst_element,
        worst_element_limit=limits.worst_element,
        verdict=verdict,
    )


def _decisions(
    reference: Mapping[str, AnyArray],
    outputs: Mapping[str, AnyArray],
    limits: Limits,
    *,
    noise: float,
    targets: npt.NDArray[np.int64] | None,
    ranking: Ranking | None,
) -> list[Decision]:
    """Of every score output: floating-point, `[samples, classes]`; of one that is ranked, of all its classes."""
    if ranking and reference[ranking.scores].ndim == 2:
        classes = 1 + max(int(arrays[ranking.indices].max()) for arrays in (reference, outputs))
        reference, outputs = (
            {**arrays, ranking.scores: all_scores(arrays[ranking.scores], arrays[ranking.indices], classes)}
            for arrays in (reference, outputs)
        )
    scores = [name for name, array in reference.items() if array.ndim == 2 and array.shape[1] > 1 and _is_float(array)]
    return [
        decide(reference[name], outputs[name], limits, noise=noise, targets=targets)
        for name in scores
        if name in outputs
    ]


def _compare_output(name: str, reference: AnyArray, output: AnyArray | None) -> OutputError:
    if output is None:
        return _fault(name, "is missing")
    if output.shape != reference.shape or output.dtype != reference.dtype:
        return _fault(name, f"is {output.dtype}{list(output.shape)}, not {reference.dtype}{list(reference.shape)}")
    if not _is_float(reference):
        differ = float(np.mean(reference != output)) if reference.size else 0.0
        return OutputError(name=name, relative_l2=0.0, worst_element=0.0, disagreement=differ)
    expected = reference.astype(np.float64)
    got = output.astype(np.float64)
    finite = np.isfinite(expected)
    if not np.array_equal(finite, np.isfinite(got)):
        return _fault(name, "has NaN or Inf where the reference has not, or the reverse")
    difference = np.abs(got[finite] - expected[finite])
    magnitude = np.abs(expected[finite])
    rms = float(np.sqrt(np.mean(magnitude**2))) if magnitude.size else 0.0
    if rms == 0.0:
        error = 0.0 if not difference.any() else np.inf
        return OutputError(name=name, relative_l2=error, worst_element=error)
    return OutputError(
        name=name,
        relative_l2=float(np.linalg.norm(difference) / np.linalg.norm(magnitude)),
        worst_element=float(np.max(difference / (magnitude + rms))),
    )


def _is_float(array: AnyArray) -> bool:
    return DType.from_numpy(array.dtype).is_float


def _fault(name: str, fault: str) -> OutputError:
    return OutputError(name=name, relative_l2=np.inf, worst_element=np.inf, fault=fault)


def _check_negative_control(reference: Mapping[str, AnyArray], limits: Limits) -> None:
    """Perturbs a copy beyond the limit and sees the same check refuse it."""
    scale = 1 + _CONTROL_SCALE * limits.relative_l2
    perturbed = {
        name: (array.astype(np.float64) * scale).astype(array.dtype) if _is_float(array) else array
        for name, array in reference.items()
    }
    floats = [name for name, array in reference.items() if _is_float(array) and np.any(array)]
    errors = {error.name: error for error in compare(reference, perturbed)}
    passed = [name for name in floats if errors[name].within(limits)]
    if passed:
        raise VerificationError(
            "the check cannot tell a perturbed copy from the reference",
            report=f"negative control passed on {', '.join(passed)}",
            hint="report this: the comparison is broken",
        )
