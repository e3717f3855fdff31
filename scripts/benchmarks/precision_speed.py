"""`engine: auto` beside every engine and precision that this CPU can do, by hand, on ten architectures.

Each architecture is kept as soon as it is done: what is interrupted goes on with the next one.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from inputs import CACHE
from measurement import ratio_of, show_progress
from parts import Parts
from precision_models import ARCHITECTURES, Graphs, prepare

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.registry import open_reference, probe
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError, LoweringError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.acceptance import Requirements
from graphkiln_backend.lowering.artifacts import Artifacts, saved_precision
from graphkiln_backend.lowering.plan import Resources, plan
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.lowering.selection import select_session
from graphkiln_backend.lowering.settings import Settings
from graphkiln_backend.proof.comparison import compare
from graphkiln_backend.repository.version import ModelVersion
from graphkiln_backend.system.resources import usable_cores

PARTS = CACHE / "precision"  # where each architecture is kept as it is done
_BATCH = 8
_CLOSE = 0.97  # A rate of at least this share of the best one counts as being it
_WARM_UP_S = 1.0

ORT_FP32, OV_FP32, OV_BF16 = "onnxruntime fp32", "openvino fp32", "openvino bf16"
ORT_INT8, OV_INT8 = "onnxruntime int8", "openvino int8"
AUTO_FP32, AUTO_BF16, AUTO_INT8 = "auto, fp32", "auto, bf16 requested", "auto, int8 saved"


@dataclass(frozen=True, kw_only=True, slots=True)
class _SetUp:
    """How a session is built: from the int8 graph or the fp32 one, with which settings."""

    settings: Settings
    int8: bool = False


_SET_UPS = {
    ORT_FP32: _SetUp(settings=Settings(engine="onnxruntime")),
    OV_FP32: _SetUp(settings=Settings(engine="openvino")),
    OV_BF16: _SetUp(settings=Settings(engine="openvino", precision=Precision.BF16)),
    ORT_INT8: _SetUp(settings=Settings(engine="onnxruntime"), int8=True),
    OV_INT8: _SetUp(settings=Settings(engine="openvino"), int8=True),
    AUTO_FP32: _SetUp(settings=Settings(engine="auto")),
    AUTO_BF16: _SetUp(settings=Settings(engine="auto", precision=Precision.BF16)),
    AUTO_INT8: _SetUp(settings=Settings(engine="auto"), int8=True),
}
# What `engine: auto` may choose between.
_BY_HAND = {
    AUTO_FP32: (ORT_FP32, OV_FP32),
    AUTO_BF16: (ORT_FP32, OV_FP32, OV_BF16),
    AUTO_INT8: (ORT_INT8, OV_INT8),
}


@dataclass(slots=True)
class Rounds:
    """What a set-up came to, round by round.

    Attributes:
        rates: Runs per second.
        cpu_s: Processor time of a run, of all threads.
    """

    rates: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def benchmark_precision(rounds: int, seconds: float, only: str = "") -> list[dict[str, object]]:
    """Every architecture that is done, those that are not measured now.

    Args:
        rounds: That count.
        seconds: Of one measurement.
        only: Measure this architecture, also where it is done, and no other.
    """
    if only and only not in ARCHITECTURES:
        sys.exit(f"precision has no part {only}; there are {', '.join(ARCHITECTURES)}")
    parts = Parts(PARTS, rounds, seconds)
    for name in [only] if only else ARCHITECTURES:
        parts.measure(name, partial(_measure_architecture, name, rounds, seconds), again=bool(only))
    return [row for name in ARCHITECTURES for row in parts.read(name) or ()]


def _measure_architecture(name: str, rounds: int, seconds: float) -> list[dict[str, object]]:
    graphs = prepare(name)
    feeds = graphs.feeds(_BATCH, seed=1)
    sessions, failures = dict[str, ProvenSession](), dict[str, str]()
    with tempfile.TemporaryDirectory() as folder, ArtifactCache(Path(folder)) as cache, ExitStack() as opened:
        for set_up, request in _SET_UPS.items():
            show_progress(f"{name}: building {set_up}")
            try:
                sessions[set_up] = _build(graphs, request, cache)
            except GraphkilnError as error:
                failures[set_up] = str(error).partition("\n")[0]
                continue
            opened.enter_context(sessions[set_up].session)
        errors = {set_up: _error(graphs, proven, feeds) for set_up, proven in sessions.items()}
        measured = _take_turns(name, sessions, feeds, rounds, seconds)
    made = {set_up: _what_computes(proven) for set_up, proven in sessions.items()}
    verdicts = {auto: judge(auto, by_hand, measured, made) for auto, by_hand in _BY_HAND.items() if auto in measured}
    rows = []
    for set_up in _SET_UPS:
        if set_up in sessions:
            proven, found = sessions[set_up], measured[set_up]
            rows.append(_row(name, set_up, proven, found, measured, errors[set_up], verdicts.get(set_up, "")))
        else:
            print(f"{name}, {set_up}: {failures[set_up]}", file=sys.stderr)
    return rows


def _build(graphs: Graphs, set_up: _SetUp, cache: ArtifactCache) -> ProvenSession:
    graph = graphs.int8 if set_up.int8 else graphs.fp32
    if graph is None:
        raise LoweringError("there is no int8 graph", attempts=())
    version = ModelVersion(graph_path=graph, manifest=None, golden=None)
    saved = saved_precision(version)
    resources = Resources(device=CPU, cores=usable_cores(), probe=probe)
    planned = plan(set_up.settings, resources, saved=saved, largest_batch=_BATCH)
    return select_session(Artifacts(version, saved, cache), planned, Requirements(batch_sizes=(1, _BATCH)))


def _error(graphs: Graphs, proven: ProvenSession, feeds: Mapping[str, AnyArray]) -> float:
    """The worst output's relative L2 beside the fp32 graph as the proof runs it."""
    with open_reference(graphs.fp32) as reference:
        expected = reference.run(feeds)
    return max(error.relative_l2 for error in compare(expected, proven.session.run(feeds)))


