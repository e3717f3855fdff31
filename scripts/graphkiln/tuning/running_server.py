"""Trials on a server that runs already: its model is loaded again with another configuration, and put back at the end.

Triton takes another configuration only in explicit mode, from whoever has the admin key, and never writes it anywhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.local_trials import LocalTrials
from graphkiln.tuning.machine_faults import excused, oom_kills
from graphkiln.tuning.served_before import ServedBefore
from graphkiln.tuning.served_candidate import Loading, ServedCandidate
from graphkiln.tuning.serving_keys import changes_of
from graphkiln.tuning.subject import Subject
from graphkiln.tuning.target import Objective
from graphkiln.tuning.trials import Bare, Failed, LoadShape, Measured
from graphkiln_backend.graph.closing import Closeable
from graphkiln_backend.graph.errors import (
    ClientError,
    ConnectionFailed,
    GraphkilnError,
    InvalidInput,
    MeasurementError,
    Unauthorized,
)
from graphkiln_backend.graph.redaction import redact
from graphkiln_backend.repository.config_changes import changed_document
from graphkiln_client import Client

_log = logging.getLogger("graphkiln.tuning")

_BACK_S, _POLL_S = 60.0, 0.5
"""How long a server that does not answer is waited for, and how often it is asked."""

NOT_THERE = (
    "what the server was started with (--set, --enable-*, its cores and memory) stays as it is",
    "what really serves cannot be read back over the client's protocols: only answers and times are measured",
    "memory and CPU time of the server are not known here",
    "a response cache of the model is off meanwhile: samples that come again would be answered by it alone",
)
"""What cannot be done with a server that somebody else started, a line each."""


def check_knowable(objective: Objective) -> None:
    """Refuses to look for what nobody can tell of a server that somebody else started.

    Raises:
        InvalidInput: It is about memory or CPU time.
    """
    if objective in (Objective.MEMORY, Objective.COST):
        raise InvalidInput(
            f"--objective {objective}: neither memory nor CPU time of a running server is known here",
            hint="leave --url out, so that servers are started for it; or --objective latency",
        )


@dataclass(slots=True)
class RunningTrials(Closeable):
    """Measures candidates on a running server. Closing it puts the configuration back that was served.

    Bare sessions are built and timed on this machine: as a bound they hold where the server runs on it, too.

    Attributes:
        subject: The model, as this machine has it.
        loading: How it is loaded.
        client: Arguments of the client, with the admin key.
        local: What times bare sessions.
        before: What is to be put back, on the disk.
        load_timeout_s: How long a candidate may take to load.
    """

    subject: Subject
    loading: Loading
    client: Mapping[str, Any]
    local: LocalTrials
    before: ServedBefore
    load_timeout_s: float = 600.0
    _original: Mapping[str, Any] = field(default_factory=dict)
    _wanted: Mapping[str, Any] = field(default_factory=dict)
    _served: ServedCandidate | None = None

    def open(self) -> None:
        """Keeps in mind what is served, after what a search that died has left there gave way to what was before it.

        Raises:
            ClientError: The server does not serve the model.
        """
        with Client(**self.client) as client:
            served = client.model(self.subject.name).config
        self._original = self._recover(served) if self.before.original is not None else served

    def probe(self, session: Candidate) -> Bare | Failed:
        """See `Trials.probe`."""
        return self.local.probe(session)

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        """See `Trials.measure`.

        Raises:
            MeasurementError: The server takes no other configuration, or is not there any more.
            Unauthorized: The admin key is not that of the server.
        """
        try:
            served = self._serve(candidate)
        except Unauthorized:
            raise  # no candidate would be loaded
        except ClientError as error:
            return self._failed(error)
        try:
            found = served.measure(load, seconds, seed)
        except (ClientError, MeasurementError) as error:
            return self._failed(error)
        if _lost_connections(found) and not self._is_served():
            return self._failed(ConnectionFailed(f"{self._url} was started again while it was measured"))
        if isinstance(found, Failed):
            self._served = None
        return found

    def _is_served(self) -> bool:
        """Whether the candidate that was loaded is still there: a server that starts again knows nothing of it."""
        try:
            with Client(**self.client) as client:
                return _scheduling(client.model(self.subject.name).config) == _scheduling(self._wanted)
        except ClientError:
            return False

    def _failed(self, error: GraphkilnError) -> Failed:
        """A server that does not answer may have been stopped by its owner as well as by the candidate."""
        self._served = None
        return excused(Failed(reason=str(error), passing=isinstance(error, ConnectionFailed)), oom_kills())

    def close(self) -> None:
        """Loads the model as it was served.

        Raises:
            ClientError: The server does not do it; the message says how to do it by hand.
        """
        if self.before.original is None:
            return
        try:
            with self._admin() as client:
                self._put_back(client, self._original)
        except ClientError as error:
            error.hint = f"graphkiln load {self.subject.name} loads it as its repository has it"
            raise
        self.before.settle()

    def _serve(self, candidate: Candidate) -> ServedCandidate:
        if self._served is None or self._served.candidate != candidate:
            self._served = None
            self._await_server()
            self._load(candidate)
            self._served = ServedCandidate(
                candidate=candidate, model=self.subject.name, client=self.client, asking=self.client,
                loading=self.loading,
            )  # fmt: skip
        return self._served

    def _await_server(self) -> None:
        """A candidate may have taken the server down, whose supervisor starts it again."""
        end = time.monotonic() + _BACK_S
        while not self._is_live():
            if time.monotonic() > end:
                raise MeasurementError(
                    f"{self._url} does not answer any more", hint="once it does, the same command goes on"
                )
            time.sleep(_POLL_S)

    def _is_live(self) -> bool:
        try:
            with Client(**self.client) as client:
                return client.health().live
        except ConnectionFailed:
            return False

    def _load(self, candidate: Candidate) -> None:
        wanted = _without_cache(changed_document(self._original, changes_of(candidate, self.subject)))
        self.before.note(self._original, wanted)
        self._wanted = wanted
        with self._admin() as client:
            client.load(self.subject.name, wanted)
            served = client.model(self.subject.name).config
        if _scheduling(served) != _scheduling(wanted):
            raise MeasurementError(
                f"{self._url} loaded '{self.subject.name}', but not with the configuration it was given",
                hint="only a server in explicit mode takes one: graphkiln serve --model-control-mode=explicit",
            )

    @property
    def _url(self) -> str:
        return redact(str(self.client["url"]))

    def _recover(self, served: Mapping[str, Any]) -> Mapping[str, Any]:
        """What is served once a candidate that a search left, if it is one, has given way."""
        original = self.before.original or served
        if _is_among(served, self.before.candidates) and not _is_among(served, [original]):
            _log.warning("%s still serves what a search left that was killed: put back", self._url)
            with self._admin() as client:
                self._put_back(client, original)
                served = client.model(self.subject.name).config
        self.before.settle()
        return served

    def _put_back(self, client: Client, original: Mapping[str, Any]) -> None:
        client.load(self.subject.name)  # as its repository has it
        if client.model(self.subject.name).config != original:
            client.load(self.subject.name, original)

    def _admin(self) -> Client:
        return Client(**{**self.client, "timeout_s": self.load_timeout_s})


def _lost_connections(found: Measured | Failed) -> bool:
    """Whether requests found nobody to answer them, which no candidate need have done."""
    return isinstance(found, Failed) or ConnectionFailed.__name__ in found.errors


def _without_cache(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Samples come again and again: all answers would be those of a cache, and none the model's."""
    return {**config, "response_cache": {"enable": False}} if "response_cache" in config else config


def _is_among(config: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> bool:
    return any(_scheduling(config) == _scheduling(other) for other in others)


def _scheduling(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """What of a configuration a candidate changes, as both protocols show it."""
    batching = config.get("dynamic_batching") or {}
    groups = [int(group.get("count", 1)) for group in config.get("instance_group", [])]
    parameters = {key: row.get("string_value", "") for key, row in config.get("parameters", {}).items()}
    delay = int(batching.get("max_queue_delay_microseconds", 0))
    return int(config.get("max_batch_size", 0)), delay, groups, parameters
