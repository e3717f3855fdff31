"""The example model as a subject, read once per test module."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from graphkiln.tuning.subject import Subject, read_subject, vanishing_cache


def digits_subject(repository: Path) -> Subject:
    """Return the example model as a subject on two cores."""
    with vanishing_cache() as cache:
        return replace(read_subject(repository / "model_repository" / "digits" / "1", cache), cores=2)


def changed(subject: Subject, **config: Any) -> Subject:
    """Replace configuration values of the subject."""
    return replace(subject, config=replace(subject.config, **config))
