"""A session is asked again for what it was proven by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from graphkiln_backend.graph.errors import ExecutionError, VerificationError
from graphkiln_backend.lowering.replaying import Replay
from graphkiln_backend.proof.policy import Limits
from graphkiln_backend.scoring.model import check_session


class Doubling:
    def __init__(self) -> None:
        self.factor = 2.0
        self.broken = False

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str] | None = None) -> dict[str, Any]:
        if self.broken:
            raise ExecutionError("the device is gone")
        return {name: feeds["x"] * np.float32(self.factor) for name in outputs or ["y"]}


@pytest.fixture
def session() -> Doubling:
    return Doubling()


@pytest.fixture
def replay(session: Any) -> Replay:
    x = np.arange(1, 4, dtype=np.float32)[None]
    limits = Limits(name="engine", relative_l2=1e-4, worst_element=1e-2, top1_agreement=1.0)
    return Replay(session=session, samples=({"x": x},), reference={"y": 2 * x}, limits=limits)


def test_a_session_that_is_right(replay: Replay) -> None:
    check_session(replay)
    check_session(None)


def test_a_session_that_computes_something_else(replay: Replay, session: Doubling) -> None:
    session.factor = 2.5
    with pytest.raises(VerificationError):
        check_session(replay)


def test_a_session_that_fails(replay: Replay, session: Doubling) -> None:
    session.broken = True
    with pytest.raises(ExecutionError):
        check_session(replace(replay))
