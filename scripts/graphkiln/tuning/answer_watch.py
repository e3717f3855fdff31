"""Asks a server while it is loaded, and holds its answers to those of the saved graph.

A proof at load says what an idle session computes. Under load the same rows come in batches with others, in several
instances, beside other runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Self

from graphkiln.tuning.questions import Arrays, Questions
from graphkiln_backend.graph.errors import ClientError

_PAUSE_S = 0.2
"""Between two questions: five a second disturb nothing that is measured."""
_SHARE = 0.02
"""Most of the offered requests that questions may be beside."""

Ask = Callable[[Arrays], Arrays]
"""Sends one request; raises the `ClientError` family only."""


class AnswerWatch(AbstractContextManager["AnswerWatch"]):
    """Asks from a thread of its own, as long as the context lasts; at least one question.

    Args:
        ask: Sends a request.
        questions: What to ask, in turn.
        first: Number of the first one.
        rate: Requests per second that come meanwhile.
    """

    def __init__(self, ask: Ask, questions: Questions, first: int, rate: float) -> None:
        self._ask = ask
        self._questions = questions
        self._next = first
        self._pause_s = max(_PAUSE_S, 1 / (_SHARE * rate)) if rate else _PAUSE_S
        self._found: dict[int, Arrays] = {}
        self._refusal = ""
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="answers", daemon=True)

    @property
    def next_question(self) -> int:
        """Number of the question that would come next."""
        return self._next

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def objection(self, *, engine: str, precision: str) -> str:
        """Why the answers are not those of the saved graph; empty where they are. Called after the context.

        Args:
            engine: What computed them.
            precision: What it was to compute in.

        Raises:
            BaseException: Whatever went wrong with asking itself.
        """
        if self._failure:
            raise self._failure
        if not self._found:
            return f"not one of the requests whose answer is known was answered under load: {self._refusal}"
        return self._questions.objection(self._found, engine=engine, precision=precision)

    def _watch(self) -> None:
        try:
            while True:
                self._ask_next()
                if self._over.wait(self._pause_s):
                    return
        except BaseException as error:  # noqa: BLE001 - it is raised where the answers are judged
            self._failure = error

    def _ask_next(self) -> None:
        number = self._next % len(self._questions.feeds)
        self._next += 1
        try:
            self._found[number] = self._ask(self._questions.feeds[number])
        except ClientError as error:  # a server that is overloaded says so, which the load counts
            self._refusal = str(error)
