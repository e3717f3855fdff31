"""The space of candidates: one axis per key, and constraints that give a reason for each excluded combination."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

from graphkiln.tuning.candidate import (
    CONV_SEARCH,
    ENGINE,
    ENGINES_CHOICE,
    INSTANCES,
    LAYOUT,
    MAX_BATCH_SIZE,
    PRECISION,
    PREFERRED,
    QUEUE_DELAY_US,
    SPIN,
    STREAMS,
    THREADS,
    Candidate,
    Value,
    default_values,
)
from graphkiln.tuning.subject import Subject
from graphkiln.tuning.target import Target
from graphkiln.tuning.trials import Failed, SessionTiming
from graphkiln_backend.engines.hardware import missing_instructions
from graphkiln_backend.engines.registry import probe
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_backend.lowering.settings import CONV_SEARCHES, LAYOUTS
from graphkiln_backend.repository.config_changes import NO_BATCHER

# Returns the reason why a candidate is excluded, or "".
Constraint = Callable[[Candidate], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """A key and its values.

    Attributes:
        key: Key of `Candidate`.
        values: At least one; the first is today's value, and later ones count as less simple.
    """

    key: str
    values: tuple[Value, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exclusion:
    """A candidate that was not measured.

    Attributes:
        candidate: The candidate.
        reason: Message for reports.
        by_budget: A larger budget would have allowed the measurement.
    """

    candidate: Candidate
    reason: str
    by_budget: bool = False


@dataclass(frozen=True, kw_only=True)
class Space:
    """All combinations of the axes' values except those that violate a constraint.

    Attributes:
        axes: One axis per key.
        constraints: Rules; the first violated one gives the reason.
        served: Today's configuration if a key was fixed to another value; None for the first value of each axis.
        left_out: Messages about values and keys that are not tried.
    """

    axes: tuple[Axis, ...]
    constraints: tuple[Constraint, ...] = ()
    served: Candidate | None = None
    left_out: tuple[str, ...] = ()

    @property
    def points(self) -> int:
        """Number of combinations, including excluded ones."""
        return prod(len(axis.values) for axis in self.axes)

    @property
    def default(self) -> Candidate:
        """Candidate with the first value of each axis."""
        return Candidate.of({axis.key: axis.values[0] for axis in self.axes})

    @property
    def today(self) -> Candidate:
        """Today's configuration, which may be outside of the space."""
        return self.served or self.default

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """Candidates that satisfy all constraints, simplest first."""
        return tuple(candidate for candidate, reason in self._judged if not reason)

    @cached_property
    def exclusions(self) -> tuple[Exclusion, ...]:
        """Candidates that violate a constraint."""
        return tuple(Exclusion(candidate=candidate, reason=reason) for candidate, reason in self._judged if reason)

    def reasons(self) -> dict[str, int]:
        """Count excluded candidates by reason, most frequent first."""
        return dict(Counter(exclusion.reason for exclusion in self.exclusions).most_common())

    def simplicity(self, candidate: Candidate) -> tuple[int, int, str]:
        """Return a sort key: number of changed values, their distance from the default, the id."""
        steps = [self._positions[axis.key].get(candidate[axis.key], len(axis.values)) for axis in self.axes]
        return sum(step > 0 for step in steps), sum(steps), candidate.id

    def neighbors(self, candidate: Candidate) -> tuple[Candidate, ...]:
        """Return the legal candidates one step away: the next value on either side of one axis.

        Trading threads for instances is one step, too: a path through single steps would need configurations with too
        few or too many busy cores.
        """
        found = self._exchanges(candidate)
        for axis in self.axes:
            at = self._positions[axis.key][candidate[axis.key]]
            nearby = [axis.values[each] for each in (at - 1, at + 1) if 0 <= each < len(axis.values)]
            found += [candidate.with_values({axis.key: value}) for value in nearby]
        return tuple(each for each in found if not self.objection(each))

    def _exchanges(self, candidate: Candidate) -> list[Candidate]:
        """Return candidates with the same total number of threads in more or fewer instances."""
        values = {axis.key: axis.values for axis in self.axes}
        cores = candidate.number(THREADS) * candidate.number(INSTANCES)
        pairs = product(values.get(THREADS, ()), values.get(INSTANCES, ()))
        found = [candidate.with_values({THREADS: threads, INSTANCES: instances}) for threads, instances in pairs]
        same = [each for each in found if each.number(THREADS) * each.number(INSTANCES) == cores]
        return [each for each in same if each != candidate]

    def objection(self, candidate: Candidate) -> str:
        """Return the reason of the first violated constraint, or ""."""
        return next(filter(None, (constraint(candidate) for constraint in self.constraints)), "")

    def fixed(self, values: Mapping[str, Value]) -> Space:
        """Return a space in which some keys have a single value, which may be new to the axis.

        Raises:
            InvalidInput: A key has no axis.
        """
        self.check_keys(values)
        fixed = (replace(axis, values=(values[axis.key],)) if axis.key in values else axis for axis in self.axes)
        return replace(self, axes=tuple(fixed), served=self.today)

    def check_keys(self, keys: Iterable[str]) -> None:
        """Check that each key has an axis.

        Raises:
            InvalidInput: A key has no axis.
        """
        known = [axis.key for axis in self.axes]
        for key in keys:
            if key not in known:
                raise InvalidInput(f"'{key}' is not tuned for this model", hint=did_you_mean(key, known))

    @cached_property
    def _judged(self) -> list[tuple[Candidate, str]]:
        keys = [axis.key for axis in self.axes]
        points = [Candidate.of(dict(zip(keys, each, strict=True))) for each in product(*(a.values for a in self.axes))]
        return [(each, self.objection(each)) for each in sorted(points, key=self.simplicity)]

    @cached_property
    def _positions(self) -> dict[str, dict[Value, int]]:
        return {axis.key: {value: number for number, value in enumerate(axis.values)} for axis in self.axes}


