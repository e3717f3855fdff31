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
from graphkiln_backend.proof.ranks import score_indices

if TYPE_CHECKING:
    import numpy.typing as npt

    from graphkiln_backend.proof import decision, tasks
    from graphkiln_backend.proof.decision import Decision, TaskDecision
    from graphkiln_backend.proof.tasks import TaskTargets
else:
    decision = LazyModule("graphkiln_backend.proof.decision")  # what converts asks for these two, and few instances
    tasks = LazyModule("graphkiln_backend.proof.tasks")

# The negative control is perturbed by this many times the limit: far enough that a working check must fail it.
_CONTROL_SCALE = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputError:
    """Error of one output beside its reference.

    Attributes:
        name: The output.
        relative_l2: `|y - r| / |r|`; infinite when shape, dtype, or NaN and Inf differ.
        worst_element: `max |y - r| / (|r| + RMS(r))`.
        disagreement: For outputs that are not floating-point (classes, indices, text): the share of elements that
            differ. Their two errors above are 0.
        fault: Why the two cannot be compared, or empty.
        rounding: Unit roundoff of the output's type.
    """

    name: str
    relative_l2: float
    worst_element: float
    disagreement: float = 0.0
    fault: str = ""
    rounding: float = 0.0

    def limits(self, row: Limits) -> Limits:
        """A row of the policy for this output: nothing is held to less than its type can tell apart."""
        return row.at_least(ROUNDINGS * self.rounding)

    def within(self, row: Limits) -> bool:
        """Return true for an error inside the limits."""
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


def compare(reference: Mapping[str, AnyArray], outputs: Mapping[str, AnyArray]) -> tuple[OutputError, ...]:
    """Measure every output of the reference.

    Args:
        reference: Trusted outputs by name.
        outputs: Outputs to judge, by name; a missing one is a fault, and so is a surplus one.
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
    targets: TaskTargets | None = None,
    reading: Reading | None = None,
    samples: int | None = None,
) -> Verification:
    """Compare outputs within the limits of the policy, and test the check itself by a negative control.

    Args:
        reference: Trusted outputs by name, `[samples, ...]` each.
        outputs: Outputs to judge.
        limits: Row of the policy.
        batch_sizes: Batch sizes at which the outputs were computed; recorded.
        noise: Largest difference of a score that fp32 itself makes; judges the decisions of score outputs, too.
        targets: What is on the samples, where it is known: true classes, `[samples]`, or what the task takes.
        reading: What users read from the outputs, judged beside the numbers: indices of a ranking by their scores.
        samples: How many samples there are; None for as many as the first output has rows.

    Raises:
        VerificationError: An output is outside its limits, a perturbed copy would have passed, or the reference of an
            output is NaN alone.
    """
    ranking = reading if isinstance(reading, Ranking) else None
    task = None if isinstance(reading, Ranking) else reading
    if ranking and not {ranking.scores, ranking.indices} <= reference.keys() & outputs.keys():
        ranking = None  # of a part of the outputs
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
    """The figures that were measured, beside their limits."""
    worst = max(errors, key=lambda error: error.relative_l2 / error.limits(limits).relative_l2)
    relative_l2, limit = worst.relative_l2, worst.limits(limits).relative_l2
    figures = (
        f"error {relative_l2:.2g} of signal (limit {limit:.0e})",
        *map(str, decisions),
        f"{samples} samples",
        *(["the same outputs for each: they decide little, give samples that differ"] if alike else []),
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
        return _fault(name, "has NaN or Inf where the reference has none or another, or the reverse")
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
    """Both by the power of two that brings the largest reference near 1: the squares of others may leave fp64."""
    exponent = int(np.frexp(np.max(np.abs(expected), initial=0.0))[1])
    with np.errstate(over="ignore"):  # what becomes infinite is far from its reference
        return np.ldexp(expected, -exponent), np.ldexp(computed, -exponent)


def _is_float(array: AnyArray) -> bool:
    return DType.from_numpy(array.dtype).is_float


def _fault(name: str, fault: str) -> OutputError:
    return OutputError(name=name, relative_l2=np.inf, worst_element=np.inf, fault=fault)


def _check_says_something(reference: Mapping[str, AnyArray]) -> None:
    """Refuse a reference without any number: every graph that fails as it does would equal it."""
    for name, array in reference.items():
        if _is_float(array) and array.size and np.isnan(array.astype(np.float64)).all():
            raise VerificationError(
                "the samples prove nothing",
                report=f"{name} is NaN for each of them",
                hint="give samples of which the source makes numbers: --samples",
            )


def _check_negative_control(reference: Mapping[str, AnyArray], limits: Limits) -> None:
    """Perturb a copy beyond the limit and require that the same check refuses it."""
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
    """Return true where there is an element to perturb: of floats, one that is neither zero nor infinite nor NaN."""
    if not _is_float(array):
        return array.size > 0
    exact = array.astype(np.float64)
    return bool(np.any(np.isfinite(exact) & (exact != 0)))


def _perturb(array: AnyArray, limits: Limits) -> AnyArray:
    """A copy beyond the limit, away from zero; by one step of its type at least, where that is more."""
    if not _is_float(array):
        return _exchange(array, limits)
    row = limits.at_least(ROUNDINGS * rounding_of(DType.from_numpy(array.dtype)))
    exact = array.astype(np.float64)
    with np.errstate(over="ignore"):  # what becomes infinite is refused as well
        scaled: AnyArray = (exact * (1 + _CONTROL_SCALE * row.relative_l2)).astype(array.dtype)
        next_away = np.nextafter(array, np.copysign(np.inf, exact).astype(array.dtype))
    return np.where((scaled == array) & (exact != 0), next_away, scaled)


def _exchange(array: AnyArray, limits: Limits) -> AnyArray:
    """A copy of classes, indices or text in which more elements differ than the limit allows."""
    flat = as_text(array).ravel().copy()
    differing = min(flat.size, int(_CONTROL_SCALE * (1 - limits.top1_agreement) * flat.size) + 1)
    if flat.dtype.kind in "OSU":
        flat = flat.astype(np.object_)
        flat[:differing] = [f"{text}." for text in flat[:differing]]
    else:
        # The last bit: another class, the other truth.
        flat[:differing] = np.bitwise_xor(flat[:differing], np.ones(differing, flat.dtype))
    return flat.reshape(array.shape)


def _all_alike(reference: Mapping[str, AnyArray]) -> bool:
    """Return true for outputs without floats that are the same for several samples: they decide nothing."""
    arrays = [as_text(array) for array in reference.values()]
    if any(_is_float(array) or array.ndim == 0 or len(array) < 2 for array in arrays):
        return False
    return all(bool(np.all(array[:1] == array)) for array in arrays)
