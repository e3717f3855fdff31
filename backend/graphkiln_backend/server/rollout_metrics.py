"""Metrics of rollouts, from the files in their folders."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from graphkiln_backend.server.rollout_gates import agreement_bounds
from graphkiln_backend.server.rollouts import Progress, RolloutFolder, Wanted

# Share of equal decisions below which the alert fires, for rollouts without `--agree`.
DEFAULT_AGREEMENT = 0.99
# An ended rollout is published for a day, so that its alert is seen.
_SHOWN_S = 86_400.0
_QUANTILES = (0.5, 0.99)

Sample = tuple[str, float, dict[str, str]]


def rollout_samples(folders: Iterable[RolloutFolder]) -> Iterator[Sample]:
    """Name, value and labels of the metrics of all rollouts that run or have ended within a day."""
    for folder in folders:
        for model in folder.models():
            wanted, progress = folder.read_wanted(model), folder.read_progress(model)
            if wanted and progress and (wanted.is_running or time.time() - progress.updated_at < _SHOWN_S):
                yield from _samples(wanted, progress)


def _samples(wanted: Wanted, progress: Progress) -> Iterator[Sample]:
    labels = {"model": wanted.model, "version": str(progress.candidate)}
    state = {"phase": progress.phase or "loading", "by": "server" if wanted.reason else "user"}
    yield "graphkiln_rollout_info", 1, {**labels, **state, "serving": str(progress.serving)}
    yield "graphkiln_rollout_share", progress.share, labels
    for name in ("compared", "disagreed", "undecided", "answered", "dropped", "failed"):
        yield f"graphkiln_rollout_{name}_total", getattr(progress, name), labels
    low, high = agreement_bounds(progress, wanted.gates)
    yield "graphkiln_rollout_agreement", low, {**labels, "bound": "lower"}
    yield "graphkiln_rollout_agreement", high, {**labels, "bound": "upper"}
    yield "graphkiln_rollout_agreement_limit", wanted.gates.agree or DEFAULT_AGREEMENT, labels
    for role, latency in (("serving", progress.serving_latency), ("candidate", progress.candidate_latency)):
        for quantile in _QUANTILES if latency.total else ():
            keys = {**labels, "role": role, "quantile": str(quantile)}
            yield "graphkiln_rollout_latency_seconds", latency.quantile(quantile), keys
