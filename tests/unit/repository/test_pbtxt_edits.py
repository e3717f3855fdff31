"""Changes of a protobuf's text: what differs is changed, all else stays to the letter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from google.protobuf import text_format

from graphkiln_backend.repository.config import pb
from graphkiln_backend.repository.pbtxt_edits import edited_text

FOREIGN = """# resnet, since spring
platform: "onnxruntime_onnx"   # Triton's own
max_batch_size: 16

dynamic_batching {
  # measured in May
  preferred_batch_size: [ 4, 8 ]
  max_queue_delay_microseconds: 500  # half a millisecond
}
instance_group [ { count: 2, kind: KIND_CPU } ]  # a core each
optimization { execution_accelerators {
  cpu_execution_accelerator : [ { name : "openvino" } ]
}}
parameters { key: "intra_op_thread_count" value { string_value: "1" } }
# the end
"""

Change = Callable[[pb.ModelConfig], None]


def edit(text: str, *changes: Change) -> str:
    before = text_format.Parse(text, pb.ModelConfig())
    after = pb.ModelConfig()
    after.CopyFrom(before)
    for change in changes:
        change(after)
    found = edited_text(text, before, after)
    assert text_format.Parse(found, pb.ModelConfig()) == after
    return found


def lines_that_differ(one: str, other: str) -> tuple[list[str], list[str]]:
    """Of each, those that the other one lacks."""
    lines = [text.splitlines() for text in (one, other)]
    return [line for line in lines[0] if line not in lines[1]], [line for line in lines[1] if line not in lines[0]]


def set_instances(count: int) -> Change:
    return lambda config: setattr(config.instance_group[0], "count", count)


def set_parameter(key: str, value: str) -> Change:
    return lambda config: setattr(config.parameters[key], "string_value", value)


def test_nothing_is_changed_where_nothing_differs() -> None:
    assert edit(FOREIGN) == FOREIGN


def test_a_value_is_replaced_where_it_stands() -> None:
    def change(config: pb.ModelConfig) -> None:
        config.max_batch_size = 4
        config.dynamic_batching.max_queue_delay_microseconds = 100
        config.dynamic_batching.preferred_batch_size[:] = [4]

    found = edit(FOREIGN, change, set_instances(1))
    assert lines_that_differ(FOREIGN, found) == (
        [
            "max_batch_size: 16", "  preferred_batch_size: [ 4, 8 ]",
            "  max_queue_delay_microseconds: 500  # half a millisecond",
            "instance_group [ { count: 2, kind: KIND_CPU } ]  # a core each",
        ],
        [
            "max_batch_size: 4", "  preferred_batch_size: [ 4 ]",
            "  max_queue_delay_microseconds: 100  # half a millisecond",
            "instance_group [ { count: 1, kind: KIND_CPU } ]  # a core each",
        ],
    )  # fmt: skip


def test_parameters_are_changed_added_and_taken_out() -> None:
    changed = edit(FOREIGN, set_parameter("intra_op_thread_count", "2"))
    assert changed == FOREIGN.replace('string_value: "1"', 'string_value: "2"')
    added = edit(FOREIGN, set_parameter("engine", "openvino"))
    assert added.startswith(FOREIGN)
    assert 'key: "engine"' in added
    taken = edit(FOREIGN, lambda config: config.parameters.clear())
    assert lines_that_differ(FOREIGN, taken)[0] == [
        'parameters { key: "intra_op_thread_count" value { string_value: "1" } }'
    ]
    assert taken.endswith("}}\n# the end\n")


def test_what_is_left_out_goes_with_its_lines_and_what_is_new_stands_behind_the_rest() -> None:
    def change(config: pb.ModelConfig) -> None:
        config.dynamic_batching.ClearField("max_queue_delay_microseconds")
        config.dynamic_batching.preserve_ordering = True

    found = edit(FOREIGN, change)
    assert "  # measured in May\n  preferred_batch_size: [ 4, 8 ]\n" in found
    assert "max_queue" not in found
    assert "  # half a millisecond\n  preserve_ordering: true\n}\n" in found
    gone = edit(FOREIGN, lambda config: config.ClearField("dynamic_batching"))
    assert "max_batch_size: 16\n\ninstance_group" in gone


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("instance_group { count: 1 }", "instance_group { count: 3 }"),
        ("instance_group { }", "instance_group {  count: 3 }"),
        ("instance_group {\n}\n", "instance_group {\n  count: 3\n}\n"),
        ("instance_group {\n  kind: KIND_CPU # here\n}", "instance_group {\n  kind: KIND_CPU # here\n  count: 3\n}"),
        ("instance_group [\r\n  {\r\n    count: 1 }\r\n]", "instance_group [\r\n  {\r\n    count: 3 }\r\n]"),
        ("instance_group {\r\n  kind: KIND_CPU\r\n}", "instance_group {\r\n  kind: KIND_CPU\r\n  count: 3\r\n}"),
        ("instance_group < count: 1 kind: KIND_CPU >", "instance_group < count: 3 kind: KIND_CPU >"),
    ],
)
def test_forms_that_people_write(text: str, expected: str) -> None:
    assert edit(text, set_instances(3)) == expected


def test_what_goes_from_the_middle_of_a_line_leaves_one_blank() -> None:
    def change(config: pb.ModelConfig) -> None:
        config.dynamic_batching.ClearField("max_queue_delay_microseconds")

    text = "dynamic_batching { max_queue_delay_microseconds: 500 }  # at once"
    assert edit(text, change) == "dynamic_batching { }  # at once"


def test_new_fields_of_the_whole_begin_a_line() -> None:
    def change(config: pb.ModelConfig) -> None:
        config.max_batch_size = 2
        config.dynamic_batching.SetInParent()

    assert edit('name: "m"', change) == 'name: "m"\nmax_batch_size: 2\n\ndynamic_batching {\n}\n'
    assert edit("", change) == "max_batch_size: 2\ndynamic_batching {\n}\n"


def test_elements_that_became_more_are_written_anew_and_the_rest_stays() -> None:
    found = edit(FOREIGN, lambda config: config.instance_group.add(count=1))
    assert found.startswith(FOREIGN[: FOREIGN.index("instance_group")])
    assert "# a core each" in found


@pytest.mark.parametrize(
    "text", ['parameters [ { key: "a" value { string_value: "1" } }, { key: "b" value { string_value: "2" } } ]']
)
def test_what_cannot_be_changed_so_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="an entry of a list"):
        edit(text, lambda config: config.parameters.pop("a"))
