"""The image's inventory (SBOM), which lists what is installed with licences, and the reviewed licences."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from containers import run_in_image

pytestmark = pytest.mark.image

INVENTORY = "/opt/graphkiln/sbom.cdx.json"
LOCKED = re.compile(r"^([A-Za-z0-9_.-]+)==(\S+)", re.MULTILINE)
LICENCES = """
import importlib.metadata, json

READ = {"sigstore-models": "MIT"}  # in its file: scripts/releasing/licences.py

def licence(metadata):
    kinds = [line.split(" :: ")[-1] for line in metadata.get_all("Classifier", []) if line.startswith("License :: ")]
    named = metadata["License-Expression"] or "; ".join(sorted(kinds)) or metadata["License"]
    return named or READ.get(metadata["Name"])

print(json.dumps({each.name: licence(each.metadata) for each in importlib.metadata.distributions()}))
"""
VERSIONS = "import importlib.metadata as m; print(*(f'{d.name}=={d.version}' for d in m.distributions()), sep='\\n')"


def printed(*command: str) -> str:
    finished = run_in_image(("--network", "none"), *command)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def canonical(versions: list[tuple[str, str]]) -> dict[str, str]:
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in versions}


@pytest.fixture(scope="module")
def components() -> list[dict[str, Any]]:
    inventory = json.loads(printed("cat", INVENTORY))
    assert inventory["bomFormat"] == "CycloneDX"
    return inventory["components"]  # type: ignore[no-any-return]


def of(components: list[dict[str, Any]], ecosystem: str) -> list[dict[str, Any]]:
    return [part for part in components if part.get("purl", "").startswith(f"pkg:{ecosystem}/")]


def test_it_has_the_locked_python_packages_and_graphkiln(components: list[dict[str, Any]], repository: Path) -> None:
    versions = canonical([(part["name"], part["version"]) for part in components if part not in of(components, "deb")])
    assert versions == canonical(LOCKED.findall(printed("python3", "-c", VERSIONS)))
    locked = canonical(LOCKED.findall((repository / "deploy" / "image" / "requirements-cpu.txt").read_text()))
    assert versions == {**locked, "graphkiln": versions["graphkiln"]}


def test_it_has_debians_packages(components: list[dict[str, Any]]) -> None:
    named = {(part["name"], part["version"]) for part in of(components, "deb")}
    listed = printed("dpkg-query", "--show", "--showformat", "${Package} ${Version}\\n")
    assert named == {tuple(line.split()) for line in listed.splitlines()}


def test_each_part_has_a_licence_or_the_path_of_one(components: list[dict[str, Any]]) -> None:
    assert [part["name"] for part in components if not part.get("licenses")] == []
    licences = {part["name"]: part["licenses"][0]["license"]["name"] for part in of(components, "deb")}
    assert licences["grep"] == "GPL-3+"
    elsewhere = [licence for licence in licences.values() if licence.startswith("see ")]
    for licence in elsewhere:
        assert licence.startswith("see /usr/share/doc/")
    printed("ls", *(licence.removeprefix("see ") for licence in elsewhere))


def test_licences_of_python_packages_are_the_reviewed_ones(repository: Path) -> None:
    """As `scripts/licences` reads them from the index."""
    licences: dict[str, str] = json.loads(printed("python3", "-c", LICENCES))
    assert len(licences) > 50
    reviewed = (repository / "deploy" / "image" / "licences.txt").read_text().splitlines()
    unknown = {name: licence for name, licence in licences.items() if licence not in reviewed}
    assert not unknown, "read them, and add them to deploy/image/licences.txt or remove the package"
    assert sorted(set(licences.values())) == reviewed
