"""Answers under load."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from graphkiln.tuning.measure import AnswerWatch, Ask
from graphkiln.tuning.questions import Questions
from graphkiln_backend.graph.errors import Overloaded
from graphkiln_backend.graph.precision import Precision

GENERATOR = np.random.default_rng(1)
FEEDS = tuple({"X": np.full((1, 1), number, np.float32)} for number in range(3))
ANSWERS = tuple({"Y": GENERATOR.normal(size=(1, 50)).astype(np.float32)} for _ in range(3))
QUESTIONS = Questions(origin="test", feeds=FEEDS, answers=ANSWERS, saved=Precision.FP32)


def answer(feeds: Mapping[str, Any]) -> Mapping[str, Any]:
    return ANSWERS[int(feeds["X"][0, 0])]


def watch_of(ask: Ask, first: int = 0, rate: float = 0.0) -> AnswerWatch:
    return AnswerWatch(ask, QUESTIONS, first, rate, engine="onnxruntime", precision="fp32")


class Asked:
    """Answers, wrongly at some moments, and says when it was asked often enough."""

    def __init__(self, enough: int, wrong: tuple[int, ...] = ()) -> None:
        self.numbers: list[int] = []
        self.enough, self._count, self._wrong = threading.Event(), enough, wrong

    def __call__(self, feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        self.numbers.append(int(feeds["X"][0, 0]))
        if len(self.numbers) >= self._count:
            self.enough.set()
        factor = np.float32(1.01) if len(self.numbers) in self._wrong else np.float32(1)
        return {"Y": answer(feeds)["Y"] * factor}


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is waited for between two questions."""
    monkeypatch.setattr("graphkiln.tuning.measure._PAUSE_S", 0)
    monkeypatch.setattr("graphkiln.tuning.measure._SHARE", 1e9)


def test_answers_are_held_to_those_of_the_graph() -> None:
    with watch_of(answer, first=1) as watch:
        pass
    assert watch.objection() == ""
    assert (watch.next_question, watch.judged) == (2, 1)


def test_a_wrong_one_is_told() -> None:
    with watch_of(Asked(1, wrong=(1,))) as watch:
        pass
    assert "Y: relative L2" in watch.objection()


@pytest.mark.usefixtures("hurried")
def test_questions_go_on_while_the_load_lasts() -> None:
    ask = Asked(7)
    with watch_of(ask) as watch:
        assert ask.enough.wait(10)
    assert ask.numbers[:7] == [0, 1, 2, 0, 1, 2, 0]
    assert watch.objection() == ""
    assert watch.judged == len(ask.numbers)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("wrong", [4, 5, 6])
def test_one_that_was_wrong_for_a_moment_is_told(wrong: int) -> None:
    """The same question is answered right before and after."""
    ask = Asked(12, wrong=(wrong,))
    with watch_of(ask) as watch:
        watch._thread.join(10)  # it stops asking where it saw it
    assert "Y: relative L2" in watch.objection()


@pytest.mark.usefixtures("hurried")
def test_answers_between_which_others_fail_are_judged_too() -> None:
    """Only the first question is answered, and wrongly the second time: no block is ever full."""
    ask = Asked(12, wrong=(4,))

    def some(feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        found = ask(feeds)
        if feeds["X"][0, 0]:
            raise Overloaded("too much")
        return found

    with watch_of(some) as watch:
        watch._thread.join(10)
    assert "Y: relative L2" in watch.objection()


def test_a_server_that_answers_nothing_is_an_objection() -> None:
    def ask(_: Mapping[str, Any]) -> Mapping[str, Any]:
        raise Overloaded("too much")

    with watch_of(ask) as watch:
        pass
    assert "too much" in watch.objection()


def test_what_is_wrong_with_asking_is_raised() -> None:
    def ask(_: Mapping[str, Any]) -> Mapping[str, Any]:
        raise ZeroDivisionError

    with watch_of(ask) as watch:
        pass
    with pytest.raises(ZeroDivisionError):
        watch.objection()


def test_questions_are_few_beside_the_load() -> None:
    assert watch_of(answer, rate=2)._pause_s == 25
    assert watch_of(answer, rate=1000)._pause_s == 0.2