_LARGEST_BATCH = 64
_LARGEST_GPU_BATCH = 128
_DELAYS_US = (0, 100, 500, 2000, 5000, 20000)
_GPU_INSTANCES = (1, 2, 4)
# Engines to try on a CPU (False) and on a GPU (True).
_ENGINES = {False: ("onnxruntime", "openvino"), True: ("onnxruntime", "tensorrt")}
# Key -> keys that constrain it, and values to try in addition to today's if one of these keys varies.
_FOLLOWING: Mapping[str, tuple[tuple[str, ...], Sequence[Value]]] = {
    SPIN: ((ENGINE, THREADS, INSTANCES), (False,)),
    THREADS: ((INSTANCES,), range(1, 1 << 10)),
    STREAMS: ((ENGINE, THREADS, MAX_BATCH_SIZE), (1,)),
    QUEUE_DELAY_US: ((MAX_BATCH_SIZE,), (0, NO_BATCHER)),
    PREFERRED: ((MAX_BATCH_SIZE, QUEUE_DELAY_US), ((),)),
}
_NEVER_TUNED = {
    "execution_mode, inter_op_thread_count": "unchanged: instances and streams use the same cores",
    "optimization.graph.level": "unchanged: the default already optimizes the graph fully",
    "enable_mem_arena, enable_mem_pattern": "unchanged: the arena is on for speed, patterns only cost memory",
    "self_test": "unchanged: unproven models are not served",
    "rate_limiter, priorities": "share a machine between models, but a search measures one",
    "preserve_ordering": "only affects requests that wait for others",
    "queue policies": "refuse or delay requests, but a target is met without them",
    "model_warmup, fallback": "only affect the time before the first request",
    "enable_cuda_graph, gpu_mem_limit and the like": "options of an accelerator stay as in config.pbtxt",
}


def span_space(subject: Subject, *, p99_s: float) -> Space:
    """Return the space of a model on this machine, with queue delays below half of the target's p99."""
    config, cores, on_gpu = subject.config, subject.cores, subject.config.device.is_gpu
    left_out: list[str] = []
    values: dict[str, Sequence[Value]] = {
        ENGINE: _engines(subject, left_out),
        PRECISION: _precisions(subject, left_out),
        THREADS: () if on_gpu else _powers(cores),
        STREAMS: (),
        SPIN: () if on_gpu else (True, False),
        INSTANCES: (),
    }
    if on_gpu or config.max_batch_size < 2:
        left_out.append("streams: apply only to batches on a CPU")
    else:
        values[STREAMS] = _powers(cores)
    if subject.single_group:
        values[INSTANCES] = _GPU_INSTANCES if on_gpu else _powers(cores)
    else:
        left_out.append("instances: config.pbtxt has several instance groups")
    values[MAX_BATCH_SIZE], values[QUEUE_DELAY_US] = _batching(subject, p99_s, left_out)
    if config.preferred_batch_sizes:
        values[PREFERRED] = ((),)  # smaller batches need an empty list
    if on_gpu:
        values |= {LAYOUT: LAYOUTS, CONV_SEARCH: CONV_SEARCHES}
    else:
        left_out.append("layout, conv_search, precision tf32: the instance runs on the CPU")
    defaults = default_values(subject)
    return Space(
        # today's value first, so that it wins ties
        axes=tuple(Axis(key=key, values=tuple(dict.fromkeys((defaults[key], *each)))) for key, each in values.items()),
        constraints=(constraint_of(subject),),
        left_out=(*left_out, *(f"{key}: {reason}" for key, reason in _NEVER_TUNED.items())),
    )


