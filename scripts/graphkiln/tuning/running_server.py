"""Trials on a server that runs already: its model is loaded again with another configuration, and put back at the end.

Triton takes another configuration only in explicit mode, from whoever has the admin key, and never writes it anywhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphkiln.tuning.candidate import ENGINE, PRECISION, Candidate
from graphkiln.tuning.local_trials import LocalTrials
from graphkiln.tuning.machine_faults import excused, oom_kills
from graphkiln.tuning.served_before import ServedBefore
from graphkiln.tuning.served_candidate import Loading, ServedCandidate
from graphkiln.tuning.serving_keys import changes_of
from graphkiln.tuning.subject import Subject
from graphkiln.tuning.trials import WARM_S, Bare, Failed, LoadShape, Measured
from graphkiln_backend.graph.errors import (
    ClientError,
    ConnectionFailed,
    DeadlineExceeded,
    GraphkilnError,
    MeasurementError,
    Unauthorized,
)
from graphkiln_backend.graph.text import redact
from graphkiln_backend.repository.config import read_config
from graphkiln_backend.repository.config_changes import as_document, changed_document
from graphkiln_backend.repository.version import CONFIG_FILE
from graphkiln_backend.system.closing import Closeable
from graphkiln_client import Client

# What of a configuration a candidate changes, as a server shows it: how one that serves is known again.

Config = Mapping[str, Any]
"""As a server shows it: JSON with the protobuf's own field names."""


def scheduling(config: Config) -> tuple[Any, ...]:
    """Largest batch, queue delay, counts of instances and parameters, as both protocols show them.

    Args:
        config: As served, or as it was to be.
    """
    batching = config.get("dynamic_batching") or {}
    groups = [int(group.get("count", 1)) for group in config.get("instance_group", [])]
    parameters = {key: row.get("string_value", "") for key, row in config.get("parameters", {}).items()}
    delay = int(batching.get("max_queue_delay_microseconds", 0))
    return int(config.get("max_batch_size", 0)), delay, groups, parameters


def is_among(config: Config, others: Sequence[Config]) -> bool:
    """Whether a configuration is served as one of others is."""
    return any(scheduling(config) == scheduling(other) for other in others)


def is_left(config: Config, original: Config, candidates: Sequence[Config]) -> bool:
    """Whether a configuration is what a search has left, and not what was there before it.

    Args:
        config: As served.
        original: As it was before the search.
        candidates: What the search has loaded.
    """
    return is_among(config, candidates) and not is_among(config, [original])


def stored_document(model: Path) -> Config:
    """A model's config.pbtxt, as a server would show it that completes nothing.

    Args:
        model: The model's folder.

    Raises:
        RepositoryError: The file is not a model configuration.
    """
    return as_document(read_config(model / CONFIG_FILE))


def without_cache(config: Config) -> Config:
    """Samples come again and again: all answers would be those of a cache, and none the model's."""
    return {**config, "response_cache": {"enable": False}} if "response_cache" in config else config


_log = logging.getLogger("graphkiln.tuning")

