"""Builds what a plan names, in order, until a session gives the golden outputs; of several candidates the fastest.

What was measured is kept with the artifacts: all instances of a model choose alike, and later starts build only the
chosen candidate. A lower precision that is requested with `engine: auto` is measured beside fp32, which serves where it
is as fast.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from graphkiln_backend.engines import hardware
from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.graph.errors import GraphkilnError, LoweringError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.acceptance import Requirements
from graphkiln_backend.lowering.artifacts import Artifacts
from graphkiln_backend.lowering.measurement import (
    Basis,
    Measurement,
    keep_measurement,
    measure,
    measured_at,
    read_measurement,
)
from graphkiln_backend.lowering.plan import LoweringPlan
from graphkiln_backend.lowering.proven_session import ProvenSession, build_proven_session

# Says in words why a candidate serves and the others do not: how fast each is, and what a lower precision brought.


def explain_choice(chosen: ProvenSession, basis: Basis, plan: LoweringPlan) -> ProvenSession:
    """A session with the reason of its choice, and a line for each configuration that was not chosen.

    Args:
        chosen: Serves.
        basis: What was measured.
        plan: The candidates, and the baselines that they were measured beside.
    """
    name = str(chosen.config)
    basis = replace(basis, chosen=name)
    rate = basis.rates.get(name)
    if rate is None:
        return replace(chosen, basis=basis)
    gains = _gains(basis, plan)
    told = f"the fastest here, {rate}/s at batch {basis.batch}"
    reason = "; ".join(filter(None, (chosen.config.reason, told, gains.get(name))))
    beside = f"/s at batch {basis.batch} beside {rate}/s"
    slower = tuple(
        f"{other}: {_refusal(gains.get(other), chosen, plan)}, {basis.rates[other]}{beside}"
        for other in basis.rates
        if other != name
    )
    if gains and name not in gains:
        _log.warning("%s", next(line for line in slower if line.partition(":")[0] in gains))
    return replace(chosen, config=replace(chosen.config, reason=reason), slower=slower, basis=basis)


def _refusal(gain: str | None, chosen: ProvenSession, plan: LoweringPlan) -> str:
    """Why a configuration does not serve."""
    taken = str(chosen.config) in map(str, plan.candidates)
    return "not clearly faster" if gain is None else gain if taken else f"{gain}: not taken"


def _gains(basis: Basis, plan: LoweringPlan) -> Mapping[str, str]:
    """Of each candidate how its precision compares with the fastest fp32, by name."""
    fp32 = max((basis.rates.get(str(config), 0.0) for config in plan.baselines), default=0.0)
    if not fp32:
        return {}
    return {
        str(config): f"{config.precision} was measured {_ratio(rate / fp32)}x of {Precision.FP32} on this machine"
        for config in plan.candidates
        if (rate := basis.rates.get(str(config)))
    }


def _ratio(ratio: float) -> str:
    """With two digits, and a third where two would say that both are equal."""
    return f"{ratio:.2g}" if abs(ratio - 1) > 0.05 else f"{ratio:.3g}"


_log = logging.getLogger("graphkiln.lowering")


def select_session(artifacts: Artifacts, plan: LoweringPlan, requirements: Requirements) -> ProvenSession:
    """Builds, proves and warms the fastest candidate that works, or else the first fallback that does.

    Args:
        artifacts: Of the version.
        plan: The configurations to try.
        requirements: What a session must do.

    Raises:
        LoweringError: None works; `attempts` says what each came to.
    """
    builder = _Builder(artifacts, requirements)
    if len(plan.candidates) + len(plan.baselines) > 1:
        selected = _build_fastest(builder, plan)
    else:
        selected = builder.build_first(plan.candidates)
    selected = selected or builder.build_first(plan.fallback)
    if selected is None:
        raise LoweringError(f"cannot serve {artifacts.version.graph_path}", attempts=tuple(builder.failures))
    return replace(selected, fallbacks=tuple(builder.failures))


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
        """The first that works."""
        return next((built for config in configs if (built := self.build(config))), None)


def _build_fastest(builder: _Builder, plan: LoweringPlan) -> ProvenSession | None:
    """The configuration that is the fastest on the largest batch, as it is remembered or measured now.

    Baselines come first: where a lower precision is not faster, its error buys nothing.
    """
    configs = (*plan.baselines, *plan.candidates)
    with _closed_unless_taken() as built:
        basis = _compare(builder, plan, configs, built)
        if basis is None:
            return None
        chosen = built.pop(basis.chosen, None)
    if chosen is None:
        # A choice that no longer works gives way to the others.
        chosen = builder.build_first(sorted(configs, key=lambda config: str(config) != basis.chosen))
    return chosen and explain_choice(chosen, basis, plan)


def _compare(
    builder: _Builder, plan: LoweringPlan, configs: Sequence[SessionConfig], built: dict[str, ProvenSession]
) -> Basis | None:
    """What is remembered of configurations, or else measured and remembered; None where none works.

    The lock on what is remembered is held meanwhile: of the instances of a model one measures, and all choose alike.

    Args:
        builder: Builds them.
        plan: Where they come from.
        configs: The candidates and their baselines.
        built: Takes the sessions that are built to be measured, by name.
    """
    artifacts, batch = builder.artifacts, builder.requirements.largest_batch
    with artifacts.reserve_choice(configs, _conditions(builder)) as reservation:
        remembered = read_measurement(reservation)
        measurement = remembered or _measure(builder, plan, configs, built)
        if measurement is None:
            return None
        if len(measurement.rates) == len(configs) and not remembered:
            keep_measurement(reservation, measurement)  # one that failed is tried again at the next start
        return Basis(
            chosen=measurement.chosen,
            rates=measurement.rates,
            batch=batch,
            machine=hardware.identity(configs[0].device),
            measured_at=measured_at(reservation).isoformat(timespec="seconds"),
            remembered=remembered is not None,
        )


def _measure(
    builder: _Builder, plan: LoweringPlan, configs: Sequence[SessionConfig], built: dict[str, ProvenSession]
) -> Measurement | None:
    """Builds all that can be built, and compares them; None where nothing can."""
    batch = builder.requirements.largest_batch
    _log.info("measuring %s at batch %d", ", ".join(map(str, configs)), batch)
    for config in configs:
        if session := builder.build(config):
            built[str(config)] = session
    if not built:
        return None
    sessions = {name: proven.session for name, proven in built.items()}
    synthetic = {proven.synthetic for proven in built.values()}
    samples = builder.artifacts.version.golden or (synthetic.pop() if len(synthetic) == 1 else None)
    measurement = measure(sessions, samples, batch)
    if measurement.rates:
        return measurement
    # What cannot be timed is served as it is requested.
    return replace(measurement, chosen=next((str(c) for c in plan.candidates if str(c) in built), measurement.chosen))


@contextmanager
def _closed_unless_taken() -> Iterator[dict[str, ProvenSession]]:
    """Sessions by name; those that are still in it at the end of the block are closed, however that ends."""
    built: dict[str, ProvenSession] = {}
    try:
        yield built
    finally:
        for proven in built.values():
            proven.session.close()


def _conditions(builder: _Builder) -> dict[str, str]:
    """What a candidate must do to be one, as the key of the remembered measurement names it."""
    manifest = builder.artifacts.version.manifest
    return {
        "batch": str(builder.requirements.largest_batch),
        "self-test": str(builder.requirements.self_test),
        "golden samples": manifest.golden.sha256 if manifest and manifest.golden else "none",
    }
