"""Asks a server while it is loaded, and holds every answer to those of the saved graph.

A proof at load says what an idle session computes. Under load the same rows come in batches with others, in several
instances, beside other runs. What goes wrong there may be right again a moment later, so that each answer is judged,
in blocks of as many as a self-test has samples: the policy's limits are those of several samples together.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Self

from graphkiln.tuning.questions import Arrays, Questions
from graphkiln_backend.graph.errors import ClientError

_PAUSE_S = 0.2
"""Between two questions: five a second disturb nothing that is measured."""
_SHARE = 0.02
"""Most of the offered requests that questions may be beside, and of a core that judging may take."""
_BLOCK = 8
"""Answers that are judged together."""

Ask = Callable[[Arrays], Arrays]
"""Sends one request; raises the `ClientError` family only."""


class AnswerWatch(AbstractContextManager["AnswerWatch"]):
    """Asks from a thread of its own, as long as the context lasts or until an answer is wrong; at least one question.

    Args:
        ask: Sends a request.
        questions: What to ask, in turn.
        first: Number of the first one.
        rate: Requests per second that come meanwhile.
        engine: What computes the answers.
        precision: What it is to compute in.

    Attributes:
        judged: How many answers were held to the right ones.
    """

    def __init__(self, ask: Ask, questions: Questions, first: int, rate: float, *, engine: str, precision: str) -> None:
        self._ask, self._questions, self._next = ask, questions, first
        self._engine, self._precision = engine, precision
        self._pause_s = max(_PAUSE_S, 1 / (_SHARE * rate)) if rate else _PAUSE_S
        self._block: dict[int, Arrays] = {}
        self._last: dict[int, Arrays] = {}
        self.judged = 0
        self._objection = self._refusal = ""
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

    def objection(self) -> str:
        """Why an answer is not that of the saved graph; empty where all are. Called after the context.

        Raises:
            BaseException: Whatever went wrong with asking itself.
        """
        if self._failure:
            raise self._failure
        if not self.judged:
            return f"not one of the requests whose answer is known was answered under load: {self._refusal}"
        return self._objection

    def _watch(self) -> None:
        try:
            while not self._objection:
                begun_s = time.thread_time()
                self._ask_next()
                used_s = time.thread_time() - begun_s
                if self._over.wait(max(self._pause_s, used_s / _SHARE)):
                    break
            if self._block and not self._objection:  # too few for a block of their own
                self._judge({**self._last, **self._block})
        except BaseException as error:  # noqa: BLE001 - it is raised where the answers are judged
            self._failure = error

    def _ask_next(self) -> None:
        number = self._next % len(self._questions.feeds)
        self._next += 1
        try:
            answer = self._questions.answer(number, self._ask(self._questions.request(number)))
        except ClientError as error:  # a server that is overloaded says so, which the load counts
            self._refusal = str(error)
            return
        if number in self._block:  # others in between were not answered
            self._judge(self._block)
        self._block[number] = answer
        if len(self._block) == min(_BLOCK, len(self._questions.feeds)):
            self._judge(self._block)

    def _judge(self, found: dict[int, Arrays]) -> None:
        """Holds answers to the policy; those that were not judged before make the next block's company."""
        self.judged += len(self._block)
        if not self._objection:
            self._objection = self._questions.objection(found, engine=self._engine, precision=self._precision)
        self._last, self._block = self._block, {}
