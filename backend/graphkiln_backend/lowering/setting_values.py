"""The values of settings: text from a config.pbtxt or a flag in, typed values out.

Each parser takes the origin of the text beside it, which a refusal names.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphkiln_backend.graph.device import Parallelism
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.text import read_size

_PRECISIONS = ", ".join(Precision)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An engine, and the precision that it must compute in; None leaves it to the graph or the plan."""

    engine: str
    precision: Precision | None = None

    def __str__(self) -> str:
        return f"{self.engine}:{self.precision}" if self.precision else self.engine


_MOST_DIGITS = 20
AUTO_NUMBERS = "auto"
"""Instead of `pipeline` and `tensor`: the smallest that fit the memory."""


def parse_flag(origin: str, text: str) -> bool:
    """Reads `0` or `1`, as the C++ backend writes a flag.

    Raises:
        RepositoryError: It is neither.
    """
    if text not in ("0", "1"):
        raise invalid_value(origin, text, "0 or 1")
    return text == "1"


def parse_switch(origin: str, text: str) -> bool:
    """Reads `on` or `off`.

    Raises:
        RepositoryError: It is neither.
    """
    if text not in ("on", "off"):
        raise invalid_value(origin, text, "on or off")
    return text == "on"


def parse_count(origin: str, text: str) -> int:
    """Reads a number of threads or streams; 0 means the default.

    Raises:
        RepositoryError: It is not a whole number, or more than any machine has.
    """
    if not (text.isdecimal() and len(text) <= _MOST_DIGITS and int(text) < 1 << 31):
        raise invalid_value(origin, text, "a whole number, 0 for the default")
    return int(text)


def parse_precision(origin: str, text: str) -> Precision | None:
    """Reads a precision; empty for none.

    Raises:
        RepositoryError: It is unknown.
    """
    if not text:
        return None
    try:
        return Precision(text)
    except ValueError:
        raise invalid_value(origin, text, _PRECISIONS) from None


_PARALLEL = "auto or numbers such as data=2, pipeline=2, tensor=1, micro_batches=8, memory=2GiB"
_NUMBERS = ("data", "pipeline", "tensor", "micro_batches")


def parse_parallel(origin: str, text: str) -> Parallelism | None:
    """Reads how a model is spread: `auto`, and numbers with their names; empty for None.

    Raises:
        RepositoryError: A word is unknown, given twice, or contradicts another one.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        return None
    given: dict[str, int] = {}
    for word in (word for word in words if word != AUTO_NUMBERS):
        name, equals, value = (part.strip() for part in word.partition("="))
        number = _parse_number(name, value) if equals else None
        if number is None or name in given:
            raise invalid_value(origin, text, _PARALLEL)
        given[name] = number
    auto = AUTO_NUMBERS in words
    if auto and (given.keys() & {"pipeline", "tensor"} or words.count(AUTO_NUMBERS) > 1):
        raise invalid_value(origin, text, "auto, which chooses `pipeline` and `tensor`, or these numbers")
    if given.get("micro_batches") and not auto and given.get("pipeline", 1) == 1:
        raise invalid_value(origin, text, "with pipeline=2 or more where micro_batches is given")
    memory = given.pop("memory", 0)
    return Parallelism(auto=auto, memory_bytes=memory, **given)


def _parse_number(name: str, value: str) -> int | None:
    """A number of at least 1, or a size; None where the name or the value is none."""
    if name == "memory":
        return read_size(value) or None
    whole = value.isdecimal() and len(value) <= _MOST_DIGITS and 0 < int(value) < 1 << 16
    return int(value) if name in _NUMBERS and whole else None


def parse_choices(origin: str, text: str) -> tuple[Choice, ...]:
    """Reads a list of engines such as `openvino:bf16, onnxruntime`.

    Raises:
        RepositoryError: A precision is unknown.
    """
    return tuple(_parse_choice(origin, word) for part in text.split(",") if (word := part.strip()))


def _parse_choice(origin: str, word: str) -> Choice:
    engine, _, precision = word.partition(":")
    try:
        return Choice(engine=engine, precision=Precision(precision) if precision else None)
    except ValueError:
        expected = f"ENGINE or ENGINE:PRECISION, with a precision of {_PRECISIONS}"
        raise invalid_value(origin, word, expected) from None


def invalid_value(origin: str, text: str, expected: str) -> RepositoryError:
    """The error for a malformed value.

    Args:
        origin: The key that holds it.
        text: As written.
        expected: What may be written.
    """
    return RepositoryError(f"{origin} must be {expected}, got '{text}'")
