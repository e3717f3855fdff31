"""What of a configuration a candidate changes, as a server shows it: how one that serves is known again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphkiln_backend.repository.config import read_config
from graphkiln_backend.repository.config_changes import as_document
from graphkiln_backend.repository.version import CONFIG_FILE

Config = Mapping[str, Any]
"""As a server shows it: JSON with the protobuf's own field names."""


def scheduling(config: Config) -> tuple[Any, ...]:
    """Largest batch, queue delay, counts of instances and parameters, as both protocols show them.

    Args:
        config: As served, or as it was to be.
    """
    batching = config.get("dynamic_batching") or {}
    groups = [int(group.get("count", 1)) for group in config.get("instance_group", [])]
    parameters = {key: row.get("string_value", "") for key, row in config.get("parameters", {}).items()}
    delay = int(batching.get("max_queue_delay_microseconds", 0))
    return int(config.get("max_batch_size", 0)), delay, groups, parameters


def is_among(config: Config, others: Sequence[Config]) -> bool:
    """Whether a configuration is served as one of others is."""
    return any(scheduling(config) == scheduling(other) for other in others)


def is_left(config: Config, original: Config, candidates: Sequence[Config]) -> bool:
    """Whether a configuration is what a search has left, and not what was there before it.

    Args:
        config: As served.
        original: As it was before the search.
        candidates: What the search has loaded.
    """
    return is_among(config, candidates) and not is_among(config, [original])


def stored_document(model: Path) -> Config:
    """A model's config.pbtxt, as a server would show it that completes nothing.

    Args:
        model: The model's folder.

    Raises:
        RepositoryError: The file is not a model configuration.
    """
    return as_document(read_config(model / CONFIG_FILE))


def without_cache(config: Config) -> Config:
    """Samples come again and again: all answers would be those of a cache, and none the model's."""
    return {**config, "response_cache": {"enable": False}} if "response_cache" in config else config
