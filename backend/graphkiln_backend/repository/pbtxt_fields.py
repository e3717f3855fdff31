"""Where the fields of a protobuf's text stand in it, so that one can be changed and the rest stays as it was written.

Source: Protocol Buffers, "Text Format Language Specification".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

_TOKEN = re.compile(
    r"""(?P<gap>\s+|\#[^\n]*)
    |(?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<mark>[{}<>\[\]:,;])
    |(?P<word>[^\s\#"'{}<>\[\]:,;]+)""",
    re.VERBOSE | re.DOTALL,
)
_CLOSING = {"{": "}", "<": ">"}


@dataclass(frozen=True, slots=True)
class Value:
    """A value, from its first character to behind its last.

    Attributes:
        begin: Offset in the text.
        end: Likewise.
        fields: Of a message; None for a number, a word or a string.
    """

    begin: int
    end: int
    fields: tuple[Field, ...] | None = None


@dataclass(frozen=True, slots=True)
class Field:
    """A field, with the comma or semicolon behind it.

    Attributes:
        name: Of the field.
        begin: Offset of its name.
        end: Offset behind it.
        value: Offset of what comes after its name and colon, a list's bracket included.
        value_end: Offset behind that.
        values: One, or those of a list.
    """

    name: str
    begin: int
    end: int
    value: int
    value_end: int
    values: tuple[Value, ...]


def read_fields(text: str) -> tuple[Field, ...]:
    """The fields of a message's text, in their order.

    Raises:
        ValueError: It is none.
    """
    return _Reader(text).fields("")


class _Token(NamedTuple):
    kind: str
    text: str
    begin: int
    end: int


def _tokens(text: str) -> list[_Token]:
    found: list[_Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise ValueError(f"nothing of a message begins at character {at}")
        at = match.end()
        if match.lastgroup != "gap":
            found.append(_Token(str(match.lastgroup), match[0], match.start(), at))
    return found


class _Reader:
    """Reads tokens one after the other."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)[::-1]
        self._end = _Token("end", "", len(text), len(text))

    def fields(self, closing: str) -> tuple[Field, ...]:
        """Up to a bracket, which stays; to the end of the text where it is empty."""
        found = []
        while self._next.text != closing:
            found.append(self._field())
        return tuple(found)

    @property
    def _next(self) -> _Token:
        return self._tokens[-1] if self._tokens else self._end

    def _take(self) -> _Token:
        return self._tokens.pop() if self._tokens else _refuse(self._end)

    def _field(self) -> Field:
        name = self._take()
        if name.kind != "word":
            _refuse(name)
        if self._next.text == ":":
            self._take()
        begin = self._next.begin
        values, end = self._list() if self._next.text == "[" else self._single()
        last = self._take().end if self._next.text in (",", ";") else end
        return Field(name.text, name.begin, last, begin, end, values)

    def _single(self) -> tuple[tuple[Value, ...], int]:
        value = self._value()
        return (value,), value.end

    def _list(self) -> tuple[tuple[Value, ...], int]:
        self._take()
        found: list[Value] = []
        while self._next.text != "]":
            found.append(self._value())
            if self._next.text == ",":
                self._take()
        return tuple(found), self._take().end

    def _value(self) -> Value:
        first = self._take()
        if first.text in _CLOSING:
            fields = self.fields(_CLOSING[first.text])
            return Value(first.begin, self._take().end, fields)
        if first.kind not in ("word", "string"):
            _refuse(first)
        last = first
        while (first.kind == "string" and self._next.kind == "string") or last.text == "-":
            last = self._take()  # strings that stand behind each other are one; a sign may stand alone
        return Value(first.begin, last.end)


def _refuse(token: _Token) -> NoReturn:
    raise ValueError(f"'{token.text or 'the end'}' at character {token.begin} is not expected")
