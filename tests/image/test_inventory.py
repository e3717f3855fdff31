"""The image's inventory (SBOM): all that is installed in it, each with its licence, and nothing else."""

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


def test_it_has_the_python_packages_that_are_locked_and_ours(
    components: list[dict[str, Any]], repository: Path
) -> None:
    versions = canonical([(part["name"], part["version"]) for part in components if part not in of(components, "deb")])
    assert versions == canonical(LOCKED.findall(printed("python3", "-c", VERSIONS)))
    locked = canonical(LOCKED.findall((repository / "deploy" / "image" / "requirements-cpu.txt").read_text()))
    assert versions == {**locked, "graphkiln": versions["graphkiln"]}


def test_it_has_debians_packages(components: list[dict[str, Any]]) -> None:
    named = {(part["name"], part["version"]) for part in of(components, "deb")}
    listed = printed("dpkg-query", "--show", "--showformat", "${Package} ${Version}\\n")
    assert named == {tuple(line.split()) for line in listed.splitlines()}


def test_each_has_a_licence_or_says_where_it_stands(components: list[dict[str, Any]]) -> None:
    assert [part["name"] for part in components if not part.get("licenses")] == []
    licences = {part["name"]: part["licenses"][0]["license"]["name"] for part in of(components, "deb")}
    assert licences["grep"] == "GPL-3+"
    elsewhere = [licence for licence in licences.values() if licence.startswith("see ")]
    for licence in elsewhere:
        assert licence.startswith("see /usr/share/doc/")
    printed("ls", *(licence.removeprefix("see ") for licence in elsewhere))
