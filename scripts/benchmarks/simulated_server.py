"""Simulated server in virtual time: requests, queue, batches and instances like Triton's.

The cost of a run is known (a fixed part and one for each sample, shared among threads by Amdahl's law), and so is the
best configuration. Noise, a machine that becomes slower, and candidates that fail can be switched on.

Source: G. M. Amdahl, AFIPS 30 (1967); Triton's documentation, "Dynamic Batcher" (when a batch is formed).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from graphkiln.tuning.candidate import (
    ENGINE,
    INSTANCES,
    MAX_BATCH_SIZE,
    PRECISION,
    QUEUE_DELAY_US,
    SPIN,
    THREADS,
    Candidate,
)
from graphkiln.tuning.measure import Arriving
from graphkiln.tuning.space import Axis, Space
from graphkiln.tuning.statistics import Latency, Seconds, throughput
from graphkiln.tuning.trials import ClosedLoop, Failed, LoadShape, Measured, OpenLoop, SessionTiming

_LOAD_S, _WARMUP_S, _HANG_S = 2.0, 0.5, 20.0
_MOST = 50_000  # requests of one measurement

Standstills = Sequence[tuple[float, float]]  # begin and end of each, in ascending order


def steady(_now_s: float) -> float:
    """Constant speed of the machine."""
    return 1.0


@dataclass(frozen=True, kw_only=True)
class SimulatedModel:
    """Cost of a run.

    Attributes:
        fixed_s: Seconds of each run on one thread, independent of its batch.
        sample_s: Seconds of each sample on one thread.
        parallel: Share of the work that threads divide.
        speed: Factor of the speed by engine and by precision.
        wrong: Engines and precisions whose outputs the policy rejects.
        instance_bytes: Memory of one instance.
    """

    fixed_s: float = 0.002
    sample_s: float = 0.010
    parallel: float = 0.9
    speed: Mapping[str, float] = field(default_factory=lambda: {"openvino": 1.25, "bf16": 1.4, "int8": 2.5})
    wrong: tuple[str, ...] = ("int8",)
    instance_bytes: int = 200 << 20

    def run_s(self, candidate: Candidate, batch: int) -> float:
        """Seconds of one run of a session without others on its cores."""
        serial_s = self.fixed_s + batch * self.sample_s
        speed = self.speed.get(str(candidate[ENGINE]), 1.0) * self.speed.get(str(candidate[PRECISION]), 1.0)
        return serial_s / speed * (1 - self.parallel + self.parallel / candidate.number(THREADS))


@dataclass(kw_only=True)
class SimulatedServer:
    """Implements `Trials`.

    Attributes:
        model: Cost of runs.
        cores: Cores of the machine.
        noise: Relative standard deviation of the time of a run; that of a whole measurement is a third.
        speed: Speed of the machine at a virtual time.
        fault: `load`, `hang`, `crash` or "" for a candidate.
        stalls: Virtual times at which the whole machine pauses, with durations.
        pauses: Period and duration in seconds of the pauses of a candidate; 0 for none.
        inputs: Factors of the cost of a run by the content of its requests, in turn.
        arriving: Arrival process of an open loop.
        now_s: Virtual time.
        measured: All calls of `measure`, in order.
        served: The running candidate.
    """

    model: SimulatedModel = field(default_factory=SimulatedModel)
    cores: int = 4
    noise: float = 0.0
    speed: Callable[[float], float] = steady
    fault: Callable[[Candidate], str] = field(default=lambda _candidate: "")
    stalls: Sequence[tuple[float, float]] = ()
    pauses: Callable[[Candidate], tuple[float, float]] = field(default=lambda _candidate: (0.0, 0.0))
    inputs: Sequence[float] = (1.0,)
    arriving: Arriving = field(default_factory=Arriving)
    now_s: float = 0.0
    measured: list[tuple[Candidate, LoadShape, float, int]] = field(default_factory=list)
    served: Candidate | None = None

    def clock(self) -> float:
        """Virtual seconds."""
        return self.now_s

    def probe(self, session: Candidate) -> SessionTiming | Failed:
        """Measure the bare session, and compare its outputs."""
        self.now_s += 1.0
        wrong = [str(value) for value in session.values.values() if value in self.model.wrong]
        self.served, fastest = None, min(self.inputs) / self.speed(self.now_s)
        times = {batch: self.model.run_s(session, batch) * fastest for batch in (1, 8)}
        return SessionTiming(
            batch_s=times, accuracy=f"{wrong[0]}: outputs differ by 0.3, allowed 0.02" if wrong else ""
        )

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        """Load the candidate, warm up, and measure."""
        self.measured.append((candidate, load, seconds, seed))
        fault = self.fault(candidate)
        self.served = None if fault else candidate
        self.now_s += _HANG_S if fault == "hang" else _LOAD_S
        if fault:
            return Failed(reason=_REASONS[fault])
        speed = self.speed(self.now_s)
        begin_s = self.now_s + _WARMUP_S
        self.now_s = begin_s + seconds
        still = self._standstills(candidate, begin_s, seconds)
        due, done = self._serve(candidate, load, seconds, seed, speed=speed, still=still)
        within = done[done < seconds]
        memory = candidate.number(INSTANCES) * self.model.instance_bytes
        return Measured(
            latency=Latency.of((done - due)[due < seconds]),
            throughput=throughput(within, 0.0, seconds),
            seconds=seconds,
            client_cores=0.05,
            server_cores=self._cores_used(candidate, within.size / seconds),
            memory_bytes=memory + candidate.number(MAX_BATCH_SIZE) * (1 << 20),
        )

    def _standstills(self, candidate: Candidate, begin_s: float, seconds: float) -> Standstills:
        """Pauses of the machine and the candidate during a measurement, in seconds after its start."""
        every_s, own_s = self.pauses(candidate)
        times = range(int(begin_s / every_s), int((begin_s + seconds) / every_s) + 1) if every_s else ()
        found = [*self.stalls, *((number * every_s, own_s) for number in times)]
        return sorted((at - begin_s, at + long_s - begin_s) for at, long_s in found if at + long_s > begin_s)

    def capacity(self, candidate: Candidate) -> float:
        """Requests per second when all instances always run full batches."""
        batch = _largest_batch(candidate)
        return candidate.number(INSTANCES) * batch / self._run_s(candidate, batch)

    def _run_s(self, candidate: Candidate, batch: int) -> float:
        crowd = candidate.number(INSTANCES) * candidate.number(THREADS) / self.cores
        spinning = 1.15 if candidate.values.get(SPIN) and crowd > 1 else 1.0
        return self.model.run_s(candidate, batch) * max(1.0, crowd) * spinning

    def _cores_used(self, candidate: Candidate, rate: float) -> float:
        batch = max(1, _largest_batch(candidate) // 2)
        return min(self.cores, rate * self._run_s(candidate, batch) / batch * candidate.number(THREADS))

    def _arrivals(self, load: LoadShape, seconds: float, seed: int) -> list[float]:
        if isinstance(load, ClosedLoop):
            return [0.0] * load.callers
        moments = self.arriving.moments(load.rate, min(seconds, 2 * _MOST / load.rate), seed)
        return list(moments[:_MOST].tolist()) or [0.0]

    def _serve(
        self, candidate: Candidate, load: LoadShape, seconds: float, seed: int, *, speed: float, still: Standstills
    ) -> tuple[Seconds, Seconds]:
        """Times at which each request was due and done."""
        arrivals = self._arrivals(load, seconds, seed)  # the same for each candidate
        noisy = np.random.default_rng([seed, int(candidate.id, 16)])
        whole = float(np.exp(noisy.normal(0.0, self.noise / 3)))
        largest = _largest_batch(candidate)
        run_s = [0.0, *(self._run_s(candidate, size) * whole / speed for size in range(1, largest + 1))]
        jitter = (np.exp(noisy.normal(0.0, self.noise, 4096)) * np.resize(self.inputs, 4096)).tolist()
        delay_s = max(0, candidate.number(QUEUE_DELAY_US, 0)) * 1e-6
        closed_s = seconds if isinstance(load, ClosedLoop) else 0.0
        instances = candidate.number(INSTANCES)
        return _queue(arrivals, run_s, jitter, still, delay_s=delay_s, instances=instances, closed_s=closed_s)


_REASONS = {
    "load": "it did not load: the engine refuses the graph",
    "hang": "it did not answer within 20 s",
    "crash": "the server died with signal 11",
}


def _largest_batch(candidate: Candidate) -> int:
    return 1 if candidate.number(QUEUE_DELAY_US, 0) < 0 else max(1, candidate.number(MAX_BATCH_SIZE))


def _queue(
    arrivals: list[float],
    run_s: list[float],
    jitter: list[float],
    still: Standstills,
    *,
    delay_s: float,
    instances: int,
    closed_s: float,
) -> tuple[Seconds, Seconds]:
    """Form batches and run them: as soon as an instance is free, or when the oldest request has waited long enough.

    Args:
        arrivals: Due times of requests, in ascending order.
        run_s: Seconds of a run by batch size.
        jitter: Factors of the times of runs, in turn.
        still: Pauses.
        delay_s: Longest wait of the oldest request for a full batch.
        instances: Number of instances.
        closed_s: Time until which callers send the next request after a response; 0 in an open loop.
    """
    free, due, done = [0.0] * instances, [], []
    largest, number = len(run_s) - 1, 0
    while arrivals:
        first = heapq.heappop(arrivals)
        begin = max(heapq.heappop(free), first)
        until = max(begin, first + delay_s)
        batch = [first]
        while len(batch) < largest and arrivals and arrivals[0] <= until:
            batch.append(heapq.heappop(arrivals))
        begin = max(begin, batch[-1]) if len(batch) == largest else until
        end = _end_of(begin, run_s[len(batch)] * jitter[number % len(jitter)], still)
        number += 1
        heapq.heappush(free, end)
        due += batch
        done += [end] * len(batch)
        if end < closed_s:
            for _ in batch:
                heapq.heappush(arrivals, end)
    return np.array(due), np.array(done)


def _end_of(begin: float, seconds: float, still: Standstills) -> float:
    """End of work that pauses during standstills."""
    for stop, again in still:
        if stop < begin + seconds and again > begin:
            seconds += again - max(stop, begin)
    return begin + seconds


def simulated_space(cores: int = 4) -> Space:
    """A space of a few hundred points with constraints."""

    def threads_of_one(candidate: Candidate) -> str:
        most = candidate.number(INSTANCES) * candidate.number(THREADS)
        return f"more than {2 * cores} threads on {cores} cores" if most > 2 * cores else ""

    def batches_to_wait_for(candidate: Candidate) -> str:
        waits = candidate.number(QUEUE_DELAY_US) > 0
        return "a queue delay has no effect on batches of 1" if waits and candidate.number(MAX_BATCH_SIZE) == 1 else ""

    def precision_of_engine(candidate: Candidate) -> str:
        is_bf16 = candidate[PRECISION] == "bf16" and candidate[ENGINE] == "onnxruntime"
        return "ONNX Runtime has no bf16 kernels on a CPU" if is_bf16 else ""

    return Space(
        axes=(
            Axis(key=ENGINE, values=("onnxruntime", "openvino")),
            Axis(key=PRECISION, values=("fp32", "bf16", "int8")),
            Axis(key=THREADS, values=(cores, *(n for n in (1, 2, 4, 8) if n < cores))),
            Axis(key=INSTANCES, values=(1, 2, 4)),
            Axis(key=MAX_BATCH_SIZE, values=(8, 1, 4, 16)),
            Axis(key=QUEUE_DELAY_US, values=(0, 2000, 10_000)),
        ),
        constraints=(threads_of_one, batches_to_wait_for, precision_of_engine),
    )


def true_rate(server: SimulatedServer, candidate: Candidate, p99_s: float, *, more_than: float = 0.0) -> float:
    """Find the highest rate at which a candidate meets the target, within 1%.

    Args:
        server: Without noise, drift and faults.
        candidate: The candidate.
        p99_s: Target.
        more_than: The result is 0 if it does not meet this rate.
    """

    def meets(rate: float) -> bool:
        measured = server.measure(candidate, OpenLoop(rate), 6000 / rate, seed=77)
        return isinstance(measured, Measured) and measured.latency.p99.value <= p99_s

    low, high = more_than, server.capacity(candidate)
    if low >= high or server.model.run_s(candidate, 1) > p99_s or (low and not meets(low)):
        return 0.0
    while high > max(low, 0.01) * 1.01:
        middle = (low + high) / 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low
