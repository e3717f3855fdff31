"""One run of `graphkiln tune`: the space, the journal, the trials, the search."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from graphkiln.tuning.candidate import MAX_BATCH_SIZE, Candidate
from graphkiln.tuning.journal import Journal
from graphkiln.tuning.local_trials import LocalTrials
from graphkiln.tuning.model_space import ModelSpace
from graphkiln.tuning.offered_load import Arriving
from graphkiln.tuning.questions import Questions
from graphkiln.tuning.recording import RecordedTrials
from graphkiln.tuning.result import Result
from graphkiln.tuning.search import Search
from graphkiln.tuning.served_candidate import Loading
from graphkiln.tuning.subject import Subject, check_unchanged
from graphkiln.tuning.target import Target
from graphkiln.tuning.trials import Bare, Failed, LoadShape, Measured, Trials
from graphkiln_backend.cache.settings import user_cache_folder
from graphkiln_backend.engines.hardware import identity
from graphkiln_backend.graph.distributions import installed_version
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.manifest import sha256_of
from graphkiln_backend.repository.version import find_graph

_PATIENCE = 20
"""A request that takes so many times the target's p99 has failed."""
_TIMEOUT_S = (5.0, 60.0)
"""The least and the most that a request gets,"""
_LEAST_PATIENCE = 2
"""but so many times the target in any case."""
_SOFTWARE = ("graphkiln", "onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt")
"""What decides how fast a configuration is, beside the machine: another version of it is another search."""
_LONGEST_NAME = 200
_DEADLINE_S = (60.0, 180.0)
"""The least and the most that a candidate gets until it is ready: one that hangs must not take the whole budget."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What has just been done.

    Attributes:
        number: Of the measurement, those of earlier runs of the command included.
        spent_s: Of the budget.
        candidate: What was measured, or its session alone.
        load: What came; None for a bare session.
        outcome: What it did.
    """

    number: int
    spent_s: float
    candidate: Candidate
    load: LoadShape | None
    outcome: Bare | Measured | Failed


Report = Callable[[Progress], None]
_Outcome = TypeVar("_Outcome", bound=Bare | Measured | Failed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """What is to be found out, of which model, and how.

    Attributes:
        subject: The model.
        spanned: The space.
        target: What a configuration must meet.
        questions: What requests hold.
        arriving: How they come.
        budget_s: Seconds that measurements may take.
        folder: Folder of the journals; in the user's cache by default.
    """

    subject: Subject
    spanned: ModelSpace
    target: Target
    questions: Questions
    arriving: Arriving = field(default_factory=Arriving)
    budget_s: float = 1200.0
    folder: Path | None = None

    @property
    def journal(self) -> Path:
        """Where this very search is kept: another model, machine, space or target has another file."""
        text = json.dumps(self.identity(), sort_keys=True)
        name = self.subject.name.encode()[:_LONGEST_NAME].decode(errors="ignore")  # of a file: 255 bytes at most
        return self.kept / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"

    def identity(self) -> dict[str, Any]:
        """What a journal must be of to be gone on with, by names that people understand."""
        subject, space = self.subject, self.spanned.space
        axes = {axis.key: [list(v) if isinstance(v, tuple) else v for v in axis.values] for axis in space.axes}
        return {
            "model": str(subject.folder),
            "version": subject.version,
            "graph": sha256_of(subject.deployment.version.graph_path),
            **({"int8": sha256_of(find_graph(subject.int8))} if subject.int8 else {}),
            "configuration": subject.config_sha256,
            "machine": f"{identity(subject.config.device)}, {subject.cores} cores",
            "software": {name: version for name in _SOFTWARE if (version := installed_version(name))},
            "server": "our own",  # and "limit": journals of earlier releases have both
            "space": axes,
            "limit": "",
            "target": str(self.target),
            "floor": self.target.accuracy_floor,
            "load": f"{self.arriving}; {self._trace_digest()}",
            "requests": _digest_of(self.questions),
        }

    @property
    def loading(self) -> Loading:
        """How candidates are loaded."""
        least, most = _TIMEOUT_S
        timeout_s = max(min(most, max(least, _PATIENCE * self.target.p99_s)), _LEAST_PATIENCE * self.target.p99_s)
        return Loading(questions=self.questions, arriving=self.arriving, timeout_s=timeout_s)

    def run(self, report: Report) -> Result:
        """Searches, or goes on with a search that was interrupted.

        Args:
            report: Told of each measurement.

        Raises:
            MeasurementError: The journal cannot be used.
            RepositoryError: The configuration or the graph was changed meanwhile.
        """
        with ExitStack() as stack:
            identity = self.identity()
            journal = stack.enter_context(Journal(self.journal, identity))
            trials = self._open_trials(stack)
            reported = _Reported(trials, report)
            recorded = reported.recorded = RecordedTrials(reported, journal, time.monotonic)
            search = Search(self.spanned.space, self.target, recorded, budget_s=self.budget_s, cores=self.subject.cores)
            result = search.run()
            check_unchanged(self.subject)
            self._check_same_graph(identity)
            return result

    def _check_same_graph(self, identity: Mapping[str, Any]) -> None:
        if self.identity()["graph"] != identity["graph"]:
            raise RepositoryError(
                f"the graph of '{self.subject.name}' was replaced while it was tuned: what was measured is of two",
                hint="the same command measures the new one",
            )

    def _open_trials(self, stack: ExitStack) -> Trials:
        return stack.enter_context(
            LocalTrials(
                subject=self.subject,
                loading=self.loading,
                batch_sizes=batch_sizes(self.spanned),
                floor=self.target.accuracy_floor,
                deadline_s=min(_DEADLINE_S[1], max(_DEADLINE_S[0], self.budget_s / 4)),
            )
        )

    @property
    def kept(self) -> Path:
        """Where journals lie."""
        return self.folder or user_cache_folder("graphkiln-tune")

    def _trace_digest(self) -> str:
        trace = self.arriving.trace
        return "" if trace is None else hashlib.sha256(trace.tobytes()).hexdigest()[:16]


def batch_sizes(spanned: ModelSpace) -> tuple[int, ...]:
    """The batch sizes that a space may form: 1, and every largest one."""
    tried = [value for axis in spanned.space.axes if axis.key == MAX_BATCH_SIZE for value in axis.values]
    return tuple(sorted({1, *(value for value in tried if isinstance(value, int) and value > 0)}))


class _Reported:
    """Tells of each measurement that is really made."""

    def __init__(self, trials: Trials, report: Report) -> None:
        self._trials, self._report = trials, report
        self.recorded: RecordedTrials | None = None

    def probe(self, session: Candidate) -> Bare | Failed:
        return self._told(session, None, self._trials.probe(session))

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        return self._told(candidate, load, self._trials.measure(candidate, load, seconds, seed))

    def warm(self, candidate: Candidate, load: LoadShape) -> None:
        self._trials.warm(candidate, load)

    def _told(self, candidate: Candidate, load: LoadShape | None, outcome: _Outcome) -> _Outcome:
        count, spent_s = (self.recorded.count, self.recorded.spent_s) if self.recorded else (0, 0.0)
        self._report(Progress(number=count + 1, spent_s=spent_s, candidate=candidate, load=load, outcome=outcome))
        return outcome


def _digest_of(questions: Questions) -> str:
    digest = hashlib.sha256(questions.origin.encode())
    for feeds in questions.feeds:
        for name, array in feeds.items():
            digest.update(name.encode() + (repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()))
    return digest.hexdigest()[:16]
