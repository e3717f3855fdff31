"""Faults in the store, where the server must be told of them and where it looks by itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.repository.version import read_version
from soaking.faults import BadVersion, Field, OtherContract, UnloadLoad, store_faults
from soaking.models import DIGIT_LABELS, build_store, digit_labels
from soaking.traffic import Ledger, Versions


class FakeService:
    def __init__(self, refusal: str = "") -> None:
        self.refusal = refusal
        self.told: list[str] = []

    def load(self, model: str) -> str:
        self.told.append(model)
        return self.refusal


def field(store: Path, service: Any, *, explicit: bool) -> Field:
    return Field(
        service=service,
        folder=store.parent,
        store=store,
        versions=Versions(),
        ledger=Ledger(),
        chance=random.Random(1),
        explicit=explicit,
    )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    build_store(tmp_path / "store")
    return tmp_path / "store"


def test_a_server_that_looks_by_itself_is_not_told(store: Path) -> None:
    service = FakeService()
    BadVersion("empty", "scaled", Path.mkdir).inject(field(store, service, explicit=False))
    assert service.told == []


def test_a_bad_version_must_be_refused_when_it_is_loaded(store: Path) -> None:
    fault = BadVersion("empty", "scaled", Path.mkdir)
    service = FakeService("HTTP 400: no")
    where = field(store, service, explicit=True)
    fault.inject(where)
    service.refusal = ""
    fault.undo(where)
    assert service.told == ["scaled", "scaled"], "what the store holds again must be loaded again"
    with pytest.raises(MeasurementError, match="says that it is loaded"):
        fault.inject(field(store, FakeService(), explicit=True))


def test_a_version_of_another_contract_is_whole(store: Path) -> None:
    OtherContract().put(store / "digits" / "51", 51)
    contract = read_version(store / "digits" / "51").contract
    assert contract
    assert contract.labels == digit_labels(51) != DIGIT_LABELS


def test_models_are_unloaded_only_where_that_is_the_users_to_say() -> None:
    assert any(isinstance(fault, UnloadLoad) for fault in store_faults(explicit=True))
    assert not any(isinstance(fault, UnloadLoad) for fault in store_faults(explicit=False))
