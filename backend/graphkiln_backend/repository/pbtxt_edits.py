"""Changes of a protobuf's text that touch only what differs: comments, order and spacing of the rest stay.

What is left out of a message goes with its lines, what is new is written behind the rest, a value that differs is
replaced where it stands. A field whose elements became more or fewer is written anew as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeAlias

from google.protobuf import message_factory, text_format
from google.protobuf.message import Message

# Where the fields of a protobuf's text stand in it, so that one can be changed and the rest stays as it was written.
#
# Source: Protocol Buffers, "Text Format Language Specification".

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


FieldDescriptor: TypeAlias = Any
"""Of protobuf: two classes, by how it was built."""


class _Edit(NamedTuple):
    begin: int
    end: int
    text: str


def edited_text(text: str, before: Message, after: Message) -> str:
    """The text of a message, changed to that of another one.

    Args:
        text: As somebody wrote it.
        before: The message that it says.
        after: The message that it is to say, of the same type.

    Raises:
        ValueError: It cannot be changed so: it is to be written anew.
    """
    editor = _Editor(text)
    editor.change(read_fields(text), None, before, after)
    found = editor.result()
    try:
        said = text_format.Parse(found, type(after)())
    except text_format.ParseError as error:
        raise ValueError(f"the changed text is no message: {error}") from error
    if said != after:
        raise ValueError("the changed text is another message")
    return found


class _Editor:
    """Collects what is to be changed in a text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._newline = "\r\n" if "\r\n" in text else "\n"
        self._edits: list[_Edit] = []

    def change(self, fields: Sequence[Field], close: int | None, before: Message, after: Message) -> None:
        """Changes a message.

        Args:
            fields: As they stand.
            close: Offset of the bracket behind them; None for the whole text.
            before: What they say.
            after: What they are to say.
        """
        for descriptor in after.DESCRIPTOR.fields:
            old, new = _alone(before, descriptor.name), _alone(after, descriptor.name)
            if old != new:
                own = [field for field in fields if field.name == descriptor.name]
                self._change_field(own, descriptor, old, new, lambda added: self._insert(fields, close, added))

    def result(self) -> str:
        """The text with all changes.

        Raises:
            ValueError: Two of them are of the same place.
        """
        parts, at = [], 0
        for edit in sorted(self._edits, key=lambda each: (each.begin, each.end)):
            if edit.begin < at:
                raise ValueError(f"two changes at character {edit.begin}")
            parts += [self._text[at : edit.begin], edit.text.replace("\n", self._newline)]
            at = edit.end
        return "".join((*parts, self._text[at:]))

    def _change_field(
        self,
        own: Sequence[Field],
        descriptor: FieldDescriptor,
        old: Message,
        new: Message,
        insert: Callable[[Message], None],
    ) -> None:
        if not own:
            insert(new)
        elif not new.ListFields():
            for field in own:
                self._remove(field)
        elif _is_map(descriptor):
            self._change_map(own, descriptor, old, new, insert)
        elif not self._change_each(own, descriptor, old, new):
            self._edits.append(_Edit(own[0].value, own[0].value_end, _value_text(new, descriptor)))
            for field in own[1:]:
                self._remove(field)

    def _change_each(self, own: Sequence[Field], descriptor: FieldDescriptor, old: Message, new: Message) -> bool:
        """Changes messages one by one; whether there are as many as there were."""
        if descriptor.message_type is None:
            return False
        written = [value for field in own for value in field.values]
        olds, news = _messages(old, descriptor), _messages(new, descriptor)
        if not len(written) == len(olds) == len(news) or any(value.fields is None for value in written):
            return False
        for value, before, after in zip(written, olds, news, strict=True):
            self.change(value.fields or (), value.end - 1, before, after)
        return True

    def _change_map(
        self,
        own: Sequence[Field],
        descriptor: FieldDescriptor,
        old: Message,
        new: Message,
        insert: Callable[[Message], None],
    ) -> None:
        entry = _entry_type(descriptor)
        olds, news = getattr(old, descriptor.name), getattr(new, descriptor.name)
        written = {self._key(value, entry): (field, value) for field in own for value in field.values}
        for key in sorted({*olds, *news}):
            if key not in news:
                self._remove_entry(*written[key])
            elif key not in olds:
                insert(_with_entry(type(new)(), descriptor.name, key, news[key]))
            elif olds[key] != news[key]:
                value = written[key][1]
                before, after = entry(key=key, value=olds[key]), entry(key=key, value=news[key])
                self.change(value.fields or (), value.end - 1, before, after)

    def _key(self, value: Value, entry: Callable[..., Any]) -> Any:
        return text_format.Parse(self._text[value.begin + 1 : value.end - 1], entry()).key

    def _remove_entry(self, field: Field, value: Value) -> None:
        if len(field.values) > 1:
            raise ValueError(f"an entry of a list at character {value.begin}")
        self._remove(field)

    def _remove(self, field: Field) -> None:
        """With its lines and the end of the one before, where nothing else stands on them."""
        begin, end = self._text.rfind("\n", 0, field.begin), self._text.find("\n", field.end)
        begin, end = max(begin, 0), len(self._text) if end < 0 else end
        is_alone = not (self._text[begin : field.begin] + self._text[field.end : end]).strip()
        if not is_alone:
            begin, end = field.begin - self._is_between_blanks(field), field.end  # one of them stays
        self._edits.append(_Edit(begin, end, ""))

    def _is_between_blanks(self, field: Field) -> bool:
        return self._text[field.begin - 1 : field.begin] == self._text[field.end : field.end + 1] == " "

    def _insert(self, fields: Sequence[Field], close: int | None, added: Message) -> None:
        """Behind the fields of a message, on a line of its own where they have such."""
        if close is None:
            before = "\n" if self._text and not self._text.endswith("\n") else ""
            self._edits.append(_Edit(len(self._text), len(self._text), before + text_format.MessageToString(added)))
            return
        line = text_format.MessageToString(added, as_one_line=True)
        self._edits.append(self._behind(fields[-1], close, line) if fields else self._inside(close, line))

    def _behind(self, last: Field, close: int, line: str) -> _Edit:
        end = self._text.find("\n", last.end, close)
        if end < 0:
            return _Edit(last.end, last.end, f" {line}")
        end -= self._text[end - 1] == "\r"
        return _Edit(end, end, f"\n{self._indent(last.begin)}{line}")

    def _inside(self, close: int, line: str) -> _Edit:
        indent = self._indent(close)
        is_alone = not self._text[self._text.rfind("\n", 0, close) + 1 : close].strip()
        return _Edit(close, close, f"  {line}\n{indent}" if is_alone else f" {line} ")

    def _indent(self, place: int) -> str:
        """The blanks that the line of a place begins with."""
        line = self._text[self._text.rfind("\n", 0, place) + 1 : place]
        return line[: len(line) - len(line.lstrip())]


