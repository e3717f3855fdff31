"""Answers under load."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from graphkiln.tuning.answer_watch import AnswerWatch
from graphkiln.tuning.questions import Questions
from graphkiln_backend.graph.errors import Overloaded
from graphkiln_backend.graph.precision import Precision

GENERATOR = np.random.default_rng(1)
FEEDS = tuple({"X": np.full((1, 1), number, np.float32)} for number in range(3))
ANSWERS = tuple({"Y": GENERATOR.normal(size=(1, 50)).astype(np.float32)} for _ in range(3))
QUESTIONS = Questions(origin="test", feeds=FEEDS, answers=ANSWERS, saved=Precision.FP32)


def answer(feeds: Mapping[str, Any]) -> Mapping[str, Any]:
    return ANSWERS[int(feeds["X"][0, 0])]


def test_answers_are_held_to_those_of_the_graph() -> None:
    with AnswerWatch(answer, QUESTIONS, 1, 0) as watch:
        pass
    assert watch.objection(engine="onnxruntime", precision="fp32") == ""
    assert watch.next_question == 2


def test_a_wrong_one_is_told() -> None:
    with AnswerWatch(lambda feeds: {"Y": answer(feeds)["Y"] * 1.01}, QUESTIONS, 0, 0) as watch:
        pass
    assert "Y: relative L2" in watch.objection(engine="onnxruntime", precision="fp32")


def test_questions_go_on_while_the_load_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphkiln.tuning.answer_watch._PAUSE_S", 0)
    asked, enough = [], threading.Event()

    def ask(feeds: Mapping[str, Any]) -> Mapping[str, Any]:
        asked.append(int(feeds["X"][0, 0]))
        if len(asked) >= 7:
            enough.set()
        return answer(feeds)

    with AnswerWatch(ask, QUESTIONS, 0, 0) as watch:
        assert enough.wait(10)
    assert asked[:7] == [0, 1, 2, 0, 1, 2, 0]
    assert watch.objection(engine="onnxruntime", precision="fp32") == ""


def test_a_server_that_answers_nothing_is_an_objection() -> None:
    def ask(_: Mapping[str, Any]) -> Mapping[str, Any]:
        raise Overloaded("too much")

    with AnswerWatch(ask, QUESTIONS, 0, 0) as watch:
        pass
    assert "too much" in watch.objection(engine="onnxruntime", precision="fp32")


def test_what_is_wrong_with_asking_is_raised() -> None:
    def ask(_: Mapping[str, Any]) -> Mapping[str, Any]:
        raise ZeroDivisionError

    with AnswerWatch(ask, QUESTIONS, 0, 0) as watch:
        pass
    with pytest.raises(ZeroDivisionError):
        watch.objection(engine="onnxruntime", precision="fp32")


def test_questions_are_few_beside_the_load() -> None:
    assert AnswerWatch(answer, QUESTIONS, 0, 2)._pause_s == 25
    assert AnswerWatch(answer, QUESTIONS, 0, 1000)._pause_s == 0.2
