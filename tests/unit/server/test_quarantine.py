"""Versions that are kept away, until their files change."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from graphkiln_backend.repository.stores import StoredModel
from graphkiln_backend.server.managed_stores import Quarantine

MODEL = StoredModel(folder=Path("/store/m"), stamp="s", versions={1: "a", 2: "b"})


def test_a_version_is_kept_away_with_its_reason(logged: list[str]) -> None:
    quarantine = Quarantine()
    quarantine.add(MODEL, 2, "cut short")
    assert quarantine.admissible(MODEL) == [1]
    assert quarantine.reasons(MODEL) == {2: "cut short"}
    assert logged == ["m version 2 is not served: cut short"]


def test_other_files_or_another_configuration_get_another_chance(logged: list[str]) -> None:
    quarantine = Quarantine()
    quarantine.add(MODEL, 2, "cut short")
    for changed in (replace(MODEL, versions={1: "a", 2: "c"}), replace(MODEL, stamp="t")):
        assert quarantine.admissible(changed) == [1, 2]
        assert quarantine.reason(changed, 2) == ""
    assert len(logged) == 1


def test_a_model_of_another_name_is_another_model() -> None:
    quarantine = Quarantine()
    quarantine.add(MODEL, 2, "cut short")
    assert quarantine.reasons(replace(MODEL, folder=Path("/store/n"))) == {}
