"""Trials on a server that somebody else started."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tuned
from digits_subject import digits_subject

from graphkiln.tuning import running_server
from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.local_trials import LocalTrials
from graphkiln.tuning.questions import Questions, read_questions
from graphkiln.tuning.running_server import RunningTrials
from graphkiln.tuning.served_before import ServedBefore
from graphkiln.tuning.served_candidate import Loading, ServedCandidate
from graphkiln.tuning.serving_keys import default_values
from graphkiln.tuning.subject import Subject
from graphkiln.tuning.trials import Bare, Failed, Measured, OpenLoop
from graphkiln_backend.graph.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    InvalidInput,
    MeasurementError,
    ModelNotFound,
    ModelNotReady,
    ServerError,
    Unauthorized,
)
from graphkiln_client import Health

STORED: dict[str, Any] = {
    "name": "digits",
    "max_batch_size": 32,
    "dynamic_batching": {},
    "instance_group": [{"count": 1}],
}
CANDIDATE = Candidate.of({"engine": "openvino", "max_batch_size": 8, "instances": 2})


class FakeServer:
    """A server that loads what it is told, or does not."""

    def __init__(self) -> None:
        self.served: Mapping[str, Any] = copy.deepcopy(STORED)
        self.loads: list[Mapping[str, Any] | None] = []
        self.deaf = False
        self.error: Exception | None = None
        self.deaths = 0
        self.stored: Mapping[str, Any] = copy.deepcopy(STORED)
        self.answers: Mapping[str, Any] | Exception = ModelNotFound("no such version")
        self.asked: list[str] = []
        self.has_broken_store = False
        self.ignores_plain_loads = False

    @contextmanager
    def client(self, **_: Any) -> Iterator[FakeServer]:
        yield self

    def model(self, _: str, version: str = "") -> FakeServer:
        self.asked.append(version)
        return self

    def infer(self, _: Mapping[str, Any]) -> Mapping[str, Any]:
        if isinstance(self.answers, Exception):
            raise self.answers
        return self.answers

    def health(self) -> Health:
        self.deaths -= 1
        if self.deaths >= 0:
            raise ConnectionFailed("refused")
        return Health(live=True, ready=True)

    @property
    def config(self) -> Mapping[str, Any]:
        return self.served

    def load(self, name: str, config: Mapping[str, Any] | None = None) -> None:
        assert name == "digits"
        self.loads.append(config)
        if self.has_broken_store and config is None:
            raise ServerError("config.pbtxt is damaged")
        if self.error:
            raise self.error
        if not self.deaf and not (config is None and self.ignores_plain_loads):
            self.served = config or copy.deepcopy(self.stored)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    found = FakeServer()
    monkeypatch.setattr(running_server, "Client", found.client)
    monkeypatch.setattr(ServedCandidate, "measure", lambda *_: tuned.measured(10.0, 0.02))
    return found


@pytest.fixture(scope="module")
def subject(repository: Path) -> Subject:
    return digits_subject(repository)


@pytest.fixture(scope="module")
def questions(subject: Subject) -> Questions:
    return read_questions(subject)


@pytest.fixture
def open_trials(subject: Subject, questions: Questions, tmp_path: Path) -> Callable[..., RunningTrials]:
    """Begins a search; one that was begun before it has died."""
    loading = Loading(questions=questions)
    local = LocalTrials(subject=subject, loading=loading)

    def open_(url: str = "http://h:1", *, is_rehearsed: bool = True) -> RunningTrials:
        before = ServedBefore(tmp_path, url, "digits")
        found = RunningTrials(
            subject=subject, loading=loading, client={"url": url}, local=local, before=before,
            today=Candidate.of(default_values(subject)), is_rehearsed=is_rehearsed,
        )  # fmt: skip
        try:
            found.open()
        except MeasurementError:
            before.close()
            raise
        return found

    return open_


@pytest.fixture
def trials(server: FakeServer, open_trials: Callable[[], RunningTrials]) -> RunningTrials:
    found = open_trials()
    assert server.loads == []
    return found


def test_a_candidate_is_loaded_once_for_all_loads(trials: RunningTrials, server: FakeServer) -> None:
    for rate in (1, 2):
        trials.measure(CANDIDATE, OpenLoop(rate), 1, 0)
    (config,) = server.loads
    assert config is not None
    assert config["max_batch_size"] == 8
    assert config["parameters"]["engine"] == {"string_value": "openvino"}
    assert [group["count"] for group in config["instance_group"]] == [2]


def test_no_cache_answers_in_the_place_of_the_model(server: FakeServer, trials: RunningTrials) -> None:
    cached = {**STORED, "response_cache": {"enable": True}}
    server.served = cached
    trials.open()
    trials.measure(CANDIDATE, OpenLoop(1), 1, 0)
    assert server.served["response_cache"] == {"enable": False}
    trials.close()
    assert server.served == cached


def test_what_was_served_is_put_back(trials: RunningTrials, server: FakeServer) -> None:
    trials.measure(CANDIDATE, OpenLoop(1), 1, 0)
    trials.close()
    assert server.served == STORED
    assert server.loads[1:] == [None]
    trials.close()
    assert len(server.loads) == 2


def test_so_is_a_configuration_that_no_repository_has(server: FakeServer, trials: RunningTrials) -> None:
    other = {**STORED, "max_batch_size": 16}
    server.served = other
    trials.open()
    trials.measure(CANDIDATE, OpenLoop(1), 1, 0)
    trials.close()
    assert server.served == other


def test_ctrl_c_puts_it_back(trials: RunningTrials, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ServedCandidate, "measure", interrupt)
    with pytest.raises(KeyboardInterrupt), trials:
        trials.measure(CANDIDATE, OpenLoop(1), 1, 0)
    assert server.served == STORED


def test_a_server_that_cannot_be_put_back_says_how(trials: RunningTrials, server: FakeServer) -> None:
    trials.measure(CANDIDATE, OpenLoop(1), 1, 0)
    server.error = ConnectionFailed("gone")
    with pytest.raises(ConnectionFailed, match="graphkiln load digits"):
        trials.close()


def test_a_candidate_that_does_not_load_failed(trials: RunningTrials, server: FakeServer) -> None:
    server.error = ServerError("no bf16 here")
    assert trials.measure(CANDIDATE, OpenLoop(1), 1, 0) == Failed(reason="no bf16 here")
    server.error = None
    trials.measure(CANDIDATE, OpenLoop(1), 1, 0)
    assert len(server.loads) == 2, "a failed candidate is loaded again"


def test_a_server_that_was_stopped_ends_the_search_and_not_its_candidates(
    trials: RunningTrials, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_server, "_BACK_S", 0.0)
    monkeypatch.setattr(running_server, "_POLL_S", 0.0)
    server.deaths = 1 << 20
    with pytest.raises(MeasurementError, match=r"does not answer any more.*the same command goes on"):
        trials.measure(CANDIDATE, OpenLoop(1), 1, 0)
    assert server.loads == []


def test_one_that_comes_back_is_waited_for(
    trials: RunningTrials, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_server, "_POLL_S", 0.0)
    server.deaths = 3
    trials.measure(CANDIDATE, OpenLoop(1), 1, 0)
    assert len(server.loads) == 1


def test_one_that_goes_during_a_load_may_come_back(trials: RunningTrials, server: FakeServer) -> None:
    server.error = ConnectionFailed("reset")
    found = trials.measure(CANDIDATE, OpenLoop(1), 1, 0)
    assert isinstance(found, Failed)
    assert found.passing


@pytest.mark.parametrize(
    "found", [tuned.measured(10.0, 0.02, errors={"ConnectionFailed": 3}), Failed(reason="no answer")]
)
def test_one_that_was_started_again_says_nothing_of_the_candidate(
    trials: RunningTrials, server: FakeServer, monkeypatch: pytest.MonkeyPatch, found: Measured | Failed
) -> None:
    """It comes back with what its repository has."""

    def measure(*_: object) -> Measured | Failed:
        server.served = copy.deepcopy(STORED)
        return found

    monkeypatch.setattr(ServedCandidate, "measure", measure)
    outcome = trials.measure(CANDIDATE, OpenLoop(1), 1, 0)
    assert isinstance(outcome, Failed)
    assert outcome.passing
    assert "was started again while it was measured" in outcome.reason
    monkeypatch.setattr(ServedCandidate, "measure", lambda *_: found)
    assert trials.measure(CANDIDATE, OpenLoop(2), 1, 0) == found, "errors of its own are the candidate's"
    assert len(server.loads) == 2


def test_a_wrong_key_is_no_fault_of_a_candidate(trials: RunningTrials, server: FakeServer) -> None:
    server.error = Unauthorized("the admin key is wrong")
    with pytest.raises(Unauthorized, match="admin key"):
        trials.measure(CANDIDATE, OpenLoop(1), 1, 0)


def test_a_load_generator_that_cannot_begin_is_the_candidates_doing(
    trials: RunningTrials, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MeasurementError("the load generator cannot send its requests: no instance")

    monkeypatch.setattr(ServedCandidate, "measure", fail)
    assert "no instance" in trials.measure(CANDIDATE, OpenLoop(1), 1, 0).reason  # type: ignore[union-attr]


def test_a_server_that_takes_no_configuration_is_an_error(trials: RunningTrials, server: FakeServer) -> None:
    server.deaf = True
    with pytest.raises(MeasurementError, match="explicit mode"):
        trials.measure(CANDIDATE, OpenLoop(1), 1, 0)


OWNERS = {**STORED, "max_batch_size": 16}
"""What the server's owner has loaded, and no repository has."""


