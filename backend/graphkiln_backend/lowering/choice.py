"""Says in words why a candidate serves and the others do not: how fast each is, and what a lower precision brought."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.measurement import Basis
from graphkiln_backend.lowering.plan import LoweringPlan
from graphkiln_backend.lowering.proven_session import ProvenSession

_log = logging.getLogger("graphkiln.lowering")


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
