"""One run of `graphkiln tune`: its temporary folder, its journal, and the search."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from graphkiln.tuning.candidate import MAX_BATCH_SIZE, Candidate
from graphkiln.tuning.journal import Journal, RecordedTrials
from graphkiln.tuning.local_trials import LocalTrials
from graphkiln.tuning.measure import Arriving, Loading, is_alive
from graphkiln.tuning.questions import Questions
from graphkiln.tuning.result import Result
from graphkiln.tuning.search import Search
from graphkiln.tuning.space import ModelSpace
from graphkiln.tuning.subject import Subject, check_unchanged
from graphkiln.tuning.target import Target
from graphkiln.tuning.trials import Bare, Failed, LoadShape, Measured, Trials
from graphkiln_backend.cache.settings import user_cache_folder
from graphkiln_backend.engines.hardware import identity
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.manifest import sha256_of
from graphkiln_backend.graph.modules import installed_version
from graphkiln_backend.repository.version import find_graph
from graphkiln_backend.server.leftovers import remove_leftovers
from graphkiln_backend.system.owned_folder import (
    OTHER_PARENTS,
    OWNER_FILE,
    OwnedFolder,
    locked_if_dead,
    owned_folders,
    remove_owned,
)
from graphkiln_backend.system.processes import keep_temporary_files_in

# The folder of a search's temporary files, and the removal of what a killed search has left.
#
# Whatever a search starts (servers, sessions that are timed, conversions, the load generator) makes its temporary files
# below one folder, to which TMPDIR leads. That folder is locked as long as the search lives (`owned_folder`): the
# kernel releases the lock of a process that dies, so that the next search recognizes a dead one,
# across PID namespaces and however often a PID comes again. What still runs with that TMPDIR then is ended: on
# machines without `setpriv`, servers do not end by themselves.

_log = logging.getLogger("graphkiln.tuning")

_PREFIX = "graphkiln-search-"
_VARIABLE = "TMPDIR"
# A server that is asked to end has so long; then it is killed.
_END_WITHIN_S = 20.0
_POLL_S = 0.05


@contextmanager
def search_folder() -> Iterator[Path]:
    """A folder for all temporary files of this process and those that it starts; gone afterwards.

    Raises:
        ServerSetupError: None can be made.
    """
    clear_dead()
    for pid in other_searches():
        _log.warning("another search runs on this machine (process %d): each measures what the other one leaves", pid)
    with OwnedFolder(prefix=_PREFIX) as folder, _temporary_files_in(folder.path):
        yield folder.path


def clear_dead(parents: Iterable[Path] | None = None) -> list[Path]:
    """End processes that dead searches of this user left running, and remove their folders.

    Args:
        parents: Folders to search; None for all in which search folders are made.

    Returns:
        The folders that were removed.
    """
    return [folder for folder in _folders(parents) if _clear(folder)]


def other_searches(parents: Iterable[Path] | None = None) -> list[int]:
    """The processes of searches that run on this machine now, as far as this user sees them.

    Args:
        parents: As for `clear_dead`.
    """
    return [_owner(folder) for folder in _folders(parents) if not _is_dead(folder)]


def _folders(parents: Iterable[Path] | None) -> list[Path]:
    places = set(parents) if parents is not None else {Path(tempfile.gettempdir()), *OTHER_PARENTS}
    return [folder for place in sorted(places) for folder in owned_folders(place, _PREFIX)]


def _is_dead(folder: Path) -> bool:
    with locked_if_dead(folder) as dead:
        return dead


def _owner(folder: Path) -> int:
    """Process number for a message; 0 if it cannot be read."""
    try:
        return int(json.loads((folder / OWNER_FILE).read_text())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _clear(folder: Path) -> bool:
    with locked_if_dead(folder) as dead:
        if dead:
            _end_processes(folder)
            remove_leftovers([folder])  # of its servers, with what they have in shared memory
            remove_owned(folder)
            _log.info("removed what a search left that was killed: %s", folder)
        return dead and not folder.exists()


def _end_processes(folder: Path) -> None:
    """Terminate all processes whose TMPDIR is below a folder; kill those that do not end."""
    found = [process for process in psutil.process_iter() if _works_below(process, folder)]
    for process in found:
        _log.warning("ending process %d, which a search left that was killed", process.pid)
        with suppress(psutil.Error):
            process.terminate()
    for process in _alive_after(found, _END_WITHIN_S):
        with suppress(psutil.Error):
            process.kill()
    _alive_after(found, _END_WITHIN_S)


def _alive_after(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait, and return the processes that are still alive then; zombies count as ended."""
    end, alive = time.monotonic() + seconds, list(filter(is_alive, processes))
    while alive and time.monotonic() < end:
        time.sleep(_POLL_S)
        alive = list(filter(is_alive, alive))
    return alive


