"""What `explain` and `lower` print with --json: settings, plan, and the session that would serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from graphkiln_backend.graph.decoding import encode

if TYPE_CHECKING:
    from graphkiln_backend.engines.base import Placement, SessionConfig
    from graphkiln_backend.graph.precision import Precision
    from graphkiln_backend.lowering.plan import LoweringPlan
    from graphkiln_backend.lowering.proven_session import ProvenSession
    from graphkiln_backend.lowering.settings import Settings


def settings_in_words(settings: Settings, saved: Precision) -> dict[str, str]:
    """Every setting with its value, as people read it.

    Args:
        settings: What is requested.
        saved: Precision that the graph was saved in.
    """
    return {
        "engine": settings.engine or "the default",
        "precision": settings.precision or f"as saved ({saved})",
        "layout": settings.layout or "the engine's",
        "conv_search": settings.conv_search or "the engine's",
        "threads": str(settings.threads or "cores / instances"),
        "streams": str(settings.streams or 1),
        "self_test": "on" if settings.self_test else "off",
        "fallback": ", ".join(map(str, settings.fallback)) or "none",
        "parallel": str(settings.parallel or "one device for each instance"),
    }


def plan_document(settings: Settings, saved: Precision, plan: LoweringPlan) -> dict[str, Any]:
    """Settings with their origins, what is tried in which order, and what was rejected."""
    rows = settings_in_words(settings, saved)
    return {
        "settings": {name: {"value": rows[name], "origin": settings.origins.get(name)} for name in rows},
        "candidates": [_config(config) for config in plan.candidates],
        "baselines": [_config(config) for config in plan.baselines],
        "fallback": [_config(config) for config in plan.fallback],
        "rejected": list(plan.rejected),
        "parallel": plan.spread.splitlines(),
    }


def session_document(proven: ProvenSession) -> dict[str, Any]:
    """What serves, what really ran, and what was proven."""
    return {
        **_config(proven.config),
        "placement": _placement(proven.placement) if proven.placement else None,
        "self_test": encode(proven.self_test) if proven.self_test else None,
        "warmup_s": proven.warmup_s,
        "fallbacks": list(proven.fallbacks),
        "slower": list(proven.slower),
        "choice": encode(proven.basis) if proven.basis else None,
        "notes": list(proven.notes),
    }


def _config(config: SessionConfig) -> dict[str, Any]:
    return {
        "engine": config.engine,
        "device": str(config.device),
        "precision": str(config.precision) if config.precision else None,
        "threads": config.threads,
        "reason": config.reason,
    }


def _placement(placement: Placement) -> dict[str, Any]:
    return {
        "nodes": dict(placement.nodes),
        "precision": str(placement.precision),
        "products": {str(name): count for name, count in placement.products.items()},
        "elsewhere": list(placement.elsewhere),
    }
