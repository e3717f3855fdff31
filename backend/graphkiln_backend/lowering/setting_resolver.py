"""One value for each setting, where several sources may give it: the source of highest precedence wins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from graphkiln_backend.lowering.setting_values import invalid_value

T = TypeVar("T")


class Sourced(NamedTuple):
    """A value as written, and the key or flag that gives it."""

    value: str
    origin: str


class SettingResolver:
    """Keys with their values. Sources are added in the order of precedence: the first value of a key stays.

    Attributes:
        rejected: One line per value that has no effect, with the reason.
    """

    def __init__(self) -> None:
        self.rejected: list[str] = []
        self._values: dict[str, Sourced] = {}

    @property
    def values(self) -> Mapping[str, Sourced]:
        """Every key that a source gives, with the value that counts."""
        return self._values

    def add(self, key: str, value: str, origin: str) -> None:
        """Adds the value of a source; rejects it where a source before this one gives another."""
        held = self._values.setdefault(key, Sourced(value, origin))
        if held.value != value:
            self.reject(key, Sourced(value, origin), f"{held.origin} requests {held.value}")

    def get(self, key: str) -> str:
        """The value that counts, or empty."""
        return self._values[key].value if key in self._values else ""

    def parse(self, key: str, parser: Callable[[str, str], T], default: T) -> T:
        """The value that counts, read by `parser(origin, value)`.

        Raises:
            RepositoryError: The value is malformed.
        """
        if key not in self._values:
            return default
        value, origin = self._values[key]
        return parser(origin, value)

    def check(self, key: str, allowed: Sequence[str]) -> None:
        """Refuses a value that is not one of some words.

        Raises:
            RepositoryError: It is not.
        """
        if key in self._values and self.get(key) not in allowed:
            value, origin = self._values[key]
            raise invalid_value(origin, value, ", ".join(allowed))

    def reject_unused(self, keys: Iterable[str], reason: str) -> None:
        """Tells of keys that are there and change nothing."""
        for key in keys:
            if key in self._values:
                self.reject(key, self._values[key], reason)

    def remove(self, key: str, reason: str) -> None:
        """Takes a value out, and tells why."""
        self.reject(key, self._values.pop(key), reason)

    def reject(self, key: str, sourced: Sourced, reason: str) -> None:
        """Tells of a value that has no effect."""
        self.rejected.append(f"{key} {sourced.value} of {sourced.origin}: {reason}")
