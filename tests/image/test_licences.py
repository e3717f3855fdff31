"""The licences of what the CPU image installs: each is one that somebody has read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from containers import run_in_image

pytestmark = pytest.mark.image

PROGRAM = """
import importlib.metadata, json

def licence(told):
    kinds = [line.split(" :: ")[-1] for line in told.get_all("Classifier", []) if line.startswith("License :: ")]
    return told["License-Expression"] or "; ".join(sorted(kinds)) or told["License"]

print(json.dumps({one.name: licence(one.metadata) for one in importlib.metadata.distributions()}))
"""
"""What `scripts/licences` reads from the same fields, of the releases that are in the image."""


@pytest.fixture(scope="module")
def licences() -> dict[str, str]:
    finished = run_in_image(("--network", "none"), "python3", "-c", PROGRAM)
    return json.loads(finished.stdout)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def read(repository: Path) -> list[str]:
    return (repository / "deploy" / "image" / "licences.txt").read_text().splitlines()


def test_every_package_tells_one_that_we_know(licences: dict[str, str], read: list[str]) -> None:
    assert len(licences) > 50
    unknown = {name: licence for name, licence in licences.items() if licence not in read}
    assert not unknown, "read them, and add them to deploy/image/licences.txt or do without the package"


def test_the_list_names_none_that_is_gone(licences: dict[str, str], read: list[str]) -> None:
    assert sorted(set(licences.values())) == read
