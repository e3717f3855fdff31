"""How a function becomes a translator: it stays a function, and stands under each operation that it names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from graphkiln_converters.oneflow import translation as registry
from graphkiln_converters.oneflow import translator
from graphkiln_converters.oneflow.translator import TRANSLATORS, translates


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    kept = dict(TRANSLATORS)
    yield
    TRANSLATORS.clear()
    TRANSLATORS.update(kept)


def test_a_function_stands_under_every_operation_that_it_names() -> None:
    @translates("warp", "weave")
    def both(op: object) -> object:
        return op

    assert TRANSLATORS["warp"] is both
    assert TRANSLATORS["weave"] is both


def test_the_function_itself_stays_what_it_is() -> None:
    def plain(op: object) -> object:
        return op

    assert translates("warp")(plain) is plain  # type: ignore[type-var]
    assert plain(3) == 3


def test_no_operation_is_no_translator() -> None:
    before = dict(TRANSLATORS)
    translates()(lambda op: op.x)
    assert before == TRANSLATORS


def test_a_later_module_replaces_what_an_earlier_one_said() -> None:
    translates("warp")(first := lambda op: op.x)
    translates("warp")(second := lambda op: op.x)
    assert TRANSLATORS["warp"] is second is not first


def test_the_operators_of_the_package_register_themselves() -> None:
    names = registry.built_in_translators()
    assert set(names) <= set(TRANSLATORS)
    assert {"conv2d", "matmul", "softmax", "reshape"} <= set(names)
    assert all(callable(function) for function in TRANSLATORS.values())
    assert translator.TRANSLATORS is TRANSLATORS