class TestAfterKill:
    """A search that is killed puts nothing back: the next one does, whatever it searches."""

    @pytest.mark.parametrize("original", [STORED, OWNERS])
    def test_what_was_served_before_is_put_back(
        self, server: FakeServer, open_trials: Callable[..., RunningTrials], original: Mapping[str, Any], tmp_path: Path
    ) -> None:
        server.served = original
        kill(open_trials())
        assert server.served["max_batch_size"] == 8
        following = open_trials()
        assert server.served == original
        following.measure(CANDIDATE, OpenLoop(1), 1, 0)
        following.close()
        following.before.close()
        assert server.served == original
        assert list(tmp_path.iterdir()) == []

    def test_what_its_owner_has_loaded_since_stays(
        self, server: FakeServer, open_trials: Callable[..., RunningTrials]
    ) -> None:
        kill(open_trials())
        server.served = OWNERS
        loads = len(server.loads)
        following = open_trials()
        assert len(server.loads) == loads
        following.measure(CANDIDATE, OpenLoop(1), 1, 0)
        following.close()
        assert server.served == OWNERS


@pytest.mark.usefixtures("server")
def test_two_searches_have_no_model_in_common(open_trials: Callable[..., RunningTrials]) -> None:
    first = open_trials()
    with pytest.raises(MeasurementError, match="another search's that runs now"):
        open_trials()
    kill(first)
    open_trials()


