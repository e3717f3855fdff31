"""Which function translates which operation."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.oneflow import operators
from graphkiln_converters.oneflow import translation as registry
from graphkiln_converters.oneflow.building import Op, Value
from graphkiln_converters.oneflow.operators import activations
from graphkiln_converters.oneflow.translation import GROUP, built_in_translators, find_translators
from graphkiln_converters.oneflow.translator import TRANSLATORS, translates


def doubled(op: Op) -> Value:
    return op.emit("Add", op.x, op.x)


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """Entry points of the group; of other groups there are none."""
    entries: list[EntryPoint] = []
    monkeypatch.setattr(registry, "entry_points", lambda group: entries if group == GROUP else [])
    monkeypatch.setattr(EntryPoint, "load", lambda _: doubled)
    return entries


@pytest.fixture
def _restored() -> Iterator[None]:
    before = dict(TRANSLATORS)
    yield
    TRANSLATORS.clear()
    TRANSLATORS.update(before)


@pytest.mark.usefixtures("_restored")
def test_a_function_translates_all_the_operations_that_it_names() -> None:
    marked = translates("theirs.one", "theirs.two")(doubled)
    assert marked is doubled
    assert TRANSLATORS["theirs.one"] is TRANSLATORS["theirs.two"] is doubled


def test_every_module_of_operators_is_among_them() -> None:
    modules = {function.__module__ for function in built_in_translators().values()}
    assert {name.removeprefix(f"{operators.__name__}.") for name in modules} == {
        *("activations", "arithmetic", "arrangement", "convolution", "normalization", "pooling", "products"),
        *("reductions", "resizing"),
    }


def test_only_those_of_the_graph_are_returned() -> None:
    assert find_translators(["relu", "silu", "relu"]) == {"relu": activations.unary, "silu": activations.silu}
    assert find_translators([]) == {}


def test_all_unknown_ones_are_counted() -> None:
    message = r"2 of 3 kinds of operations cannot be translated: bend \(1 times\), warp \(2 times\)"
    with pytest.raises(ConversionError, match=message) as caught:
        find_translators(["warp", "relu", "bend", "warp"])
    assert GROUP in caught.value.hint


def test_a_third_party_adds_one(third_party: list[EntryPoint]) -> None:
    third_party.append(EntryPoint(name="theirs.double", value="theirs:doubled", group=GROUP))
    assert find_translators(["theirs.double", "relu"]) == {"theirs.double": doubled, "relu": activations.unary}


def test_a_third_party_replaces_one(third_party: list[EntryPoint]) -> None:
    third_party.append(EntryPoint(name="relu", value="theirs:doubled", group=GROUP))
    assert find_translators(["relu"]) == {"relu": doubled}


def test_nothing_is_imported_that_the_graph_does_not_use(
    third_party: list[EntryPoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: EntryPoint) -> None:
        raise ImportError("theirs is not installed")

    third_party.append(EntryPoint(name="theirs.double", value="theirs:doubled", group=GROUP))
    monkeypatch.setattr(EntryPoint, "load", broken)
    assert list(find_translators(["relu"])) == ["relu"]


def test_the_guide_counts_the_operations(repository: Path) -> None:
    guide = " ".join((repository / "docs" / "how-to" / "oneflow.md").read_text().split())
    assert f" {len(built_in_translators())} operations are known" in guide