def _take_turns(
    name: str, sessions: Mapping[str, ProvenSession], feeds: Mapping[str, AnyArray], rounds: int, seconds: float
) -> dict[str, Rounds]:
    """Runs the sessions in turn, round after round; a first round is a warm-up and does not count."""
    measured = {set_up: Rounds() for set_up in sessions}
    for number in range(rounds + 1):
        for set_up, proven in sessions.items():
            show_progress(f"{name}: round {number}/{rounds}: {set_up}")
            rate, cpu_s = _time(partial(proven.session.run, feeds), seconds if number else min(seconds, _WARM_UP_S))
            if number:
                measured[set_up].rates.append(rate)
                measured[set_up].cpu_s.append(cpu_s)
    show_progress("")
    return measured


def _time(run: partial[dict[str, AnyArray]], seconds: float) -> tuple[float, float]:
    """Runs a second, and processor seconds of a run; threads of the session before it get a run to go to sleep."""
    run()
    begun, cpu, count = time.perf_counter(), time.process_time(), 0
    while (passed := time.perf_counter() - begun) < seconds or not count:
        run()
        count += 1
    return count / passed, (time.process_time() - cpu) / count


def judge(auto: str, by_hand: Sequence[str], measured: Mapping[str, Rounds], made: Mapping[str, object]) -> str:
    """Whether `engine: auto` is the best by hand, or within 3% of it by the median of the rounds' ratios.

    Args:
        auto: Its set-up.
        by_hand: What it may choose between.
        measured: The rounds of each, equally many; one that cannot be built is not there.
        made: What each computes with: where that is the same, a difference is the machine's noise, so of what computes
            as `auto` does the faster one of each round counts.
    """
    alike = [name for name in (auto, *by_hand) if name in measured and made[name] == made[auto]]
    rates = {name: measured[name].rates for name in by_hand if name in measured}
    faster = [max(each) for each in zip(*(measured[name].rates for name in alike), strict=True)]
    rates |= dict.fromkeys(alike, faster)
    best = max((name for name in by_hand if name in measured), key=lambda name: statistics.median(rates[name]))
    if best in alike:
        return f"is {best}"
    ratio = ratio_of(rates[auto], rates[best]).median
    return f"within 3% of {best}" if ratio >= _CLOSE else f"{1 - ratio:.0%} behind {best}"


def _what_computes(proven: ProvenSession) -> tuple[str, str]:
    return proven.config.engine, _products(proven)


def _products(proven: ProvenSession) -> str:
    products = proven.placement.products if proven.placement else {}
    return ", ".join(f"{count} {precision}" for precision, count in products.items())


def _row(  # noqa: PLR0917 - the columns
    name: str,
    set_up: str,
    proven: ProvenSession,
    rounds: Rounds,
    measured: Mapping[str, Rounds],
    error: float,
    verdict: str,
) -> dict[str, object]:
    rivals = _BY_HAND.get(set_up) or next(hand for hand in reversed(_BY_HAND.values()) if set_up in hand)
    return {
        "model": name,
        "set-up": set_up,
        "engine": proven.config.engine,
        "products": _products(proven),
        "samples/s": round(statistics.median(rounds.rates) * _BATCH, 1),
        "to onnxruntime fp32": _ratio(rounds, measured[ORT_FP32]),
        "to best by hand": min(_ratio(rounds, measured[rival]) for rival in rivals if rival in measured),
        "CPU ms": round(statistics.median(rounds.cpu_s) / _BATCH * 1e3, 2),
        "error": f"{error:.1e}",
        "auto": verdict,
    }


def _ratio(rounds: Rounds, reference: Rounds) -> float:
    return round(ratio_of(rounds.rates, reference.rates).median, 2)
