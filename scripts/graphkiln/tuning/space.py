"""The space of candidates: an axis for each key, and constraints that say once why a point is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from graphkiln.tuning.trials import Bare, Failed
from graphkiln_backend.engines.hardware import missing_instructions
from graphkiln_backend.engines.registry import probe
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_backend.lowering.settings import CONV_SEARCHES, LAYOUTS
from graphkiln_backend.repository.config_changes import NO_BATCHER

# Returns why a candidate is illegal or hopeless; "" if it is neither.
Constraint = Callable[[Candidate], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """A key and the values that are tried.

    Attributes:
        key: As in `Candidate`.
        values: At least one; the first is the default configuration's, and a later one counts as less simple.
    """

    key: str
    values: tuple[Value, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exclusion:
    """A candidate that is left out.

    Attributes:
        candidate: Which.
        reason: Why, in words.
        by_budget: Whether a larger budget would have had it measured.
    """

    candidate: Candidate
    reason: str
    by_budget: bool = False


@dataclass(frozen=True, kw_only=True)
class Space:
    """All combinations of the axes' values, without those that a constraint rules out.

    Attributes:
        axes: One for each key.
        constraints: The first that objects gives the reason.
        served: Today's configuration, if a key was fixed to another value; None for the first value of each axis.
        left_out: A line for each value or key that is not tried, with the reason.
    """

    axes: tuple[Axis, ...]
    constraints: tuple[Constraint, ...] = ()
    served: Candidate | None = None
    left_out: tuple[str, ...] = ()

    @property
    def points(self) -> int:
        """Number of combinations, excluded ones included."""
        return prod(len(axis.values) for axis in self.axes)

    @property
    def default(self) -> Candidate:
        """The first value of each axis."""
        return Candidate.of({axis.key: axis.values[0] for axis in self.axes})

    @property
    def today(self) -> Candidate:
        """Today's configuration, which need not be in the space."""
        return self.served or self.default

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """Candidates that satisfy all constraints, the simplest first."""
        return tuple(candidate for candidate, reason in self._judged if not reason)

    @cached_property
    def exclusions(self) -> tuple[Exclusion, ...]:
        """Candidates that violate a constraint, with the reason."""
        return tuple(Exclusion(candidate=candidate, reason=reason) for candidate, reason in self._judged if reason)

    def reasons(self) -> dict[str, int]:
        """Count excluded candidates by reason, the most frequent first."""
        return dict(Counter(exclusion.reason for exclusion in self.exclusions).most_common())

    def simplicity(self, candidate: Candidate) -> tuple[int, int, str]:
        """Sort key, the simplest first: number of changed values, their distance from the default, the id."""
        steps = [self._positions[axis.key].get(candidate[axis.key], len(axis.values)) for axis in self.axes]
        return sum(step > 0 for step in steps), sum(steps), candidate.id

    def neighbors(self, candidate: Candidate) -> tuple[Candidate, ...]:
        """The legal candidates that are one step away: on one axis, the next value on either side.

        An exchange of threads for instances is a step, too: the way from one to the other leads through set-ups that
        use too few cores or too many, and is never climbed.
        """
        found = self._exchanges(candidate)
        for axis in self.axes:
            at = self._positions[axis.key][candidate[axis.key]]
            nearby = [axis.values[each] for each in (at - 1, at + 1) if 0 <= each < len(axis.values)]
            found += [candidate.with_values({axis.key: value}) for value in nearby]
        return tuple(each for each in found if not self.objection(each))

    def _exchanges(self, candidate: Candidate) -> list[Candidate]:
        """Candidates with the same total number of threads, in more or fewer instances."""
        values = {axis.key: axis.values for axis in self.axes}
        cores = candidate.number(THREADS) * candidate.number(INSTANCES)
        pairs = product(values.get(THREADS, ()), values.get(INSTANCES, ()))
        found = [candidate.with_values({THREADS: threads, INSTANCES: instances}) for threads, instances in pairs]
        same = [each for each in found if each.number(THREADS) * each.number(INSTANCES) == cores]
        return [each for each in same if each != candidate]

    def objection(self, candidate: Candidate) -> str:
        """Return the reason of the first violated constraint; "" if none is violated."""
        return next(filter(None, (constraint(candidate) for constraint in self.constraints)), "")

    def fixed(self, values: Mapping[str, Value]) -> Space:
        """The space in which some keys have one value only, whether it was among those tried or not.

        Raises:
            InvalidInput: No axis has the key.
        """
        self.check_keys(values)
        fixed = (replace(axis, values=(values[axis.key],)) if axis.key in values else axis for axis in self.axes)
        return replace(self, axes=tuple(fixed), served=self.today)

    def check_keys(self, keys: Iterable[str]) -> None:
        """Check that each key has an axis.

        Raises:
            InvalidInput: One has none.
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
# Runs on a GPU? -> engines that may serve there.
_ENGINES = {False: ("onnxruntime", "openvino"), True: ("onnxruntime", "tensorrt")}
# Key -> keys that may constrain it, and the values that it then also takes.
_FOLLOWING: Mapping[str, tuple[tuple[str, ...], Sequence[Value]]] = {
    SPIN: ((ENGINE, THREADS, INSTANCES), (False,)),
    THREADS: ((INSTANCES,), range(1, 1 << 10)),
    STREAMS: ((ENGINE, THREADS, MAX_BATCH_SIZE), (1,)),
    QUEUE_DELAY_US: ((MAX_BATCH_SIZE,), (0, NO_BATCHER)),
    PREFERRED: ((MAX_BATCH_SIZE, QUEUE_DELAY_US), ((),)),
}
_NEVER_TUNED = {
    "execution_mode, inter_op_thread_count": "stay as they are: instances and streams fill the same cores",
    "optimization.graph.level": "stays as it is: the default rewrites the graph as far as it can be",
    "enable_mem_arena, enable_mem_pattern": "stay as they are: the arena is on for speed, patterns cost memory alone",
    "self_test": "what is not proven is not served",
    "response_cache": "answers equal requests only: it does not speed up the model",
    "rate_limiter, priorities": "share a machine between models; here one is measured",
    "preserve_ordering": "changes no figure but that of requests that wait for others",
    "queue policies": "refuse requests, or let them wait: a target is met without either",
    "model_warmup, fallback": "say what happens before the first request",
    "enable_cuda_graph, gpu_mem_limit and the like": "options of an accelerator stay as config.pbtxt has them",
}


def span_space(subject: Subject, *, p99_s: float) -> Space:
    """All candidates of a model on this machine; a queue delay that takes half of the target's p99 is none."""
    axes = _Axes(subject=subject, p99_us=p99_s * 1e6)
    spanned = tuple(axes.all())
    never = [f"{key}: {reason}" for key, reason in _NEVER_TUNED.items()]
    return Space(axes=spanned, constraints=(constraint_of(subject),), left_out=(*axes.left_out, *never))