def _alone(message: Message, name: str) -> Message:
    """A message with one of its fields only."""
    found = type(message)()
    found.CopyFrom(message)
    for descriptor, _ in message.ListFields():
        if descriptor.name != name:
            found.ClearField(descriptor.name)
    return found


def _is_map(descriptor: FieldDescriptor) -> bool:
    return bool(descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry)


def _entry_type(descriptor: FieldDescriptor) -> Callable[..., Any]:
    """Of a map of messages; entries of another one are not changed one by one."""
    if descriptor.message_type.fields_by_name["value"].message_type is None:
        raise ValueError(f"{descriptor.name} holds no messages")
    return message_factory.GetMessageClass(descriptor.message_type)


def _messages(message: Message, descriptor: FieldDescriptor) -> list[Message]:
    """Of a field: one, or those that it repeats."""
    found = getattr(message, descriptor.name)
    return list(found) if isinstance(found, MutableSequence) else [found]


def _value_text(message: Message, descriptor: FieldDescriptor) -> str:
    """The value of a message's only field as text: of a repeated one a list."""
    line = text_format.MessageToString(message, as_one_line=True)
    values = [line[value.begin : value.end] for field in read_fields(line) for value in field.values]
    is_repeated = isinstance(getattr(message, descriptor.name), MutableSequence)
    return f"[ {', '.join(values)} ]" if is_repeated else values[0]


def _with_entry(message: Message, name: str, key: Any, value: Message) -> Message:
    getattr(message, name)[key].CopyFrom(value)
    return message
