"""A session is proven again before what it computed is written."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.lowering.replaying import Replay
from graphkiln_backend.proof.policy import EXPORT
from graphkiln_backend.scoring.errors import WorkerUnfit
from graphkiln_backend.scoring.worker import Prover

RIGHT = {"scores": np.array([[1.0, 2.0]], np.float32)}


@dataclass
class Session:
    """Computes `offset` more than what is right, and sees whether two threads are in it."""

    offset: float = 0.0
    runs: int = 0
    inside: int = 0
    most_inside: int = 0
    outputs: list[object] = field(default_factory=list)

    def run(self, _feeds: dict[str, AnyArray], outputs: object = None) -> dict[str, AnyArray]:
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        time.sleep(0.001)
        self.runs += 1
        self.outputs.append(outputs)
        self.inside -= 1
        return {"scores": RIGHT["scores"] + self.offset}


def prover(session: Session) -> Prover:
    replay = Replay(session=session, samples=({},), reference=RIGHT, limits=EXPORT)  # type: ignore[arg-type]
    return Prover(replay, ["scores"], threading.Lock())


def test_what_was_computed_before_the_last_proof_needs_no_other() -> None:
    session = Session()
    proofs = prover(session)
    moment = time.monotonic()
    proofs.prove(moment)
    proofs.prove(moment)
    assert (session.runs, session.outputs) == (2, [("scores",)] * 2), "once at the start"
    proofs.prove(time.monotonic())
    assert session.runs == 3


def test_a_session_that_is_wrong_from_the_start_is_refused() -> None:
    with pytest.raises(VerificationError):
        prover(Session(offset=0.5))


def test_all_golden_samples_have_their_turn() -> None:
    seen: list[int] = []

    class Numbered(Session):
        def run(self, feeds: dict[str, AnyArray], outputs: object = None) -> dict[str, AnyArray]:
            seen.append(int(feeds["number"]))
            return super().run(feeds, outputs)

    samples = tuple({"number": np.array(number)} for number in range(6))
    reference = {"scores": np.repeat(RIGHT["scores"], 6, axis=0)}
    session = Numbered()
    replay = Replay(session=session, samples=samples, reference=reference, limits=EXPORT)  # type: ignore[arg-type]
    proofs = Prover(replay, None, threading.Lock())
    for _ in range(3):
        proofs.prove(time.monotonic())
    assert seen == [*range(6), 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
    seen.clear()
    for rows in (1, 48, 250, 100_000):
        proofs.prove(time.monotonic(), rows)
    assert seen == [0, 1, 2, 3, 4, 5, 0, 1], "a sample for a hundred rows, one at least and four at most"


def test_a_session_that_computes_otherwise_than_before_is_unfit() -> None:
    session = Session()
    proofs = prover(session)
    proofs.prove(time.monotonic())
    session.offset = 0.5
    with pytest.raises(WorkerUnfit, match="no longer computes the golden samples"):
        proofs.prove(time.monotonic())


def test_without_anything_to_replay_nothing_is_proven() -> None:
    Prover(None, None, threading.Lock()).prove(time.monotonic())


def test_a_session_has_one_caller_at_a_time() -> None:
    computing, session = threading.Lock(), Session()
    replay = Replay(session=session, samples=({},), reference=RIGHT, limits=EXPORT)  # type: ignore[arg-type]
    proofs = Prover(replay, None, computing)

    def compute() -> None:
        with computing:
            session.run({})

    threads = [threading.Thread(target=compute) for _ in range(4)]
    threads += [threading.Thread(target=proofs.prove, args=(time.monotonic() + 1,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert session.most_inside == 1