def _engines(subject: Subject, left_out: list[str]) -> list[str]:
    found = []
    for name in _ENGINES[subject.config.device.is_gpu]:
        support = probe(name, subject.config.device)
        if support.ok:
            found.append(name)
        else:
            left_out.append(f"engine {name}: {support.reason}")
    return found


def _precisions(subject: Subject, left_out: list[str]) -> list[str]:
    saved, on_gpu = subject.deployment.saved, subject.config.device.is_gpu
    found = [str(saved)]
    for precision in (Precision.BF16, Precision.FP16, *((Precision.TF32,) if on_gpu else ())):
        reason = "" if on_gpu else missing_instructions(precision)
        if precision is saved:
            continue
        if saved is not Precision.FP32:
            reason = f"the graph is saved in {saved}"
        if reason:
            left_out.append(f"precision {precision}: {reason}")
        else:
            found.append(str(precision))
    if subject.int8:
        found.append(str(Precision.INT8))
    elif saved is not Precision.INT8:
        reason = subject.no_int8 or "requires an int8 graph: --calibration PATH creates one from samples"
        left_out.append(f"precision int8: {reason}")
    return found


def _batching(subject: Subject, p99_s: float, left_out: list[str]) -> tuple[Sequence[int], Sequence[int]]:
    """Return values of `max_batch_size` and `max_queue_delay_us`."""
    largest, longest_us = subject.config.max_batch_size, p99_s * 1e6 / 2
    if not largest:
        left_out.append("max_batch_size: the model is served without batches")
        return (), ()
    if subject.mixing:
        left_out.append(f"max_batch_size: rows cannot be computed together: {subject.mixing}")
        return (), ()
    delays = [delay for delay in _DELAYS_US if delay < longest_us]
    if len(delays) < len(_DELAYS_US):
        left_out.append(f"max_queue_delay_us from {longest_us:g}: uses up half of the target's p99")
    most = _LARGEST_GPU_BATCH if subject.config.device.is_gpu else _LARGEST_BATCH
    return _powers(max(largest, most)), (*delays, NO_BATCHER)


def _powers(most: int) -> list[int]:
    """Return 1, 2, 4, ... and the maximum itself."""
    powers = [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most]
    return list(dict.fromkeys((*powers, most))) if most else []


def narrow(space: Space, only: Collection[str], fixes: Mapping[str, Value]) -> Space:
    """Restrict a space to some varying keys and fix others.

    Other keys keep today's value, unless the named keys require a change: a second instance takes threads from the
    first one, and OpenVINO threads do not spin.

    Raises:
        InvalidInput: A key has no axis, a value is unknown on this machine, or no candidate is left.
    """
    space.check_keys([*only, *fixes])
    _check_words(space, fixes)
    moved = {*only, *fixes}
    if only:
        axes = [axis if axis.key in only else _following(axis, moved) for axis in space.axes]
        space = replace(space, axes=tuple(axes))
    space = space.fixed(fixes)
    if not space.candidates:
        reasons = "; ".join(space.reasons())
        raise InvalidInput(f"no candidate is left: {reasons}", hint="fix fewer keys, or choose other values")
    return space


def _check_words(space: Space, fixes: Mapping[str, Value]) -> None:
    """Refuse unknown names as values; numbers outside of the axis are allowed."""
    for axis in space.axes:
        known = tuple(map(str, Precision)) if axis.key == PRECISION else axis.values
        value = fixes.get(axis.key)
        if isinstance(value, str) and value not in known:
            raise InvalidInput(
                f"--fix {axis.key}={value}: not available for this model on this machine",
                hint=f"expected one of {', '.join(map(str, known))}",
            )


def _following(axis: Axis, moved: Collection[str]) -> Axis:
    """Restrict an axis to today's value and those that varying keys may require."""
    causes, values = _FOLLOWING.get(axis.key, ((), ()))
    follows = values if any(key in moved for key in causes) else ()
    kept = [value for value in axis.values[1:] if value in follows]
    return replace(axis, values=(axis.values[0], *kept))


def constraint_of(subject: Subject) -> Constraint:
    """Return the rules for a model. Today's configuration is always legal: the others are compared with it."""
    default = default_values(subject)

    def refuse(candidate: Candidate) -> str:
        if all(default.get(key) == value for key, value in candidate.items):
            return ""
        return next((reason for is_broken, reason in _rules(candidate, subject) if is_broken), "")

    return refuse


