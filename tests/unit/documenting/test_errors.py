"""The page of errors."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

from documenting import errors
from graphkiln_backend.graph.errors import GraphkilnError

ROOMS = ("backend", "client", "converters", "scripts/graphkiln")


@pytest.fixture(scope="module", autouse=True)
def _defined() -> None:
    for name in errors.MODULES:
        import_module(name)


def classes(repository: Path) -> dict[str, set[str]]:
    """Name -> names of the bases, of every class of the sources; what is private leaves no module."""
    texts = (path.read_text() for room in ROOMS for path in (repository / room).rglob("*.py"))
    found = (each for text in texts for each in re.findall(r"^ *class ([A-Za-z]\w*)\(([^)]*)\):", text, re.MULTILINE))
    return {name: set(re.findall(r"\w+", bases)) for name, bases in found}


def test_every_error_of_the_sources_is_there(repository: Path) -> None:
    known, bases = {GraphkilnError.__name__}, classes(repository)
    while found := {name for name, above in bases.items() if known & above} - known:
        known |= found
    assert {each.__name__ for each in errors.tree()} == known


def test_each_stands_below_its_base_and_the_order_is_that_of_the_modules() -> None:
    found = list(errors.tree())
    assert all(found.index(each.__bases__[0]) < found.index(each) for each in found[1:])  # type: ignore[arg-type]
    names = [each.__name__ for each in found]
    assert names[1] == "ManifestError"
    assert names.index("ProtocolError") < names.index("ContractChanged") < names.index("ScoringError")


def test_codes_are_those_of_the_classes() -> None:
    page = errors.render()
    assert "| `InvalidInput` | `ClientError` | 2 | INVALID_ARG: 400, INVALID_ARGUMENT |" in page
    assert "| `GraphkilnError` |  | 1 | INTERNAL: 500, INTERNAL |" in page
    assert "| `RunInterrupted` | `ScoringError` | 128 and the number of the signal |" in page
    assert "| `OutOfMemory` | `GraphkilnError` | 1 | UNAVAILABLE: 503, UNAVAILABLE |" in page
    assert "`retry_after_s`: Seconds to wait" in page