@dataclass(slots=True)
class _Axes:
    """Collect the axes of a space, and reasons for values that are left out."""

    subject: Subject
    p99_us: float
    defaults: Mapping[str, Value] = field(init=False)
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.defaults = default_values(self.subject)

    @property
    def on_gpu(self) -> bool:
        return self.subject.config.device.is_gpu

    def all(self) -> Iterator[Axis]:
        yield self.axis(ENGINE, self.engines())
        yield self.axis(PRECISION, self.precisions())
        yield self.axis(THREADS, () if self.on_gpu else _powers(self.subject.cores))
        yield self.axis(STREAMS, self.streams())
        yield self.axis(SPIN, () if self.on_gpu else (True, False))
        yield self.axis(INSTANCES, self.instances())
        yield self.axis(MAX_BATCH_SIZE, self.batches())
        yield self.axis(QUEUE_DELAY_US, self.delays())
        if self.defaults[PREFERRED]:
            yield self.axis(PREFERRED, ((),))  # which smaller batches need
        if self.on_gpu:
            yield self.axis(LAYOUT, LAYOUTS)
            yield self.axis(CONV_SEARCH, CONV_SEARCHES)
        else:
            self.left_out.append("layout, conv_search, precision tf32: the instance runs on the CPU")

    def axis(self, key: str, values: Sequence[Value]) -> Axis:
        """Axis with today's value first, which wins ties."""
        return Axis(key=key, values=tuple(dict.fromkeys((self.defaults[key], *values))))

    def engines(self) -> list[str]:
        found = []
        for name in _ENGINES[self.on_gpu]:
            support = probe(name, self.subject.config.device)
            if support.ok:
                found.append(name)
            else:
                self.left_out.append(f"engine {name}: {support.reason}")
        return found

    def precisions(self) -> list[str]:
        saved = self.subject.deployment.saved
        found = [str(saved)]
        for precision in (Precision.BF16, Precision.FP16, *((Precision.TF32,) if self.on_gpu else ())):
            if reason := self._lacking(precision):
                self.left_out.append(f"precision {precision}: {reason}")
            elif precision is not saved:
                found.append(str(precision))
        if self.subject.int8:
            found.append(str(Precision.INT8))
        elif saved is not Precision.INT8:
            reason = self.subject.no_int8 or "needs an int8 graph: --calibration PATH makes one of samples"
            self.left_out.append(f"precision int8: {reason}")
        return found

    def _lacking(self, precision: Precision) -> str:
        saved = self.subject.deployment.saved
        if precision is saved:
            return ""
        if saved is not Precision.FP32:
            return f"the graph was saved in {saved}, which loading does not change"
        return "" if self.on_gpu else missing_instructions(precision)

    def streams(self) -> Sequence[int]:
        if self.on_gpu or self.subject.config.max_batch_size < 2:
            self.left_out.append("streams: they split a batch on a CPU, and this model has no batches there")
            return ()
        return _powers(self.subject.cores)

    def instances(self) -> Sequence[int]:
        if not self.subject.single_group:
            self.left_out.append("instances: config.pbtxt has several instance groups")
            return ()
        return _GPU_INSTANCES if self.on_gpu else _powers(self.subject.cores)

    def batches(self) -> Sequence[int]:
        if reason := self._unbatchable():
            self.left_out.append(f"max_batch_size: {reason}")
            return ()
        largest = max(self.subject.config.max_batch_size, _LARGEST_GPU_BATCH if self.on_gpu else _LARGEST_BATCH)
        return _powers(largest)

    def _unbatchable(self) -> str:
        subject = self.subject
        if not subject.config.max_batch_size:
            return "the graph is served without batches"
        return f"requests are computed one by one: {subject.mixing}" if subject.mixing else ""

    def delays(self) -> Sequence[int]:
        if self._unbatchable():
            return ()
        fitting = [delay for delay in _DELAYS_US if delay < self.p99_us / 2]
        if len(fitting) < len(_DELAYS_US):
            self.left_out.append(f"max_queue_delay_us of {self.p99_us / 2:g} and more: half of the target is gone")
        return (*fitting, NO_BATCHER)


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... up to a number, which is the last one."""
    powers = [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most]
    return list(dict.fromkeys((*powers, most))) if most else []


def narrow(space: Space, only: Collection[str], fixes: Mapping[str, Value]) -> Space:
    """The space in which only some keys vary, and some have one value.

    Keys that are not named stay as they are, but where what is named would leave them no legal value: a second instance
    takes threads from the first, and OpenVINO has no use for spinning.

    Raises:
        InvalidInput: No axis has a key, a value is unknown on this machine, or no candidate is left.
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
        raise InvalidInput(f"no candidate is left: {reasons}", hint="fix fewer keys, or other values")
    return space