def kill(trials: RunningTrials) -> None:
    """Ends a search while a candidate is served, as SIGKILL does."""
    trials.measure(CANDIDATE, OpenLoop(1), 1, 0)
    trials.before._journal.close()


class TestPutBack:
    """Whatever became of the repository, the search, or the server meanwhile."""

    def test_a_repository_that_was_damaged_meanwhile_is_not_needed(
        self, trials: RunningTrials, server: FakeServer
    ) -> None:
        trials.measure(CANDIDATE, OpenLoop(1), 1, 0)
        server.has_broken_store = True
        trials.close()
        assert server.served == STORED

    def test_what_its_owner_has_written_into_the_repository_since_a_kill_stays(
        self, server: FakeServer, open_trials: Callable[..., RunningTrials], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kill(open_trials())
        server.stored = applied = copy.deepcopy(server.served)
        monkeypatch.setattr(running_server, "stored_document", lambda _: applied)
        following = open_trials()
        assert server.served == applied
        following.measure(CANDIDATE.with_values({"max_batch_size": 4}), OpenLoop(1), 1, 0)
        following.close()
        assert server.served == applied

    def test_a_server_that_loads_nothing_whose_files_are_the_same_is_given_it(
        self, server: FakeServer, open_trials: Callable[..., RunningTrials]
    ) -> None:
        server.ignores_plain_loads = True
        kill(open_trials())
        following = open_trials()
        assert server.served == STORED
        following.measure(CANDIDATE, OpenLoop(1), 1, 0)
        following.close()
        assert server.served == STORED

    def test_after_a_kill_a_load_that_has_not_ended_is_not_the_last_one(
        self, server: FakeServer, open_trials: Callable[..., RunningTrials]
    ) -> None:
        kill(open_trials())
        server.served, loads = copy.deepcopy(STORED), len(server.loads)
        open_trials().close()
        assert server.loads[loads:] == [None]

    def test_one_whose_end_nobody_waited_for_is_followed_by_another(
        self, trials: RunningTrials, server: FakeServer
    ) -> None:
        server.error = DeadlineExceeded("no response within 600 s")
        trials.measure(CANDIDATE, OpenLoop(1), 1, 0)
        server.error = None
        trials.close()
        assert server.loads[1:] == [None]

    def test_it_is_told(self, trials: RunningTrials, server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", "graphkiln.tuning")
        trials.close()
        assert caplog.text == ""
        trials.measure(CANDIDATE, OpenLoop(1), 1, 0)
        trials.close()
        assert "http://h:1 serves 'digits' again as it did before the search" in caplog.text
        assert server.served == STORED


class TestAnotherAddress:
    """One server has many: what a killed search left is not taken for the owner's configuration."""

    def test_what_a_search_left_that_knew_another_is_named(
        self, server: FakeServer, open_trials: Callable[..., RunningTrials]
    ) -> None:
        kill(open_trials())
        with pytest.raises(
            MeasurementError, match=r"as a search of http://h:1 has left it.*--url http://h:1 puts back"
        ):
            open_trials("grpc://h:2")
        open_trials("http://h:1").before.close()
        assert server.served == STORED
        open_trials("grpc://h:2")

    @pytest.mark.usefixtures("server")
    def test_another_server_with_the_same_configuration_can_be_told_from_it(
        self, open_trials: Callable[..., RunningTrials], tmp_path: Path
    ) -> None:
        kill(open_trials())
        with pytest.raises(MeasurementError) as told:
            open_trials("http://other:1")
        (file,) = tmp_path.glob("served-*.jsonl")
        assert f"Two? Delete {file}" in told.value.hint
        file.unlink()
        open_trials("http://other:1")

    def test_what_its_owner_has_loaded_is_no_matter(
        self, server: FakeServer, open_trials: Callable[..., RunningTrials]
    ) -> None:
        kill(open_trials())
        server.served = OWNERS
        open_trials("grpc://h:2")


class TestRehearsal:
    """What keeps a server from being measured is told before minutes go by with sessions alone."""

    @pytest.fixture
    def timed(self, monkeypatch: pytest.MonkeyPatch) -> list[Candidate]:
        found: list[Candidate] = []

        def probe(_: LocalTrials, session: Candidate) -> Bare:
            found.append(session)
            return Bare(batch_s={1: 0.001})

        monkeypatch.setattr(LocalTrials, "probe", probe)
        return found

    @pytest.fixture
    def fresh(
        self, server: FakeServer, open_trials: Callable[..., RunningTrials], questions: Questions
    ) -> RunningTrials:
        server.answers = questions.answers[0]
        return open_trials(is_rehearsed=False)

    def test_it_is_made_once(self, server: FakeServer, fresh: RunningTrials, timed: list[Candidate]) -> None:
        for _ in range(2):
            fresh.probe(CANDIDATE)
        (config,) = server.loads
        assert config is not None
        assert config["parameters"]["engine"] == {"string_value": "onnxruntime"}, "today's, by its name"
        assert "1" in server.asked, "the version that is tuned"
        assert len(timed) == 2
        fresh.close()
        assert server.served == STORED

    def test_it_is_made_for_a_measurement_only(self, server: FakeServer, fresh: RunningTrials) -> None:
        """A search that was ended changes nothing when it is shown again."""
        fresh.close()
        assert server.loads == []

    @pytest.mark.parametrize(
        ("error", "told"),
        [
            (Unauthorized("the admin key is wrong"), "the admin key is wrong"),
            (ServerError("load is not allowed"), r"does not load 'digits' with a configuration.*explicit mode"),
            (InvalidInput("load is not allowed"), r"does not load 'digits' with a configuration.*explicit mode"),
            (ModelNotReady("no extension"), r"does not load 'digits' with a configuration.*explicit mode"),
        ],
    )
    def test_one_that_takes_no_configuration_is_told_and_left_as_it_is(
        self, server: FakeServer, fresh: RunningTrials, timed: list[Candidate], error: Exception, told: str
    ) -> None:
        server.error = error
        with pytest.raises((MeasurementError, Unauthorized), match=told), fresh:
            fresh.probe(CANDIDATE)
        assert len(server.loads) == 1, "nothing is to be put back"
        assert timed == []
        assert fresh.before.original is None

    @pytest.mark.parametrize("is_other", [True, False])
    def test_one_that_computes_something_else_is_told(
        self, server: FakeServer, fresh: RunningTrials, timed: list[Candidate], questions: Questions, *, is_other: bool
    ) -> None:
        server.answers = questions.answers[1] if is_other else ModelNotFound("no version 1")
        told = "answers otherwise than .*digits/1: " if is_other else "for version 1 of 'digits': no version 1"
        with pytest.raises(MeasurementError, match=told), fresh:
            fresh.probe(CANDIDATE)
        assert server.served == STORED
        assert timed == []


def test_that_today_is_what_the_folder_has_is_told(
    server: FakeServer, open_trials: Callable[..., RunningTrials], caplog: pytest.LogCaptureFixture
) -> None:
    open_trials().before.close()
    assert caplog.text == ""
    server.served = OWNERS
    open_trials()
    assert "with another batch, queue or number of instances than" in caplog.text
