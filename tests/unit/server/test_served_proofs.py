"""Proofs before a version is shown, and replays on the serving server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import stand_in
from fake_kserve import FakeKserve

from graphkiln_backend.repository.config import NATIVE, read_config
from graphkiln_backend.repository.stores import scan_stores
from graphkiln_backend.server.golden_requests import Answers, Asking
from graphkiln_backend.server.managed_stores import ShownModel
from graphkiln_backend.server.proofs import ProofBook
from graphkiln_backend.server.proving_server import Candidate
from graphkiln_backend.server.served_proofs import ServedProofs
from graphkiln_backend.system.signals import ServerStopping

CONFIG = {
    "max_batch_size": 8,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [3]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [3]}],
}


class FakeProver:
    """Refuses models named `wrong`."""

    def prove(self, candidates: Sequence[Candidate], _: object) -> dict[tuple[str, int], Answers]:
        wrong, right = Answers(reason="it is wrong"), Answers(verdict="right", error=1e-7)
        return {each.which: wrong if each.which[0] == "wrong" else right for each in candidates}


@pytest.fixture
def server() -> Iterator[FakeKserve]:
    with FakeKserve(lambda inputs: {"y": inputs["x"] * 2}, CONFIG) as server:
        yield server


@pytest.fixture
def proofs(server: FakeKserve, tmp_path: Path) -> ServedProofs:
    prover: Any = FakeProver()
    return ServedProofs(
        prover=prover, mirror=tmp_path, address=server.address, headers={"key": "k"}, deadline_s=30.0, book=ProofBook()
    )


def shown(store: Path, name: str, *, proven: bool = True) -> ShownModel:
    stand_in.add(store, name, proven=proven)
    stored = scan_stores([store])[name]
    return ShownModel(stored=stored, versions=(1,), other=True)


@pytest.fixture
def model(tmp_path: Path) -> ShownModel:
    return shown(tmp_path / "store", "m")


class TestAdmission:
    def test_verdicts_are_recorded(self, proofs: ServedProofs, tmp_path: Path) -> None:
        models = [(shown(tmp_path / "store", name), 1) for name in ("good", "wrong")]
        answers = proofs.admit(models)
        assert answers["wrong", 1].reason == "it is wrong"
        good, wrong = (proofs.book.find(name, 1) for name in ("good", "wrong"))
        assert good
        assert wrong
        assert (good.proven, good.error, good.backend, good.seat) == (True, 1e-7, "python", "")
        assert good.last_right_at > 0
        assert (wrong.proven, wrong.error, wrong.last_right_at) == (False, -1.0, 0.0)

    def test_the_native_seat_is_named(self, proofs: ServedProofs, model: ShownModel) -> None:
        native = read_config(model.stored.folder / "config.pbtxt")
        native.backend = "onnxruntime"
        proofs.admit([(replace(model, other=False, native=native), 1)])
        (state,) = proofs.book.rows()
        assert (state.backend, state.seat) == ("onnxruntime", NATIVE)


class TestReplay:
    def test_right_answers(self, proofs: ServedProofs, server: FakeKserve, model: ShownModel) -> None:
        assert proofs.replay([model]) == {}
        assert server.headers["key"] == "k"
        (state,) = proofs.book.rows()
        assert (state.proven, state.replays, state.failures) == (True, 1, 0)

    def test_wrong_answers(self, proofs: ServedProofs, server: FakeKserve, model: ShownModel) -> None:
        proofs.admit([(model, 1)])
        server.compute = lambda inputs: {"y": inputs["x"] * 3}
        assert "the outputs changed" in proofs.replay([model])["m", 1]
        (state,) = proofs.book.rows()
        assert (state.proven, state.replays, state.failures, state.error) == (False, 1, 1, 1e-7)

    def test_a_server_that_does_not_answer_is_not_wrong(
        self, proofs: ServedProofs, server: FakeKserve, model: ShownModel
    ) -> None:
        server.close()
        assert proofs.replay([model]) == {}
        assert proofs.book.rows() == ()

    def test_nothing_to_ask(self, proofs: ServedProofs, server: FakeKserve, tmp_path: Path, model: ShownModel) -> None:
        bare = shown(tmp_path / "store", "bare", proven=False)
        assert proofs.replay([bare]) == {}
        assert replace(proofs, address=None).replay([model]) == {}  # only gRPC
        assert server.asked == []

    def test_the_first_replay_is_ready_when_the_server_is(
        self, proofs: ServedProofs, server: FakeKserve, model: ShownModel
    ) -> None:
        with proofs.ask_once_live([model]) as asking:
            assert asking
            pid = asking._process.pid
            assert proofs.replay([model], asking=asking) == {}
        assert len(server.asked) == 1
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    def test_after_a_failure_the_first_replay_is_of_all_samples(
        self, proofs: ServedProofs, server: FakeKserve, model: ShownModel
    ) -> None:
        """The version is proven again by what is remembered, and the first sample is right."""
        compute, last = server.compute, stand_in.doubled().inputs["x"][-1:]
        server.compute = lambda inputs: {"y": inputs["x"] * (3 if (inputs["x"] == last).all() else 2)}
        for expected in ({}, {("m", 1)}):
            proofs.admit([(model, 1)])
            with proofs.ask_once_live([model]) as asking:
                assert proofs.replay([model], asking=asking).keys() == set(expected)
            proofs.replay([model])
        server.compute = compute
        assert proofs.replay([model]) == {}

    def test_a_model_that_did_not_load_concerns_no_other(
        self, proofs: ServedProofs, server: FakeKserve, model: ShownModel, tmp_path: Path
    ) -> None:
        """The first replay began with all models; those that serve are asked for."""
        other = shown(tmp_path / "store", "unloadable")
        server.rows.append({"name": "unloadable", "version": "1", "state": "UNAVAILABLE", "reason": "cannot load"})
        compute = server.compute

        def fail(inputs: Any) -> Any:
            if server.asked[-1][0] == "unloadable":
                return {}
            return compute(inputs)

        server.compute = fail
        with proofs.ask_once_live([other, model]) as asking:
            assert proofs.replay([model], asking=asking) == {}
        assert [state.model for state in proofs.book.rows()] == ["m"]

    def test_the_death_of_the_process_that_asks_is_no_verdict(self, proofs: ServedProofs, model: ShownModel) -> None:
        with proofs.ask_once_live([model]) as asking:
            assert asking
            os.kill(asking._process.pid, signal.SIGKILL)
            with pytest.raises(OSError, match="has ended"):
                proofs.replay([model], asking=asking)
        assert proofs.book.rows() == ()

    def test_a_stop_ends_it(self, proofs: ServedProofs, server: FakeKserve, model: ShownModel) -> None:
        server.delay_s = 30.0
        with pytest.raises(ServerStopping):
            proofs.replay([model], lambda: True)

    def test_it_ends_in_time(self, proofs: ServedProofs, server: FakeKserve, model: ShownModel) -> None:
        server.delay_s = 30.0
        assert replace(proofs, deadline_s=0.5).replay([model]) == {}


def test_nothing_is_prepared_where_nothing_can_be_asked(proofs: ServedProofs, model: ShownModel) -> None:
    for nothing in (proofs.ask_once_live([]), replace(proofs, address=None).ask_once_live([model])):
        assert not isinstance(nothing, Asking)
        with nothing as asking:
            assert asking is None


class TestBook:
    def test_versions_without_samples_are_unproven(
        self, proofs: ServedProofs, model: ShownModel, tmp_path: Path
    ) -> None:
        proofs.note(shown(tmp_path / "store", "bare", proven=False))
        proofs.note(model)
        (state,) = proofs.book.rows()
        assert (state.model, state.proven, state.replays) == ("bare", False, 0)

    def test_versions_that_serve_no_more_are_forgotten(self, proofs: ServedProofs, model: ShownModel) -> None:
        proofs.admit([(model, 1), (replace(model, versions=(1, 2)), 2)])
        proofs.note(replace(model, versions=(2,)))
        assert [state.version for state in proofs.book.rows()] == [2]
