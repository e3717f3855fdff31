"""Build the sessions of a plan, in order, until one gives the golden outputs; of several candidates take the fastest.

The choice between candidates is measured once and remembered with the artifacts: all instances of a model choose alike,
and later starts build only the chosen candidate. A lower precision that is requested with `engine: auto` is measured
beside fp32, which serves where it is as fast.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from graphkiln_backend.engines import hardware
from graphkiln_backend.engines.base import Session, SessionConfig
from graphkiln_backend.engines.timing import fastest_runs_s
from graphkiln_backend.graph.errors import ExecutionError, GraphkilnError, LoweringError, SignatureError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.acceptance import Requirements
from graphkiln_backend.lowering.artifacts import Artifacts
from graphkiln_backend.lowering.plan import LoweringPlan, pick_fastest
from graphkiln_backend.lowering.proven_session import Basis, ProvenSession, build_proven_session
from graphkiln_backend.lowering.remembered import Measurement
from graphkiln_backend.lowering.trial import SyntheticInputs
from graphkiln_backend.lowering.warmup import feeds_of

_log = logging.getLogger("graphkiln.lowering")


def select_session(artifacts: Artifacts, plan: LoweringPlan, requirements: Requirements) -> ProvenSession:
    """Build, prove and warm the fastest candidate that works, or else the first fallback that does.

    Args:
        artifacts: Artifacts of the version.
        plan: The configurations to try.
        requirements: Requirements on a session.

    Raises:
        LoweringError: None works; `attempts` gives the reason for each.
    """
    builder = _Builder(artifacts, requirements)
    if len(plan.candidates) + len(plan.baselines) > 1:
        selected = _build_fastest(builder, plan)
    else:
        selected = builder.build_first(plan.candidates)
    selected = selected or builder.build_first(plan.fallback)
    if selected is None:
        raise LoweringError(f"cannot serve {artifacts.version.graph_path}", attempts=tuple(builder.failures))
    return replace(selected, failures=tuple(builder.failures))


class _Builder:
    """Builds sessions, and keeps a line for each that fails."""

    def __init__(self, artifacts: Artifacts, requirements: Requirements) -> None:
        self.artifacts = artifacts
        self.requirements = requirements
        self.failures: list[str] = []

    def build(self, config: SessionConfig) -> ProvenSession | None:
        try:
            return build_proven_session(self.artifacts, config, self.requirements)
        except GraphkilnError as error:
            self.failures.append(f"{config}: {error}")
            return None

    def build_first(self, configs: Iterable[SessionConfig]) -> ProvenSession | None:
        return next((built for config in configs if (built := self.build(config))), None)


def _build_fastest(builder: _Builder, plan: LoweringPlan) -> ProvenSession | None:
    """The configuration that is the fastest on the largest batch, as it is remembered or measured now."""
    configs = (*plan.baselines, *plan.candidates)  # baselines first: a lower precision that is not faster buys nothing
    artifacts, requirements = builder.artifacts, builder.requirements
    manifest = artifacts.version.manifest
    conditions = {
        "batch": str(requirements.largest_batch),
        "self-test": str(requirements.self_test),
        "golden samples": manifest.golden.sha256 if manifest and manifest.golden else "none",
    }
    with _closed_unless_taken() as built:
        # The lock is held while candidates are measured: one instance of a model measures, and all choose alike.
        with artifacts.recall_choice(configs, conditions) as fact:
            measurement = fact.value or _measure(builder, plan, configs, built)
            if measurement is None:
                return None
            basis = Basis(
                chosen=measurement.chosen,
                rates=measurement.rates,
                batch=requirements.largest_batch,
                machine=hardware.identity(configs[0].device),
                measured_at=fact.found_at.isoformat(timespec="seconds"),
                remembered=fact.value is not None,
            )
            if len(measurement.rates) == len(configs):  # a candidate that failed is tried again at the next start
                fact.keep(measurement)
        chosen = built.pop(basis.chosen, None)
    if chosen is None:
        # A choice that no longer works gives way to the others.
        chosen = builder.build_first(sorted(configs, key=lambda config: str(config) != basis.chosen))
    return chosen and explain_choice(chosen, basis, plan)


def _measure(
    builder: _Builder, plan: LoweringPlan, configs: Sequence[SessionConfig], built: dict[str, ProvenSession]
) -> Measurement | None:
    """Build all configurations into `built`, by name, and compare them; None where none can be built."""
    batch = builder.requirements.largest_batch
    _log.info("measuring %s at batch %d", ", ".join(map(str, configs)), batch)
    for config in configs:
        if session := builder.build(config):
            built[str(config)] = session
    if not built:
        return None
    synthetic = {proven.synthetic for proven in built.values()}
    samples = builder.artifacts.version.golden or (synthetic.pop() if len(synthetic) == 1 else None)
    measurement = measure({name: proven.session for name, proven in built.items()}, samples, batch)
    if measurement.rates:
        return measurement
    # A graph that cannot be timed is served as it is requested.
    return replace(measurement, chosen=next((str(c) for c in plan.candidates if str(c) in built), measurement.chosen))


def measure(sessions: Mapping[str, Session], samples: GoldenSamples | SyntheticInputs | None, size: int) -> Measurement:
    """Compare the speed of sessions; of a graph that cannot be run, choose the first session.

    Args:
        sessions: At least one, by name.
        samples: Golden samples to repeat, or how to make some up; None where neither is known.
        size: The batch size.
    """
    if samples is None:
        return Measurement(chosen=next(iter(sessions)), rates={})
    try:
        times = fastest_runs_s(
            {
                name: partial(session.run, feeds_of(samples, session.signature, size))
                for name, session in sessions.items()
            }
        )
    except (ExecutionError, SignatureError):
        return Measurement(chosen=next(iter(sessions)), rates={})
    chosen = list(times)[pick_fastest(list(times.values()))]
    return Measurement(chosen=chosen, rates={name: float(f"{size / seconds:.4g}") for name, seconds in times.items()})


@contextmanager
def _closed_unless_taken() -> Iterator[dict[str, ProvenSession]]:
    """Sessions by name; those that are still in it at the end of the block are closed, however that ends."""
    built: dict[str, ProvenSession] = {}
    try:
        yield built
    finally:
        for proven in built.values():
            proven.session.close()


def explain_choice(chosen: ProvenSession, basis: Basis, plan: LoweringPlan) -> ProvenSession:
    """Add the reason of a choice to the chosen session, and a line for each configuration that was not chosen.

    Args:
        chosen: The session that serves.
        basis: The measurement.
        plan: The candidates, and the baselines that they were measured beside.
    """
    name = str(chosen.config)
    basis = replace(basis, chosen=name)
    rate = basis.rates.get(name)
    if rate is None:
        return replace(chosen, basis=basis)
    gains = _gains(basis, plan)
    fastest = f"the fastest here, {rate}/s at batch {basis.batch}"
    reason = "; ".join(filter(None, (chosen.config.reason, fastest, gains.get(name))))
    taken = name in map(str, plan.candidates)
    slower = []
    for other in basis.rates:
        if other != name:
            gain = gains.get(other, "")
            refusal = (gain if taken else f"{gain}: not taken") if gain else "not clearly faster"
            slower.append(f"{other}: {refusal}, {basis.rates[other]}/s at batch {basis.batch} beside {rate}/s")
    if gains and name not in gains:
        _log.warning("%s", next(line for line in slower if line.partition(":")[0] in gains))
    return replace(chosen, config=replace(chosen.config, reason=reason), slower=tuple(slower), basis=basis)


def _gains(basis: Basis, plan: LoweringPlan) -> dict[str, str]:
    """Compare the precision of each candidate with the fastest fp32, by name."""
    fp32 = max((basis.rates.get(str(config), 0.0) for config in plan.baselines), default=0.0)
    gains = {}
    for config in plan.candidates if fp32 else ():
        if rate := basis.rates.get(str(config)):
            ratio = rate / fp32
            # Two digits, and a third where two would make both equal.
            text = f"{ratio:.2g}" if abs(ratio - 1) > 0.05 else f"{ratio:.3g}"
            gains[str(config)] = f"{config.precision} was measured {text}x of {Precision.FP32} on this machine"
    return gains
