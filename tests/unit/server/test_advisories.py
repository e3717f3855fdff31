"""Known vulnerabilities of the Triton that runs."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from graphkiln_backend.server.advisories import assess
from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.server.installation import Installation

KNOWN = dict.fromkeys(("allow-http", "allow-grpc"), True)


def reachable(installation: Installation, version: str, *arguments: str, has_key: bool = True) -> set[str]:
    flags = TritonFlags.parse(arguments, KNOWN)
    found = assess(dataclasses.replace(installation, version=version), flags, has_key=has_key)
    return {name for row in found.reachable for name in row.ids}


@pytest.mark.parametrize(("version", "count"), [("2.51.0", 58), ("2.59.1", 39), ("2.72.0", 0)])
def test_a_release_has_what_later_ones_repaired(installation: Installation, version: str, count: int) -> None:
    found = assess(dataclasses.replace(installation, version=version), TritonFlags.parse([], KNOWN), has_key=True)
    assert sum(len(row.ids) for row in found.known) == count
    assert re.match(rf"{count or 'no'} (known )?vulnerabilit", str(found))


def test_an_unknown_release_has_all_of_them(installation: Installation) -> None:
    assert reachable(installation, "") == reachable(installation, "2.51.0")


def test_what_is_reachable_depends_on_the_configuration(installation: Installation) -> None:
    everything = reachable(installation, "2.51.0", has_key=False)
    assert {"CVE-2025-23310", "CVE-2025-23322", "CVE-2025-23316"} <= everything
    assert "CVE-2025-23316" not in reachable(installation, "2.51.0")
    assert "CVE-2025-23310" not in reachable(installation, "2.51.0", "--allow-http=false")
    assert "CVE-2025-23322" not in reachable(installation, "2.51.0", "--allow-grpc=false")
    assert "CVE-2025-23268" not in everything, "DALI's"


def test_the_manual_has_the_numbers_of_the_table(installation: Installation, repository: Path) -> None:
    text = " ".join((repository / "SECURITY.md").read_text().split())
    reached = len(reachable(installation, "2.51.0"))
    assert f"fixes for 58 vulnerabilities, of which clients can reach {reached} here" in text


def test_the_line_says_how_many_and_where_they_are_repaired(installation: Installation) -> None:
    old = dataclasses.replace(installation, version="2.51.0", wheel="nvidia-pytriton 0.7.0")
    assert old.title == "Triton 2.51.0 (24.10), of nvidia-pytriton 0.7.0"
    assert re.fullmatch(
        r"\d+ known vulnerabilities, \d+ of them within reach of clients, are repaired in 26.07 \(table of .*\)",
        str(assess(old, TritonFlags.parse([], KNOWN), has_key=True)),
    )
