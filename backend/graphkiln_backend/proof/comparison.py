"""Comparison of a graph's outputs with a reference, output by output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graphkiln_backend.graph.arrays import as_text
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.graph.manifest import Verification
from graphkiln_backend.graph.modules import LazyModule
from graphkiln_backend.graph.task import Ranking, Reading, is_classification
from graphkiln_backend.proof.policy import ROUNDINGS, Limits, rounding_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from graphkiln_backend.proof import decision, tasks
    from graphkiln_backend.proof.decision import Decision, TaskDecision
    from graphkiln_backend.proof.tasks import TaskTargets
else:
    decision = LazyModule("graphkiln_backend.proof.decision")  # these two are needed by conversions, not by instances
    tasks = LazyModule("graphkiln_backend.proof.tasks")

Arrays = Mapping[str, AnyArray]

_CONTROL_SCALE = 3.0  # the negative control is perturbed by this many times the limit


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputError:
    """Error of one output relative to its reference.

    Attributes:
        name: Name of the output.
        relative_l2: `|y - r| / |r|`; infinite if shape, dtype, or the positions of NaN and Inf differ.
        worst_element: `max |y - r| / (|r| + RMS(r))`.
        disagreement: Share of elements that differ, for outputs that are not floating-point (classes, indices, text);
            their numeric errors are 0.
        fault: Reason why the two cannot be compared, or empty.
        rounding: Unit roundoff of the output's dtype.
    """

    name: str
    relative_l2: float
    worst_element: float
    disagreement: float = 0.0
    fault: str = ""
    rounding: float = 0.0

    def limits(self, row: Limits) -> Limits:
        """Return the row, loosened to the precision of the output's dtype."""
        return row.at_least(ROUNDINGS * self.rounding)

    def within(self, row: Limits) -> bool:
        """Return true if the error is within the limits."""
        limits = self.limits(row)
        worst_fits = limits.worst_element is None or self.worst_element <= limits.worst_element
        agrees = self.disagreement <= 1 - limits.top1_agreement
        return not self.fault and self.relative_l2 <= limits.relative_l2 and worst_fits and agrees

    def __str__(self) -> str:
        if self.fault:
            return f"{self.name}: {self.fault}"
        if self.disagreement:
            return f"{self.name}: {self.disagreement:.2%} of the elements differ"
        return f"{self.name}: relative L2 {self.relative_l2:.2g}, worst element {self.worst_element:.2g}"


def compare(reference: Arrays, outputs: Arrays) -> tuple[OutputError, ...]:
    """Measure every output of the reference.

    Args:
        reference: Trusted outputs by name.
        outputs: Outputs to judge, by name; missing and surplus outputs are faults.
    """
    surplus = [_fault(name, "is not in the reference") for name in outputs if name not in reference]
    return (*(_compare_output(name, reference[name], outputs.get(name)) for name in reference), *surplus)


def prove(
    reference: Arrays,
    outputs: Arrays,
    limits: Limits,
    *,
    batch_sizes: tuple[int, ...],
    noise: float | None = None,
    targets: TaskTargets | None = None,
    reading: Reading | None = None,
    samples: int | None = None,
) -> Verification:
    """Compare outputs within the limits of the policy, and test the check itself by a negative control.

    Args:
        reference: Trusted outputs by name, `[samples, ...]` each.
        outputs: Outputs to judge.
        limits: Policy row.
        batch_sizes: Batch sizes at which the outputs were computed, for the record.
        noise: Largest score difference caused by fp32 itself; None to leave top-1 decisions out.
        targets: Labels of the samples: true classes, `[samples]`, or targets of the task.
        reading: Interpretation of the outputs by users, judged in addition to the numbers.
        samples: Number of samples; None for the number of rows of the first output.

    Raises:
        VerificationError: An output is outside its limits, a perturbed copy would have passed, or a reference output
            is NaN everywhere.
    """
    ranking = reading if isinstance(reading, Ranking) else None
    task = None if isinstance(reading, Ranking) else reading
    if ranking and not {ranking.scores, ranking.indices} <= reference.keys() & outputs.keys():
        ranking = None  # only some of the outputs were computed
    judged = outputs
    decisions: list[Decision | TaskDecision] = []
    if reads_task := not is_classification(task):
        judgment = tasks.judge(task, reference, outputs, limits, noise=noise or 0.0, targets=targets)
        judged, decisions = judgment.outputs, [*judgment.decisions]
    trusted, judged = score_indices(reference, judged, ranking) if ranking else (reference, judged)
    errors = compare(trusted, judged)
    if noise is not None and not reads_task and not any(error.fault for error in errors):
        classes = targets if isinstance(targets, np.ndarray) else None
        decisions += decision.decide_outputs(reference, outputs, limits, noise=noise, targets=classes, ranking=ranking)
    findings: list[OutputError | Decision | TaskDecision] = [*errors, *decisions]
    failures = [str(finding) for finding in findings if not finding.within(limits)]
    count = len(next(iter(reference.values()))) if samples is None else samples
    passed, alike = not failures, _all_alike(trusted)
    verification = _record(
        errors, decisions, limits, samples=count, batch_sizes=batch_sizes, passed=passed, alike=alike
    )
    if failures:
        report = f"{verification.verdict}: {'; '.join(failures)}"
        raise VerificationError("the outputs changed", report=report, relative_l2=verification.relative_l2)
    _check_says_something(trusted)
    _check_negative_control(trusted, limits)
    if reads_task:
        tasks.check_controls(task, reference, limits)
    return verification


