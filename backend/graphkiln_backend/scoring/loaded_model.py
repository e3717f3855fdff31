"""A model that is loaded into a process: lowered, proven, ready to score, and proven again while it does.

Workers of a run load one, and so does each process in which a function of `graphkiln.scoring.udf` is called.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.metadata import version

import pyarrow as pa

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.graph.decoding import encode_json
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.golden import joined
from graphkiln_backend.lowering.acceptance import Replay
from graphkiln_backend.scoring.errors import ScoringError, WorkerUnfit
from graphkiln_backend.scoring.messages import Row, ScoreRequest, WorkerFacts
from graphkiln_backend.scoring.model import describe_session, read_model, with_local_model
from graphkiln_backend.scoring.scratch import Scratch, remove_dead_scratch, scratch_folder
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.resources import usable_cores

_PROOF_SAMPLES = 4  # at most; a fault of the machine shows in any of them
_ROWS_PER_SAMPLE = 100  # four samples for every unit of 48 rows took 8% of the time


class LoadedModel(Closeable):
    """The model of a request on this machine.

    Attributes:
        scorer: Scores rows.
        prover: Proves the session again.
        facts: Description for the driver.

    Raises:
        GraphkilnError: The model cannot be lowered on this machine, or computes wrong answers.
    """

    def __init__(self, request: ScoreRequest) -> None:
        started = time.monotonic()
        with ExitStack() as stack:
            folder = stack.enter_context(scratch_folder(Scratch.MODEL)).path
            cache = stack.enter_context(CacheSettings(folder=request.cache).checked().open(folder))
            cores = request.cores_per_worker or usable_cores()
            model = read_model(with_local_model(request, folder), cache, cores)
            proven = model.deployment.build(cache)
            stack.enter_context(proven.session)
            self.scorer = stack.enter_context(model.scorer(proven, request, cores, cache))
            self.prover = Prover(proven.replay, self.scorer.encoder.outputs, self.scorer.computing)
            self.facts = WorkerFacts(
                node=socket.gethostname(),
                pid=os.getpid(),
                session=describe_session(proven),
                self_test=encode_json(proven.self_test) if proven.self_test else "",
                seconds=time.monotonic() - started,
                version=version("graphkiln"),
                configuration=model.configuration(request),
            )
            self._held = stack.pop_all()

    def close(self) -> None:
        """Stop the threads, free the session and remove temporary files."""
        self._held.close()


class Prover:
    """Proves the session again before anything that it has computed is written.

    A core, memory module or device may fail long after the self-test. So a unit is committed only after a proof that
    began when its rows were computed; a failed proof discards everything since the last good one, with the worker. A
    proof computes a few golden samples in turn, one per hundred rows of the unit, and compares them with the first
    outputs of this session within the proof policy; it costs about 1% of what it proves. Units that wait at the same
    time share a proof. Rows that fail alone are not covered: before one becomes an error, `model.check_session`
    computes all samples.

    Args:
        replay: Golden samples of the session, or None if there is nothing to replay.
        outputs: Outputs to compare; None for all.
        computing: Lock of the session, which allows one caller at a time.

    Raises:
        VerificationError: The session does not compute the golden samples correctly.
    """

    def __init__(self, replay: Replay | None, outputs: Sequence[str] | None, computing: threading.Lock) -> None:
        self._replay, self._computing = replay, computing
        self._outputs = tuple(outputs or (replay.reference if replay else ()))
        self._proving = threading.Lock()
        self._good_since = float("-inf")
        self._proven: list[Mapping[str, AnyArray]] = []
        self._next = 0
        if replay:
            self._proven = self._compute(replay)
            replay.judge(self._proven)

    def prove(self, computed_at: float, rows: int = _PROOF_SAMPLES * _ROWS_PER_SAMPLE) -> None:
        """Return once a proof that began after `computed_at` has succeeded.

        Args:
            computed_at: When the rows had been computed, by `time.monotonic`.
            rows: Number of rows to be written.

        Raises:
            WorkerUnfit: Nothing that was computed since the last proof may be written.
        """
        if self._replay is None:
            return
        with self._proving:
            if self._good_since >= computed_at:
                return
            started = time.monotonic()
            self._prove_some(self._replay, max(1, min(_PROOF_SAMPLES, rows // _ROWS_PER_SAMPLE)))
            self._good_since = started

    def _prove_some(self, replay: Replay, max_samples: int) -> None:
        count = len(replay.samples)
        chosen = [(self._next + index) % count for index in range(min(max_samples, count))]
        self._next = (self._next + len(chosen)) % count
        samples, proven = [replay.samples[each] for each in chosen], [self._proven[each] for each in chosen]
        part = replace(replay, samples=tuple(samples), reference=joined(proven))
        try:
            part.judge(self._compute(part))
        except GraphkilnError as error:
            raise WorkerUnfit(f"it no longer computes the golden samples as it did: {error}") from error

    def _compute(self, replay: Replay) -> list[Mapping[str, AnyArray]]:
        computed: list[Mapping[str, AnyArray]] = []
        for sample in range(len(replay.samples)):
            with self._computing:  # released between samples, for the batches of units
                computed.append(replay.run(sample, self._outputs))
        return computed


class SharedModel:
    """A model that callers in different threads of a process use at the same time.

    Args:
        model: The model; the registry closes it.
    """

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.callers = 0
        self._counting = threading.Lock()
        self._unproven_rows = 0

    def answer(self, rows: Sequence[Row]) -> pa.Table:
        """Answer rows as a worker does, and prove the session again after every hundred.

        Rows cannot be held back here until their proof, as those of a unit are: up to 99 of earlier calls may have
        been returned before a proof fails.

        Raises:
            WorkerUnfit: The session no longer computes the golden samples.
            SourceUnavailable: Temporary failure where an image is read.
            GraphkilnError: The session failed, and no row is to blame.
        """
        table = self.model.scorer.answer(rows).table
        with self._counting:
            self._unproven_rows += len(table)
            due, is_due = self._unproven_rows, self._unproven_rows >= _ROWS_PER_SAMPLE
            if is_due:
                self._unproven_rows = 0
        if is_due:
            self.model.prover.prove(time.monotonic(), due)
        return table


class SharedModels:
    """The models of this process: each is loaded by its first caller, and kept until it is released."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[tuple[ScoreRequest, str], SharedModel] = {}

    @contextmanager
    def lend(self, request: ScoreRequest, configuration: str) -> Iterator[SharedModel]:
        """Lend a model; load it if it is not there. One that fails its proof is loaded anew by the next caller.

        Args:
            request: The model and its options.
            configuration: Digest that the model must have on this machine, too.

        Raises:
            GraphkilnError: The model cannot be lowered here, computes wrong answers, or is another one.
        """
        key = (request, configuration)
        with self._lock:  # while a model is loaded, other callers wait: it uses all of their cores
            shared = self._models.get(key)
            if shared is None:
                shared = self._models[key] = SharedModel(_load(request, configuration))
            shared.callers += 1
        try:
            yield shared
        except WorkerUnfit:
            self._forget(key, shared)
            raise
        finally:
            with self._lock:
                shared.callers -= 1
                if not shared.callers and self._models.get(key) is not shared:
                    shared.model.close()

    def release(self, request: ScoreRequest, configuration: str) -> None:
        """Close a model, once its callers have returned; the next caller loads it again."""
        key = (request, configuration)
        with self._lock:
            shared = self._models.pop(key, None)
            if shared and not shared.callers:
                shared.model.close()

    def close(self) -> None:
        """Release all models."""
        for request, configuration in list(self._models):
            self.release(request, configuration)

    def _forget(self, key: tuple[ScoreRequest, str], shared: SharedModel) -> None:
        with self._lock:
            if self._models.get(key) is shared:
                del self._models[key]


def _load(request: ScoreRequest, configuration: str) -> LoadedModel:
    remove_dead_scratch()
    model = LoadedModel(request)
    if model.facts.configuration == configuration:
        return model
    model.close()
    raise ScoringError(
        f"{request.model} version {request.version} on {model.facts.node} differs from the model of the driver",
        hint="make the model store and the release of graphkiln the same on every node; if the version was written "
        "again, make the function again",
    )


_of_process = SharedModels()
_inherited: list[SharedModels] = []


def shared_models() -> SharedModels:
    """Return the models of this process."""
    return _of_process


def _start_anew() -> None:
    """Forget the models of the parent after a fork: their threads do not exist here, so they cannot even be freed."""
    global _of_process  # noqa: PLW0603 - one per process
    _inherited.append(_of_process)
    _of_process = SharedModels()


def _close() -> None:
    _of_process.close()


os.register_at_fork(after_in_child=_start_anew)
atexit.register(_close)
