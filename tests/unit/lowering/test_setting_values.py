"""The values of settings: what is read, and what is refused with the key that holds it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.device import Parallelism
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.settings import (
    Choice,
    invalid_value,
    parse_choices,
    parse_count,
    parse_flag,
    parse_parallel,
    parse_precision,
    parse_switch,
)

KEY = "parameters.key"
WORDS = st.text("abcdefghijklmnopqrstuvwxyz_0123456789", min_size=1)
MALFORMED = (
    "2",
    "data=0",
    "data=two",
    "data=1.5",
    "data=2, data=2",
    "pipelines=2",
    "memory=much",
    "memory=0",
    "=2",
    "data=",
)
NUMBERS = "auto or numbers such as data=2, pipeline=2, tensor=1, micro_batches=8, memory=2GiB"
EITHER = "auto, which chooses `pipeline` and `tensor`, or these numbers"


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (parse_flag, "0", False),
        (parse_flag, "1", True),
        (parse_switch, "off", False),
        (parse_switch, "on", True),
        (parse_count, "0", 0),
        (parse_count, "16", 16),
        (parse_count, "007", 7),
        (parse_precision, "", None),
        (parse_choices, "", ()),
        (parse_choices, " , ,", ()),
        (parse_parallel, "", None),
        (parse_parallel, "data=2", Parallelism(data=2)),
        (parse_parallel, " pipeline = 2,tensor=4 ", Parallelism(pipeline=2, tensor=4)),
        (parse_parallel, "auto, memory=2GiB", Parallelism(auto=True, memory_bytes=2 << 30)),
        (parse_parallel, "pipeline=2, micro_batches=8", Parallelism(pipeline=2, micro_batches=8)),
    ],
)
def test_what_is_read(parse: Callable[[str, str], object], text: str, expected: object) -> None:
    assert parse(KEY, text) == expected
    assert type(parse(KEY, text)) is type(expected)


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        *((parse_parallel, text, NUMBERS) for text in MALFORMED),
        (parse_parallel, "auto, tensor=2", EITHER),
        (parse_parallel, "auto, auto", EITHER),
        (parse_parallel, "micro_batches=2", "with pipeline=2 or more where micro_batches is given"),
        (parse_flag, "true", "0 or 1"),
        (parse_flag, "2", "0 or 1"),
        (parse_flag, "", "0 or 1"),
        (parse_switch, "1", "on or off"),
        (parse_switch, "ON", "on or off"),
        (parse_count, "", "a whole number, 0 for the default"),
        (parse_count, "-1", "a whole number, 0 for the default"),
        (parse_count, "1.5", "a whole number, 0 for the default"),
        (parse_count, " 2", "a whole number, 0 for the default"),
        (parse_count, "99999999999999999999", "a whole number, 0 for the default"),
        (parse_count, "two", "a whole number, 0 for the default"),
        (parse_precision, "FP16", "fp32, tf32, fp16, bf16, int8"),
        (parse_precision, "half", "fp32, tf32, fp16, bf16, int8"),
        (
            parse_choices,
            "openvino:half",
            "ENGINE or ENGINE:PRECISION, with a precision of fp32, tf32, fp16, bf16, int8",
        ),
    ],
)
def test_what_is_refused(parse: Callable[[str, str], object], text: str, expected: str) -> None:
    with pytest.raises(RepositoryError) as caught:
        parse(KEY, text)
    assert caught.value.message == f"{KEY} must be {expected}, got '{text}'"


@pytest.mark.parametrize("precision", list(Precision))
def test_every_precision_by_its_name(precision: Precision) -> None:
    assert parse_precision(KEY, str(precision)) is precision
    assert parse_choices(KEY, f"engine:{precision}") == (Choice(engine="engine", precision=precision),)


class TestChoices:
    def test_come_in_the_users_order(self) -> None:
        read = parse_choices(KEY, "openvino:bf16, onnxruntime , openvino")
        assert read == (
            Choice(engine="openvino", precision=Precision.BF16),
            Choice(engine="onnxruntime"),
            Choice(engine="openvino"),
        )

    def test_an_engine_need_not_be_known_here(self) -> None:
        """The registry answers for engines: third parties add their own."""
        assert parse_choices(KEY, "theirs") == (Choice(engine="theirs"),)

    def test_a_colon_alone_leaves_the_precision_open(self) -> None:
        assert parse_choices(KEY, "openvino:") == (Choice(engine="openvino"),)

    def test_only_the_first_wrong_one_is_named(self) -> None:
        with pytest.raises(RepositoryError, match="got 'a:x'"):
            parse_choices(KEY, "openvino:fp32, a:x, b:y")

    @given(st.lists(st.builds(Choice, engine=WORDS, precision=st.none() | st.sampled_from(Precision))))
    def test_are_read_as_they_are_shown(self, choices: list[Choice]) -> None:
        assert parse_choices(KEY, ", ".join(map(str, choices))) == tuple(choices)


@given(st.integers(0, 10**9))
def test_a_count_is_read_as_it_is_written(count: int) -> None:
    assert parse_count(KEY, str(count)) == count


def test_the_error_names_key_expectation_and_value() -> None:
    assert str(invalid_value("--set", "7", "even")) == "--set must be even, got '7'"