def _record(
    errors: Sequence[OutputError],
    decisions: Sequence[Decision | TaskDecision],
    limits: Limits,
    *,
    samples: int,
    batch_sizes: tuple[int, ...],
    passed: bool,
    alike: bool,
) -> Verification:
    """Record the measured figures and their limits."""
    worst = max(errors, key=lambda error: error.relative_l2 / error.limits(limits).relative_l2)
    relative_l2, limit = worst.relative_l2, worst.limits(limits).relative_l2
    figures = (
        f"error {relative_l2:.2g} of signal (limit {limit:.0e})",
        *map(str, decisions),
        f"{samples} samples",
        *(["all with the same outputs: give samples that differ"] if alike else []),
        f"batch sizes {', '.join(map(str, batch_sizes))}" if batch_sizes else "whole inputs",
    )
    return Verification(
        step=limits.name,
        samples=samples,
        batch_sizes=batch_sizes,
        relative_l2=relative_l2,
        relative_l2_limit=limit,
        worst_element=max(error.worst_element for error in errors),
        worst_element_limit=max((error.limits(limits).worst_element or 0.0 for error in errors), default=0.0) or None,
        verdict=f"{limits.name}: {', '.join(figures)} - {'PASS' if passed else 'FAIL'}",
    )


def _compare_output(name: str, reference: AnyArray, output: AnyArray | None) -> OutputError:
    if output is None:
        return _fault(name, "is missing")
    reference, output = as_text(reference), as_text(output)
    if output.shape != reference.shape or output.dtype != reference.dtype:
        return _fault(name, f"is {output.dtype}{list(output.shape)}, not {reference.dtype}{list(reference.shape)}")
    if not _is_float(reference):
        differ = float(np.mean(reference != output)) if reference.size else 0.0
        return OutputError(name=name, relative_l2=0.0, worst_element=0.0, disagreement=differ)
    expected = reference.astype(np.float64)
    computed = output.astype(np.float64)
    finite = np.isfinite(expected) & np.isfinite(computed)
    if not np.array_equal(expected[~finite], computed[~finite], equal_nan=True):
        return _fault(name, "has NaN or Inf in other places than the reference")
    expected, computed = _near_one(expected[finite], computed[finite])
    difference, magnitude = np.abs(computed - expected), np.abs(expected)
    rms = float(np.sqrt(np.mean(magnitude**2))) if magnitude.size else 0.0
    rounding = rounding_of(DType.from_numpy(reference.dtype))
    if rms == 0.0:
        error = 0.0 if not difference.any() else np.inf
        return OutputError(name=name, relative_l2=error, worst_element=error, rounding=rounding)
    return OutputError(
        name=name,
        relative_l2=float(np.linalg.norm(difference) / np.linalg.norm(magnitude)),
        worst_element=float(np.max(difference / (magnitude + rms))),
        rounding=rounding,
    )


