"""Ensembles of a store that a model is a step of: they decide how small its largest batch may become.

Source: Triton core, `ValidateEnsembleConfig`: a step that takes batches takes those of its ensemble; a step without
batches is judged by its shapes alone.
"""

from __future__ import annotations

from pathlib import Path

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository.config import read_config
from graphkiln_backend.repository.version import CONFIG_FILE


def ensembles_of(model: Path) -> dict[str, int]:
    """The ensembles of the same store that a model is a step of, by name, each with its largest batch.

    Args:
        model: The model's folder; its neighbors are read. One whose configuration cannot be read is none.
    """
    found = {}
    for path in sorted(model.parent.glob(f"[!.]*/{CONFIG_FILE}")):
        try:
            config = read_config(path)
        except RepositoryError:
            continue
        if any(step.model_name == model.name for step in config.ensemble_scheduling.step):
            found[path.parent.name] = int(config.max_batch_size)
    return found
