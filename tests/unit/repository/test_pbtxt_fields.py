"""Where the fields of a protobuf's text stand."""

from __future__ import annotations

import pytest

from graphkiln_backend.repository.pbtxt_edits import Value, read_fields

TEXT = """# { no field: 1 }
name: "a # b" 'c'
max_batch_size : -8, ratio: - 1.5e3;
group [ { count: 1 }, < kind: KIND_CPU > ]  # two
sizes: [ 1, 2 ]
none: []
batching { }
"""


def shown(text: str, value: Value) -> str:
    return text[value.begin : value.end]


def test_fields_stand_where_they_were_written() -> None:
    fields = read_fields(TEXT)
    assert [field.name for field in fields] == [
        "name", "max_batch_size", "ratio", "group", "sizes", "none", "batching",
    ]  # fmt: skip
    assert [[shown(TEXT, value) for value in field.values] for field in fields] == [
        ["\"a # b\" 'c'"], ["-8"], ["- 1.5e3"], ["{ count: 1 }", "< kind: KIND_CPU >"], ["1", "2"], [], ["{ }"],
    ]  # fmt: skip
    assert [TEXT[field.begin : field.end] for field in fields[1:3]] == ["max_batch_size : -8,", "ratio: - 1.5e3;"]
    assert TEXT[fields[4].value : fields[4].value_end] == "[ 1, 2 ]"


def test_messages_hold_fields() -> None:
    group, batching = (field for field in read_fields(TEXT) if field.name in ("group", "batching"))
    assert [[field.name for field in value.fields or ()] for value in group.values] == [["count"], ["kind"]]
    assert batching.values[0].fields == ()


@pytest.mark.parametrize("text", ["a", "a {", "a: {]", "a }", 'a: "open', ": 1", "a: [1", "a: ,", "{}"])
def test_what_is_no_message_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="character"):
        read_fields(text)


def test_nothing_has_no_fields() -> None:
    assert read_fields("  # only a comment") == ()