def _rules(candidate: Candidate, subject: Subject) -> Iterator[tuple[bool, str]]:
    """Yield for each rule true if a candidate breaks it, and the reason."""
    values, cores = candidate.values, subject.cores
    engine, precision, preferred = values.get(ENGINE), values.get(PRECISION), values.get(PREFERRED, ())
    threads, streams, instances = candidate.number(THREADS), candidate.number(STREAMS), candidate.number(INSTANCES)
    batch, delay_us = candidate.number(MAX_BATCH_SIZE), candidate.number(QUEUE_DELAY_US, 0)
    if MAX_BATCH_SIZE in candidate and QUEUE_DELAY_US in candidate:
        yield batch > 1 and delay_us == NO_BATCHER, "models with batches always get a dynamic batcher"
        yield batch <= 1 and delay_us != NO_BATCHER, "no queue delay without batches"
    if isinstance(preferred, tuple) and preferred:
        yield delay_us == NO_BATCHER, "preferred batch sizes need a dynamic batcher"
        yield max(preferred) > batch, "a preferred batch size is above max_batch_size"
    for name, largest in subject.ensembles.items():
        is_below = MAX_BATCH_SIZE in candidate and 0 < batch < largest
        yield is_below, f"max_batch_size is below that of an ensemble: '{name}' takes batches of {largest}"
    if subject.config.device.is_gpu:
        chosen = [key for key in (LAYOUT, CONV_SEARCH) if values.get(key, ENGINES_CHOICE) != ENGINES_CHOICE]
        yield engine == "tensorrt" and bool(chosen), f"TensorRT has no {', '.join(chosen)}"
        return
    yield threads * instances > cores, f"threads x instances > {cores} cores"
    is_half = precision in (Precision.BF16, Precision.FP16)
    yield engine == "onnxruntime" and is_half, f"ONNX Runtime has no {precision} kernels for CPUs"
    yield engine == "onnxruntime" and streams > 1, "ONNX Runtime has no streams"
    yield streams > threads, "streams > threads"
    yield streams > max(1, batch), "streams > max_batch_size"
    if values.get(SPIN):
        yield engine != "onnxruntime", "only ONNX Runtime's threads can spin"
        yield instances > 1, "spinning threads of several instances compete for cores"
        yield threads == 1, "a single thread does not spin"


# Bounds from the time of a session without a server: no configuration answers faster than a session computes one
# sample, or has a higher throughput than its instances would have with the whole machine for each.

# A session may be this much faster than measured: clock rates and other load vary.
_SLACK = 1.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Bounds on the performance of a candidate.

    Attributes:
        rate: Maximum of requests (of one sample) per second.
        latency_s: Minimum of seconds per request.
    """

    rate: float
    latency_s: float


def bound_of(candidate: Candidate, timing: SessionTiming) -> Bound:
    """Compute the bounds from a session's fastest batch size.

    Times of other batch sizes are extrapolated linearly from the smallest and the largest measured ones.
    """
    largest = max(1, candidate.number(MAX_BATCH_SIZE))
    sizes = {size for size in timing.batch_s if size <= largest} | {1, largest}
    fastest = max(size / _run_s(timing, size) for size in sizes)
    rate = candidate.number(INSTANCES) * fastest * _SLACK
    return Bound(rate=rate, latency_s=min(timing.batch_s.values()) / _SLACK)


def objection(candidate: Candidate, timing: SessionTiming | Failed, target: Target) -> str:
    """Return why a candidate cannot meet a target with any scheduling, or ""."""
    if isinstance(timing, Failed):
        return timing.reason
    if timing.accuracy:
        return f"changes the outputs: {timing.accuracy}"
    lost, floor = timing.accuracy_lost, target.accuracy_floor
    if lost is not None and floor is not None and lost > floor:
        return f"loses {lost:.2%} of accuracy, but only {floor:.2%} is allowed"
    bound = bound_of(candidate, timing)
    if bound.latency_s > target.p99_s:
        return f"a session without a server takes {bound.latency_s * _SLACK * 1e3:.3g} ms"
    if target.rate and bound.rate < target.rate:
        return f"sessions without a server reach at most {bound.rate:.3g} requests per second"
    return ""


def _run_s(timing: SessionTiming, size: int) -> float:
    if size in timing.batch_s:
        return timing.batch_s[size]
    smallest, largest = min(timing.batch_s), max(timing.batch_s)
    if smallest == largest:
        return timing.batch_s[largest]  # lower bound: larger batches may cost the same
    each = (timing.batch_s[largest] - timing.batch_s[smallest]) / (largest - smallest)
    return max(timing.batch_s[smallest] + (size - smallest) * each, min(timing.batch_s.values()))