def _near_one(
    expected: npt.NDArray[np.float64], computed: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Scale both by the power of two that brings the largest reference near 1, so that squares stay within fp64."""
    exponent = int(np.frexp(np.max(np.abs(expected), initial=0.0))[1])
    with np.errstate(over="ignore"):  # infinite values are far from the reference, too
        return np.ldexp(expected, -exponent), np.ldexp(computed, -exponent)


def _is_float(array: AnyArray) -> bool:
    return DType.from_numpy(array.dtype).is_float


def _fault(name: str, fault: str) -> OutputError:
    return OutputError(name=name, relative_l2=np.inf, worst_element=np.inf, fault=fault)


def score_indices(reference: Arrays, outputs: Arrays, ranking: Ranking) -> tuple[Arrays, Arrays]:
    """Replace the class indices of a top-k on both sides by the reference's scores of these classes.

    Two graphs that differ by rounding order near ties differently, so a class in another place is only as wrong as its
    score differs. A class outside the reference's top k gets the lowest score of the top k.

    Args:
        reference: Trusted outputs by name, among them scores and indices, `[samples, k]`.
        outputs: Outputs to judge.
        ranking: Names of scores and indices.

    Returns:
        Reference and outputs; unchanged if the indices cannot be compared, so that the comparison reports them.
    """
    if not _are_indices(reference, outputs, ranking):
        return reference, outputs
    best, scores = reference[ranking.indices], reference[ranking.scores]
    chosen = outputs[ranking.indices]
    matches = chosen[..., :, np.newaxis] == best[..., np.newaxis, :]
    matched = np.take_along_axis(scores, matches.argmax(axis=-1), axis=-1)
    chosen_scores = np.where(matches.any(axis=-1), matched, scores[..., -1:])
    return {**reference, ranking.indices: scores}, {**outputs, ranking.indices: chosen_scores.astype(scores.dtype)}


def _are_indices(reference: Arrays, outputs: Arrays, ranking: Ranking) -> bool:
    """Return true if the outputs have a class index for each score of the reference."""
    expected, judged = reference[ranking.indices], outputs[ranking.indices]
    alike = expected.shape == judged.shape == reference[ranking.scores].shape and expected.dtype == judged.dtype
    return alike and bool(expected.size) and int(judged.min()) >= 0


def _check_says_something(reference: Arrays) -> None:
    """Refuse a reference of NaN only, which would equal every graph that fails in the same way."""
    for name, array in reference.items():
        if _is_float(array) and array.size and np.isnan(array.astype(np.float64)).all():
            raise VerificationError(
                "the samples prove nothing",
                report=f"{name} is NaN for each of them",
                hint="give valid samples: --samples",
            )


def _check_negative_control(reference: Arrays, limits: Limits) -> None:
    """Require that the check refuses a copy that is perturbed beyond the limit."""
    reference = {name: array for name, array in reference.items() if _can_be_perturbed(array)}
    perturbed = {name: _perturb(array, limits) for name, array in reference.items()}
    passed = [error.name for error in compare(reference, perturbed) if error.within(limits)]
    if passed:
        raise VerificationError(
            "the check cannot tell a perturbed copy from the reference",
            report=f"negative control passed on {', '.join(passed)}",
            hint="report this: the comparison is broken",
        )


def _can_be_perturbed(array: AnyArray) -> bool:
    """Return true if an element can be perturbed: for floats, one that is finite and not zero."""
    if not _is_float(array):
        return array.size > 0
    exact = array.astype(np.float64)
    return bool(np.any(np.isfinite(exact) & (exact != 0)))


def _perturb(array: AnyArray, limits: Limits) -> AnyArray:
    """Return a copy beyond the limit, away from zero, by at least one step of its dtype."""
    if not _is_float(array):
        return _exchange(array, limits)
    row = limits.at_least(ROUNDINGS * rounding_of(DType.from_numpy(array.dtype)))
    exact = array.astype(np.float64)
    with np.errstate(over="ignore"):  # infinite values are refused as well
        scaled: AnyArray = (exact * (1 + _CONTROL_SCALE * row.relative_l2)).astype(array.dtype)
        next_away = np.nextafter(array, np.copysign(np.inf, exact).astype(array.dtype))
    return np.where((scaled == array) & (exact != 0), next_away, scaled)


def _exchange(array: AnyArray, limits: Limits) -> AnyArray:
    """Return a copy of classes, indices or text with more differences than the limit allows."""
    flat = as_text(array).ravel().copy()
    differing = min(flat.size, int(_CONTROL_SCALE * (1 - limits.top1_agreement) * flat.size) + 1)
    if flat.dtype.kind in "OSU":
        flat = flat.astype(np.object_)
        flat[:differing] = [f"{text}." for text in flat[:differing]]
    else:
        # Flip the last bit: another class, or the opposite boolean.
        flat[:differing] = np.bitwise_xor(flat[:differing], np.ones(differing, flat.dtype))
    return flat.reshape(array.shape)


def _all_alike(reference: Arrays) -> bool:
    """Return true if no output is floating-point and all samples have the same outputs, which proves nothing."""
    arrays = [as_text(array) for array in reference.values()]
    if any(_is_float(array) or array.ndim == 0 or len(array) < 2 for array in arrays):
        return False
    return all(bool(np.all(array[:1] == array)) for array in arrays)
