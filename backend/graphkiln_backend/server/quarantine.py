"""Versions that failed, and why: they are not tried again until their files change."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from graphkiln_backend.repository.stores import StoredModel

_log = logging.getLogger("graphkiln.server")


@dataclass(slots=True)
class Quarantine:
    """The reasons by model, version, and the stamp of its files: other files are another version."""

    _reasons: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)

    def add(self, model: StoredModel, version: int, reason: str) -> None:
        """Keeps a version away until its files or its model's configuration change."""
        self._reasons[model.name, version] = (_files(model, version), reason)
        _log.error("%s version %d is not served: %s", model.name, version, reason)

    def reason(self, model: StoredModel, version: int) -> str:
        """Why a version with these very files is kept away; empty where it is not."""
        files, reason = self._reasons.get((model.name, version), ("", ""))
        return reason if files == _files(model, version) else ""

    def admissible(self, model: StoredModel) -> list[int]:
        """The versions of a model that are not kept away."""
        return [version for version in model.versions if not self.reason(model, version)]

    def reasons(self, model: StoredModel) -> dict[int, str]:
        """Why versions of a model are kept away."""
        return {version: reason for version in model.versions if (reason := self.reason(model, version))}


def _files(model: StoredModel, version: int) -> str:
    return f"{model.stamp} {model.versions.get(version, '')}"