def _check_words(space: Space, fixes: Mapping[str, Value]) -> None:
    """Refuse unknown words as values; numbers beyond the tried ones are allowed."""
    for axis in space.axes:
        known = tuple(map(str, Precision)) if axis.key == PRECISION else axis.values
        value = fixes.get(axis.key)
        if isinstance(value, str) and value not in known:
            raise InvalidInput(
                f"--fix {axis.key}={value}: that cannot serve this model here",
                hint=f"one of {', '.join(map(str, known))}",
            )


def _following(axis: Axis, moved: Collection[str]) -> Axis:
    """Restrict an axis to today's value and those that changes of other keys may require."""
    causes, values = _FOLLOWING.get(axis.key, ((), ()))
    follows = values if any(key in moved for key in causes) else ()
    kept = [value for value in axis.values[1:] if value in follows]
    return replace(axis, values=(axis.values[0], *kept))


def constraint_of(subject: Subject) -> Constraint:
    """The rules on candidates of a model; today's configuration is never excluded: the others are compared with it."""
    on_gpu = subject.config.device.is_gpu
    default = default_values(subject)

    def refuse(candidate: Candidate) -> str:
        if all(default.get(key) == value for key, value in candidate.items):
            return ""
        reason = _refuse_batcher(candidate) or _refuse_preferred(candidate)
        reason = reason or _refuse_ensembles(candidate, subject.ensembles)
        if on_gpu:
            return reason or _refuse_gpu(candidate)
        reason = reason or _refuse_threads(candidate, subject.cores) or _refuse_precision(candidate)
        return reason or _refuse_streams(candidate) or _refuse_spin(candidate)

    return refuse


def _refuse_threads(candidate: Candidate, cores: int) -> str:
    asked = candidate.number(THREADS) * candidate.number(INSTANCES)
    return f"threads x instances > {cores} cores" if asked > cores else ""


def _refuse_batcher(candidate: Candidate) -> str:
    if MAX_BATCH_SIZE not in candidate or QUEUE_DELAY_US not in candidate:
        return ""
    batches, delay = candidate.number(MAX_BATCH_SIZE) > 1, candidate.number(QUEUE_DELAY_US)
    if batches and delay == NO_BATCHER:
        return "a model with batches always gets a dynamic batcher"
    return "without batches there is nothing to wait for" if not batches and delay != NO_BATCHER else ""


