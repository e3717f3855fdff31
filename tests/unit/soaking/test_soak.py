"""Injection of faults into a fake service, and recovery times."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from soaking import soak as module
from soaking.faults import Fault, Field, Over, at_once
from soaking.soak import Injector
from soaking.traffic import Ledger, Versions


class Damage:
    """A fault that counts how often it was undone."""

    def __init__(self, name: str = "damage", over: Over = at_once, error: Exception | None = None) -> None:
        self.undone = 0

        @contextmanager
        def inject(_: Field) -> Iterator[Over]:
            try:
                if error:
                    raise error
                yield over
            finally:
                self.undone += 1

        self.fault = Fault(name=name, inject=inject)


class FakeService:
    def __init__(self) -> None:
        self.running = True
        self.starts = 0
        self.counts = {"server_died": 2}

    def is_running(self) -> bool:
        return self.running

    def restarts(self) -> dict[str, int]:
        return dict(self.counts)

    def end(self) -> None:
        self.running = False

    def start(self) -> None:
        self.running = True
        self.starts += 1

    def wait_ready(self) -> None:
        assert self.running


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def make(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Injector]:
    monkeypatch.setattr(module, "AFTERMATH_S", 0.0)
    monkeypatch.setattr(module, "RECOVERY_LIMIT_S", 0.3)
    monkeypatch.setattr(module, "_QUIET_S", (0.0, 0.0))
    monkeypatch.setattr(module, "every_model_answers", lambda _: True)
    anything: Any = service
    where = Field(
        service=anything,
        folder=Path("/none"),
        store=Path("/none"),
        versions=Versions(),
        ledger=Ledger(),
        chance=random.Random(1),
    )
    watching: Any = SimpleNamespace(last_failure=lambda *_: None, statuses=lambda *_: {}, longest_s=lambda *_: 0.0)
    return lambda *faults: Injector(where=where, readiness=watching, faults=[damage.fault for damage in faults])


def test_a_fault_without_effect_has_no_recovery_time(make: Callable[..., Injector]) -> None:
    fault = Damage()
    injector = make(fault)
    injector._inject(fault.fault)
    (injection,) = injector.injections
    assert (injection.ready_again_s, injection.trouble, injection.restarts) == (0.0, "", {})
    assert fault.undone == 1


def test_recovery_ends_after_the_last_failure(make: Callable[..., Injector], monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, False, True])
    monkeypatch.setattr(module, "every_model_answers", lambda _: next(answers))
    fault = Damage()
    injector = make(fault)
    injector._inject(fault.fault)
    ready_again_s = injector.injections[0].ready_again_s
    assert ready_again_s is not None
    assert ready_again_s >= 2 * module._POLL_S - 0.05


def test_recovery_needs_the_faults_effect(make: Callable[..., Injector]) -> None:
    fault = Damage(over=lambda: False)
    injector = make(fault)
    injector._inject(fault.fault)
    assert injector.injections[0].ready_again_s is None


def test_a_service_that_does_not_recover_is_started_again_and_reported(
    make: Callable[..., Injector], service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "every_model_answers", lambda _: False)
    fault = Damage()
    injector = make(fault)
    injector._inject(fault.fault)
    assert service.starts == 1
    assert "start the service again" in injector.injections[0].trouble


def test_a_failed_injection_is_reported_and_undone(make: Callable[..., Injector]) -> None:
    fault = Damage(error=IndexError("no stub"))
    injector = make(fault)
    injector._inject(fault.fault)
    assert injector.injections[0].trouble == "IndexError: no stub"
    assert fault.undone == 1


def test_each_kind_occurs_once_in_a_round(make: Callable[..., Injector]) -> None:
    injector = make(*(Damage(name) for name in "abcde"))
    for _ in range(2):
        assert {injector._choose().name for _ in range(5)} == set("abcde")
