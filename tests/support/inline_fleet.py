"""The real worker in the driver's process, in place of a fleet: for tests of what the driver does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import pytest

from graphkiln_backend.scoring import driver
from graphkiln_backend.scoring.fleet import Machines
from graphkiln_backend.scoring.messages import Attempt, Computed, Outcome, ScoreRequest
from graphkiln_backend.scoring.worker import WorkerActor


class InlineFleet:
    """One worker, one attempt at a time."""

    def __init__(self, _machines: Machines, request: ScoreRequest, _: str, **__: Any) -> None:
        self._actor = WorkerActor("inline", replace(request, cores_per_worker=1))
        self._started = False
        self._waiting: list[Attempt] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._actor.close()

    def assign(self, _: str, attempt: Attempt) -> None:
        self._waiting.append(attempt)

    def wait(self, _: float, __: float | None = None) -> list[Outcome]:
        if not self._started:
            self._started = True
            return [self._actor.start()]
        if not self._waiting:
            return []
        attempt = self._waiting.pop(0)
        outcome = self._actor.compute(attempt)
        return [self._actor.commit(attempt.number) if isinstance(outcome, Computed) else outcome]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the driver use it."""
    monkeypatch.setattr(driver, "Fleet", InlineFleet)
