"""Prove a version outside of the server before it is loaded.

The version is lowered, self-tested and warmed up like in an instance, in another process with a deadline, so that a
graph that crashes its runtime or never finishes harms only that process. The instance finds the lowered graph in the
artifact cache.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.engines.hardware import gpus
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.lowering.deployment import Deployment
from graphkiln_backend.lowering.settings import Override
from graphkiln_backend.repository.config import read_config
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.publication import check_published
from graphkiln_backend.system.processes import keep_temporary_files_in, worker
from graphkiln_backend.system.signals import ServerStopping
from graphkiln_backend.triton.environment import be_ended_first

_POLL_S = 0.1
_NICENESS = 10  # serving has priority


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A version to prove.

    Attributes:
        folder: Version folder.
        config: Complete config.pbtxt for serving it.
        overrides: Settings of the command line for its model.
        cache: The artifact cache.
        temporary: Folder for temporary files.
    """

    folder: Path
    config: Path
    overrides: Sequence[Override] = field(default=())
    cache: CacheSettings
    temporary: Path


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of a proof.

    Attributes:
        reason: Why the version is refused; empty if it passed.
        words: Engine and placement, if it passed.
    """

    reason: str
    words: str = ""


def admit(candidate: Candidate, *, deadline_s: float, stopped: Callable[[], bool] = lambda: False) -> Verdict:
    """Build and prove a version in another process, which ends with this call.

    Raises:
        ServerStopping: `stopped` was true.
    """
    with (
        TemporaryDirectory(prefix="admission-", dir=candidate.temporary) as scratch,
        worker(_prove, candidate, scratch) as (receiver, process),
    ):
        return _wait(receiver, process, deadline_s, stopped)


def _wait(receiver: Connection, process: BaseProcess, deadline_s: float, stopped: Callable[[], bool]) -> Verdict:
    deadline = time.monotonic() + deadline_s
    while not receiver.poll(_POLL_S):
        if stopped():
            raise ServerStopping
        if time.monotonic() > deadline:
            return Verdict(f"its loading did not finish within {deadline_s:g} s")
    try:
        verdict: Verdict = receiver.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        ended = f"ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
        return Verdict(f"the process that loaded it {'was ' if code < 0 else ''}{ended}")
    return verdict


def _prove(sender: Connection, candidate: Candidate, scratch: str) -> None:
    with suppress(OSError):
        os.nice(_NICENESS)
    be_ended_first()  # a version that takes all memory must not cost those that serve
    keep_temporary_files_in(scratch)
    try:
        verdict = Verdict("", _build(candidate))
    except (GraphkilnError, OSError, MemoryError) as error:
        verdict = Verdict(str(error) or type(error).__name__)
    except Exception as error:  # noqa: BLE001 - an error that a graph causes is the reason for its refusal
        verdict = Verdict(f"{type(error).__name__}: {error}")
    sender.send(verdict)


def _build(candidate: Candidate) -> str:
    config = ModelConfig.read(candidate.config, has_gpu=bool(gpus()))
    with candidate.cache.open(candidate.temporary / "artifacts") as cache:
        deployment = Deployment.here(candidate.folder, config, cache, candidate.overrides)
        number = int(candidate.folder.name)
        check_published(read_config(candidate.config), candidate.folder.parent, number, deployment.version)
        proven = deployment.build(cache)
        with proven.session:
            return f"{proven.config}: {proven.placement}"