_BACK_S, _POLL_S = 60.0, 0.5
"""How long a server that does not answer is waited for, and how often it is asked."""
_UNANSWERED = (ConnectionFailed, DeadlineExceeded)
"""What a server may do all the same, later."""
_NO_REFUSAL = (Unauthorized, ConnectionFailed, DeadlineExceeded)
"""What says nothing of the configuration that was to be loaded."""
_EXPLICIT = "only a server in explicit mode takes one: graphkiln serve --model-control-mode=explicit"


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
        today: What serves by the folder here, as a candidate.
        load_timeout_s: How long a candidate may take to load.
        is_rehearsed: Whether the server has shown that it takes configurations, and that it computes the same.
    """

    subject: Subject
    loading: Loading
    client: Mapping[str, Any]
    local: LocalTrials
    before: ServedBefore
    today: Candidate
    load_timeout_s: float = 600.0
    is_rehearsed: bool = False
    _original: Mapping[str, Any] = field(default_factory=dict)
    _wanted: Mapping[str, Any] = field(default_factory=dict)
    _served: ServedCandidate | None = None

    def open(self) -> None:
        """Keeps in mind what is served, after what a search that died has left there gave way to what was before it.

        Raises:
            ClientError: The server does not serve the model.
            MeasurementError: It serves what a search has left that was given another address of the server.
        """
        with Client(**self.client) as client:
            served = client.model(self.subject.name).config
        self._original = self._recover(served) if self.before.original is not None else served
        self._check_others()
        self._tell_difference()

    def probe(self, session: Candidate) -> Bare | Failed:
        """See `Trials.probe`.

        Raises:
            MeasurementError: The server takes no configuration, or computes something else than the model here.
            Unauthorized: The admin key is not that of the server.
        """
        self._rehearse()
        return self.local.probe(session)

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        """See `Trials.measure`.

        Raises:
            MeasurementError: The server takes no other configuration, or is not there any more.
            Unauthorized: The admin key is not that of the server.
        """
        self._rehearse()
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

    def warm(self, candidate: Candidate, load: LoadShape) -> None:
        """See `Trials.warm`; raises what `measure` does."""
        self.measure(candidate, load, WARM_S, 0)

    def close(self) -> None:
        """Loads the model as it was served.

        Raises:
            ClientError: The server does not do it; the message says how to do it by hand.
        """
        if self.before.original is None:
            return
        try:
            with self._admin() as client:
                self._put_back(client)
        except ClientError as error:
            way = f"graphkiln load {self.subject.name} --url {self._url} loads it as its repository has it"
            later = "the next graphkiln tune with this --url puts back what was served"
            error.hint = "; ".join(filter(None, (error.hint, way, later)))
            raise
        self.before.settle()
        _log.info("%s serves '%s' again as it did before the search", self._url, self.subject.name)

    def _rehearse(self) -> None:
        """Loads today's configuration and asks a sample, once: before minutes go by with sessions alone."""
        if self.is_rehearsed:
            return
        try:
            self._serve(self.today)
        except _NO_REFUSAL:
            raise
        except ClientError as error:
            said = f"{self._url} does not load '{self.subject.name}' with a configuration that it is given: {error}"
            raise MeasurementError(said, hint=_EXPLICIT) from error
        self._check_answer()
        self.is_rehearsed = True

    def _check_answer(self) -> None:
        subject, questions = self.subject, self.loading.questions
        try:
            with Client(**self.client) as client:
                found = client.model(subject.name, str(subject.version)).infer(questions.request(0))
        except ClientError as error:
            said = f"{self._url} does not answer a sample for version {subject.version} of '{subject.name}': {error}"
            raise MeasurementError(said, hint="name the version that it serves: STORE/NAME/VERSION") from error
        engine, precision = str(self.today[ENGINE]), str(self.today[PRECISION])
        if reason := questions.objection({0: questions.answer(0, found)}, engine=engine, precision=precision):
            said = f"{self._url} answers otherwise than {subject.folder / str(subject.version)}: {reason}"
            raise MeasurementError(said, hint="tune the folder that it serves")

    def _is_served(self) -> bool:
        """Whether the candidate that was loaded is still there: a server that starts again knows nothing of it."""
        try:
            with Client(**self.client) as client:
                return scheduling(client.model(self.subject.name).config) == scheduling(self._wanted)
        except ClientError:
            return False

    def _failed(self, error: GraphkilnError) -> Failed:
        """A server that does not answer may have been stopped by its owner as well as by the candidate."""
        self._served = None
        return excused(Failed(reason=str(error), passing=isinstance(error, ConnectionFailed)), oom_kills())

    def _serve(self, candidate: Candidate) -> ServedCandidate:
        if self._served is None or self._served.candidate != candidate:
            self._served = None
            self._await_server()
            self._load(candidate)
            self._served = ServedCandidate(
                candidate=candidate, model=self.subject.name, version=str(self.subject.version), client=self.client,
                asking=self.client, loading=self.loading,
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
        wanted = without_cache(changed_document(self._original, changes_of(candidate, self.subject)))
        is_first = self.before.original is None
        self.before.note(self._original, wanted)
        self._wanted = wanted
        with self._admin() as client:
            try:
                client.load(self.subject.name, wanted)
            except ClientError as error:
                if is_first and not isinstance(error, _UNANSWERED) and self._config(client) == self._original:
                    self.before.settle()  # nothing was changed
                raise
            served = client.model(self.subject.name).config
        if scheduling(served) != scheduling(wanted):
            said = f"{self._url} loaded '{self.subject.name}', but not with the configuration it was given"
            raise MeasurementError(said, hint=_EXPLICIT)

    @property
    def _url(self) -> str:
        return redact(str(self.client["url"]))

    def _recover(self, served: Mapping[str, Any]) -> Mapping[str, Any]:
        """What is served once a candidate that a search left, if it is one, has given way."""
        self._original = self.before.original or served
        left = is_left(served, self._original, self.before.candidates)
        if left and is_among(served, [stored_document(self.subject.folder)]):
            _log.warning(
                "%s has since what a search left on %s that was killed: it stays", self.subject.folder, self._url
            )
            left = False
        elif left:
            _log.warning("%s still serves what a search left that was killed: put back", self._url)
        if left or is_among(served, [self._original]):  # a load that it began may not have ended
            with self._admin() as client:
                self._put_back(client)
                served = client.model(self.subject.name).config
        self.before.settle()
        return served

    def _put_back(self, client: Client) -> None:
        """Loads the model as its repository has it, and where that is not what was served before, that.

        Triton may leave a model as it is that is loaded anew without a configuration, and whose files are the same.
        """
        try:
            client.load(self.subject.name)
        except _NO_REFUSAL:
            raise
        except ClientError as error:
            _log.warning("the repository of %s cannot be loaded any more: %s", self._url, error)
        if self._config(client) != self._original:
            client.load(self.subject.name, self._original)

    def _config(self, client: Client) -> Mapping[str, Any] | None:
        """What is served now; None for nothing."""
        with suppress(ClientError):
            return client.model(self.subject.name).config
        return None

    def _check_others(self) -> None:
        """Refuses to take for the owner's configuration what a search has left that knew the server by another name."""
        for other in self.before.elsewhere():
            if is_left(self._original, other.original, other.candidates):
                raise MeasurementError(
                    f"{self._url} serves '{self.subject.name}' as a search of {other.server} has left it, which was "
                    "killed or runs now",
                    hint=f"one server? The same command with --url {other.server} puts back what was there. Two? "
                    f"Delete {other.file}",
                )

    def _tell_difference(self) -> None:
        """Today's configuration is that of the folder here; the server's owner may have loaded another one."""
        today = changed_document(self._original, changes_of(self.today, self.subject))
        if scheduling(today)[:-1] != scheduling(self._original)[:-1]:
            said = "%s serves '%s' with another batch, queue or number of instances than %s has: today's is the latter"
            _log.warning(said, self._url, self.subject.name, self.subject.folder)

    def _admin(self) -> Client:
        return Client(**{**self.client, "timeout_s": self.load_timeout_s})


def _lost_connections(found: Measured | Failed) -> bool:
    """Whether requests found nobody to answer them, which no candidate need have done."""
    return isinstance(found, Failed) or ConnectionFailed.__name__ in found.errors