def _works_below(process: psutil.Process, folder: Path) -> bool:
    if process.pid == os.getpid():
        return False
    try:
        own = process.uids().effective == os.geteuid()
        return own and Path(process.environ().get(_VARIABLE, "/")).is_relative_to(folder)
    except (psutil.Error, OSError):
        return False


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    directory, variable = tempfile.tempdir, os.environ.get(_VARIABLE)
    keep_temporary_files_in(str(folder))
    try:
        yield
    finally:
        tempfile.tempdir = directory
        if variable is None:
            os.environ.pop(_VARIABLE, None)
        else:
            os.environ[_VARIABLE] = variable


# A request that takes so many times the target's p99 has failed.
_PATIENCE = 20
# The least and the most that a request gets,
_TIMEOUT_S = (5.0, 60.0)
# but so many times the target in any case.
_LEAST_PATIENCE = 2
# Software that affects speed: another version of it is another search.
_SOFTWARE = ("graphkiln", "onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt")
_LONGEST_NAME = 200
# The least and the most that a candidate gets until it is ready: one that hangs must not take the whole budget.
_DEADLINE_S = (60.0, 180.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A measurement that has just been made.

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
    """A search: its model, space, target, requests and budget.

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
        """Journal of this search; another model, machine, space or target has another file."""
        text = json.dumps(self.identity(), sort_keys=True)
        name = self.subject.name.encode()[:_LONGEST_NAME].decode(errors="ignore")  # of a file: 255 bytes at most
        return self.kept / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"

    def identity(self) -> dict[str, Any]:
        """Identity of the search by readable names: a journal with another one is not continued."""
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
        """Load of the candidates."""
        least, most = _TIMEOUT_S
        timeout_s = max(min(most, max(least, _PATIENCE * self.target.p99_s)), _LEAST_PATIENCE * self.target.p99_s)
        return Loading(questions=self.questions, arriving=self.arriving, timeout_s=timeout_s)

    def run(self, report: Report) -> Result:
        """Search, or continue an interrupted search.

        Args:
            report: Called after each measurement.

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
        """Folder of the journals."""
        return self.folder or user_cache_folder("graphkiln-tune")

    def _trace_digest(self) -> str:
        trace = self.arriving.trace
        return "" if trace is None else hashlib.sha256(trace.tobytes()).hexdigest()[:16]


def batch_sizes(spanned: ModelSpace) -> tuple[int, ...]:
    """The batch sizes that a space may form: 1, and every largest one."""
    tried = [value for axis in spanned.space.axes if axis.key == MAX_BATCH_SIZE for value in axis.values]
    return tuple(sorted({1, *(value for value in tried if isinstance(value, int) and value > 0)}))


class _Reported:
    """Report each measurement that is made, not those read from the journal."""

    def __init__(self, trials: Trials, report: Report) -> None:
        self._trials, self._report = trials, report
        self.recorded: RecordedTrials | None = None

    def probe(self, session: Candidate) -> Bare | Failed:
        return self._reported(session, None, self._trials.probe(session))

    def measure(self, candidate: Candidate, load: LoadShape, seconds: float, seed: int) -> Measured | Failed:
        return self._reported(candidate, load, self._trials.measure(candidate, load, seconds, seed))

    def warm(self, candidate: Candidate, load: LoadShape) -> None:
        self._trials.warm(candidate, load)

    def _reported(self, candidate: Candidate, load: LoadShape | None, outcome: _Outcome) -> _Outcome:
        count, spent_s = (self.recorded.count, self.recorded.spent_s) if self.recorded else (0, 0.0)
        self._report(Progress(number=count + 1, spent_s=spent_s, candidate=candidate, load=load, outcome=outcome))
        return outcome


def _digest_of(questions: Questions) -> str:
    digest = hashlib.sha256(questions.origin.encode())
    for feeds in questions.feeds:
        for name, array in feeds.items():
            digest.update(name.encode() + (repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()))
    return digest.hexdigest()[:16]
