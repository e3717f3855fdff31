"""A model of a store, lowered as the server would on this machine, and the JSON of it for `explain` and `lower`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphkiln.cli.options import version_folder
from graphkiln_backend.graph.decoding import encode

if TYPE_CHECKING:
    from graphkiln_backend.cache.store import ArtifactCache
    from graphkiln_backend.engines.base import SessionConfig
    from graphkiln_backend.graph.precision import Precision
    from graphkiln_backend.lowering.deployment import Deployment
    from graphkiln_backend.lowering.plan import LoweringPlan
    from graphkiln_backend.lowering.proven_session import ProvenSession
    from graphkiln_backend.lowering.settings import Settings
    from graphkiln_backend.repository.config import ModelConfigProto


@contextmanager
def open_artifact_cache(cache: str, *, must_keep: bool = False) -> Iterator[ArtifactCache]:
    """The artifact cache that `--cache` names, or a temporary one; only the server evicts entries.

    Raises:
        CacheError: The folder cannot be used, and `must_keep`.
    """
    from graphkiln.cli.cache import cache_settings
    from graphkiln_backend.system.owned_folder import OwnedFolder

    settings = cache_settings(cache, sys.maxsize)
    if must_keep and settings.folder:
        with settings.open_to_fill() as artifacts:
            yield artifacts
        return
    with OwnedFolder(prefix="graphkiln-cache-") as temporary, settings.checked().open(temporary.path) as artifacts:
        yield artifacts


def read_deployment(path: Path, settings: list[str] | None, artifacts: ArtifactCache) -> Deployment:
    """Read and plan a version as the server would.

    Raises:
        GraphkilnError: The version or its configuration is not usable, or nothing can run it as requested.
    """
    from graphkiln_backend.engines.hardware import gpus
    from graphkiln_backend.lowering.deployment import Deployment
    from graphkiln_backend.lowering.settings import parse_override
    from graphkiln_backend.repository.model_config import ModelConfig

    folder = version_folder(path).absolute()
    config = ModelConfig.from_protobuf(_complete(folder, artifacts), has_gpu=bool(gpus()))
    return Deployment.here(folder, config, artifacts, [parse_override(text) for text in settings or []])


def images_in_words(path: Path, artifacts: ArtifactCache) -> str:
    """Describe how a model takes encoded images on this machine, or why not; "" if not configured.

    Raises:
        GraphkilnError: The version or its configuration is not usable.
    """
    from graphkiln_backend.server.image_models import asks_for_images, describe_images

    folder = version_folder(path).absolute()
    return describe_images(_complete(folder, artifacts)) if asks_for_images(folder.parent) else ""


def _complete(version: Path, artifacts: ArtifactCache) -> ModelConfigProto:
    """The configuration of a version's model, as the server completes it."""
    from graphkiln_backend.lowering.importing import convert_if_needed
    from graphkiln_backend.repository.overlay import complete_config
    from graphkiln_backend.server.run_folder import installed_backend_names

    return complete_config(version.parent, installed_backend_names(), partial(convert_if_needed, cache=artifacts))


def settings_in_words(settings: Settings, saved: Precision) -> dict[str, str]:
    """Every setting with its value for people, beside the precision that the graph was saved in."""
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
    """Serving configuration, placement, and proof."""
    placement = None
    if found := proven.placement:
        placement = {
            "nodes": dict(found.nodes),
            "precision": str(found.precision),
            "products": {str(name): count for name, count in found.products.items()},
            "elsewhere": list(found.elsewhere),
        }
    return {
        **_config(proven.config),
        "placement": placement,
        "self_test": encode(proven.self_test) if proven.self_test else None,
        "warmup_s": proven.warmup_s,
        "fallbacks": list(proven.failures),
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
