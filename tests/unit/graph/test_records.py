"""Frozen dataclasses that are cheap to make do what those of the standard library do."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import FrozenInstanceError, field, fields, replace
from typing import Any

import pytest

from graphkiln_backend.graph.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Ours:
    """A record."""

    name: str
    sizes: tuple[int, ...] = ()
    noted: dict[str, int] = field(default_factory=dict)
    digest: str = field(default="", compare=False)
    secret: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("no name")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Theirs:
    """The same, as the standard library makes it."""

    name: str
    sizes: tuple[int, ...] = ()
    noted: dict[str, int] = field(default_factory=dict)
    digest: str = field(default="", compare=False)
    secret: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Pair:
    """Its fields may be given by position."""

    first: int
    second: Any = None

    def __str__(self) -> str:
        return f"{self.first}-{self.second}"


VALUES: list[dict[str, Any]] = [
    {"name": "a"},
    {"name": "a", "sizes": (1, 2), "noted": {"x": 1}},
    {"name": "a", "digest": "other", "secret": "s"},
    {"name": "b"},
]


@pytest.mark.parametrize("left", VALUES)
@pytest.mark.parametrize("right", VALUES)
def test_they_are_equal_where_theirs_are(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert (Ours(**left) == Ours(**right)) == (Theirs(**left) == Theirs(**right))
    assert (Ours(**left) != Ours(**right)) == (Theirs(**left) != Theirs(**right))
    assert Ours(**left) != Theirs(**left)


@pytest.mark.parametrize("values", VALUES)
def test_they_look_alike(values: dict[str, Any]) -> None:
    assert repr(Ours(**values)) == repr(Theirs(**values)).replace("Theirs", "Ours")
    assert [each.name for each in fields(Ours)] == [each.name for each in fields(Theirs)]
    assert Ours.__slots__ == Theirs.__slots__
    assert not hasattr(Ours(**values), "__dict__")


def test_equal_ones_are_one_key() -> None:
    assert {Pair(1, "x"), Pair(1, "x"), Pair(2, "x")} == {Pair(1, "x"), Pair(2, "x")}
    assert hash(Pair(1, "x")) == hash((1, "x"))
    with pytest.raises(TypeError, match="unhashable"):
        hash(Pair(1, []))


def test_nothing_is_written_twice() -> None:
    pair = Pair(1)
    for change in (
        lambda: setattr(pair, "first", 2),
        lambda: setattr(pair, "third", 2),
        lambda: delattr(pair, "first"),
    ):
        with pytest.raises(FrozenInstanceError):
            change()
    assert pair == Pair(1)


def test_what_the_class_says_itself_stays() -> None:
    assert str(Pair(1, 2)) == "1-2"
    with pytest.raises(ValueError, match="no name"):
        Ours(name="")
    with pytest.raises(TypeError, match="positional"):
        Ours("a")  # type: ignore[misc]
    with pytest.raises(TypeError, match="name"):
        Ours()  # type: ignore[call-arg]


def test_copies_are_equal() -> None:
    ours = Ours(name="a", sizes=(1,), noted={"x": 1}, digest="d")
    pickled = pickle.loads(pickle.dumps(ours))  # noqa: S301 - our own
    for other in (copy.copy(ours), copy.deepcopy(ours), pickled, replace(ours)):
        assert other == ours
        assert other.digest == "d"
    assert replace(ours, name="b").name == "b"


def test_one_that_holds_itself_can_be_shown() -> None:
    held: list[Any] = []
    pair = Pair(1, held)
    held.append(pair)
    assert repr(pair) == "Pair(first=1, second=[...])"


def test_others_are_made_by_the_standard_library() -> None:
    @dataclass(kw_only=True, slots=True)
    class Open:
        number: int = 0

    opened = Open()
    opened.number = 3
    assert opened == Open(number=3)