def _refuse_preferred(candidate: Candidate) -> str:
    preferred = candidate.values.get(PREFERRED, ())
    largest = max(preferred, default=0) if isinstance(preferred, tuple) else 0
    if largest and candidate.number(QUEUE_DELAY_US, 0) == NO_BATCHER:
        return "preferred batch sizes need a dynamic batcher"
    return "a preferred batch size is above max_batch_size" if largest > candidate.number(MAX_BATCH_SIZE) else ""


def _refuse_ensembles(candidate: Candidate, ensembles: Mapping[str, int]) -> str:
    size = candidate.number(MAX_BATCH_SIZE, 0)
    larger = [f"'{name}' takes batches of {largest}" for name, largest in ensembles.items() if 0 < size < largest]
    return f"a step of an ensemble takes its batches: {larger[0]}" if larger else ""


def _refuse_precision(candidate: Candidate) -> str:
    engine, precision = candidate.values.get(ENGINE), candidate.values.get(PRECISION)
    if engine == "onnxruntime" and precision in (Precision.BF16, Precision.FP16):
        return f"ONNX Runtime has no {precision} kernels for CPUs"
    return ""


def _refuse_streams(candidate: Candidate) -> str:
    streams = candidate.number(STREAMS)
    if streams > 1 and candidate.values.get(ENGINE) == "onnxruntime":
        return "ONNX Runtime computes a batch as a whole: no streams"
    if streams > candidate.number(THREADS):
        return "streams > threads"
    return "streams > max_batch_size" if streams > max(1, candidate.number(MAX_BATCH_SIZE)) else ""


def _refuse_spin(candidate: Candidate) -> str:
    if not candidate.values.get(SPIN):
        return ""
    if candidate.values.get(ENGINE) != "onnxruntime":
        return "only ONNX Runtime's idle threads can spin"
    if candidate.number(INSTANCES) > 1:
        return "threads of several instances that spin take the cores from each other"
    return "a single thread has no other to wait for: no spin" if candidate.number(THREADS) == 1 else ""


def _refuse_gpu(candidate: Candidate) -> str:
    if candidate.values.get(ENGINE) == "tensorrt":
        chosen = [key for key in (LAYOUT, CONV_SEARCH) if candidate.values.get(key, ENGINES_CHOICE) != ENGINES_CHOICE]
        return f"TensorRT chooses itself: no {', '.join(chosen)}" if chosen else ""
    return ""


# Cheap bounds on every configuration, from the time of its bare session.
#
# A server adds to a session, and instances that share cores slow each other down: no configuration answers faster than
# the bare session of one sample, or more often than its instances would if each had the machine to itself.

# A session may be this much faster than it was measured: clocks and other load change.
_SLACK = 1.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Bounds on the performance of a candidate.

    Attributes:
        rate: Requests of one sample per second, at most.
        latency_s: Seconds of one request, at least.
    """

    rate: float
    latency_s: float


def bound_of(candidate: Candidate, bare: Bare) -> Bound:
    """The bounds that a bare session sets, by its fastest batch size.

    Sizes that were not measured count with the time of a line through the smallest and the largest that were.
    """
    largest = max(1, candidate.number(MAX_BATCH_SIZE))
    sizes = {size for size in bare.batch_s if size <= largest} | {1, largest}
    fastest = max(size / _run_s(bare, size) for size in sizes)
    rate = candidate.number(INSTANCES) * fastest * _SLACK
    return Bound(rate=rate, latency_s=min(bare.batch_s.values()) / _SLACK)


def objection(candidate: Candidate, bare: Bare | Failed, target: Target) -> str:
    """Return why a candidate cannot meet a target with any scheduling; "" if it may."""
    if isinstance(bare, Failed):
        return bare.reason
    if bare.accuracy:
        return f"changes the outputs: {bare.accuracy}"
    lost, floor = bare.accuracy_lost, target.accuracy_floor
    if lost is not None and floor is not None and lost > floor:
        return f"loses {lost:.2%} of accuracy, allowed {floor:.2%}"
    bound = bound_of(candidate, bare)
    if bound.latency_s > target.p99_s:
        return f"its bare session alone takes {bound.latency_s * _SLACK * 1e3:.3g} ms"
    if target.rate and bound.rate < target.rate:
        return f"its bare sessions alone reach at most {bound.rate:.3g} requests per second"
    return ""


def _run_s(bare: Bare, size: int) -> float:
    if size in bare.batch_s:
        return bare.batch_s[size]
    smallest, largest = min(bare.batch_s), max(bare.batch_s)
    if smallest == largest:
        return bare.batch_s[largest]  # nothing is known of larger batches: they may cost the same
    each = (bare.batch_s[largest] - bare.batch_s[smallest]) / (largest - smallest)
    return max(bare.batch_s[smallest] + (size - smallest) * each, min(bare.batch_s.values()))
