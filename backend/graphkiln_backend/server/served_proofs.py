"""Proofs of versions that no instance of graphkiln computes: before they are shown, after each load, and while idle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from graphkiln_backend.engines.hardware import gpus
from graphkiln_backend.repository.config import NATIVE
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.version import CONFIG_FILE
from graphkiln_backend.server.flags import ListenAddress
from graphkiln_backend.server.golden_requests import Answers, Asking, Target, Way
from graphkiln_backend.server.managed_stores import ShownModel
from graphkiln_backend.server.proofs import ProofBook, ProofState
from graphkiln_backend.server.proving_server import Candidate, ProvingServer
from graphkiln_backend.server.repository_control import RepositoryControl
from graphkiln_backend.system.signals import ServerStopping

_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedProofs:
    """Proofs through a server.

    Attributes:
        prover: Proves versions before they are shown.
        mirror: The repository that Triton sees, with the configurations.
        address: HTTP address of the serving server; None if HTTP is off, which rules out replays.
        headers: Headers for restricted endpoints.
        deadline_s: Time limit of a replay of all versions.
        book: Results, for metrics and tables.
    """

    prover: ProvingServer
    mirror: Path
    address: ListenAddress | None
    headers: dict[str, str]
    deadline_s: float
    book: ProofBook

    def admit(
        self, models: Iterable[tuple[ShownModel, int]], stopped: Callable[[], bool] = lambda: False
    ) -> dict[tuple[str, int], Answers]:
        """Prove versions in a server that no client reaches.

        Raises:
            ServerStopping: `stopped` was true.
            OSError: The server cannot be started.
        """
        candidates = [Candidate(shown=shown, version=version) for shown, version in models]
        answers = self.prover.prove(candidates, stopped)
        for candidate in candidates:
            self._record(candidate.shown, candidate.version, answers[candidate.which])
        return answers

    def ask_once_live(self, models: Sequence[ShownModel]) -> AbstractContextManager[Asking | None]:
        """Prepare the first replay while the server starts: one sample of each version, to delay the start little.

        After a replay that failed, it is of all samples: a version that is wrong for another one would restart the
        server again and again.
        """
        targets = self._targets(models)
        known = [self.book.find(target.model, target.version) for target in targets]
        samples = 0 if any(state.failures for state in known if state) else 1
        way = (
            Way(address=self.address, headers=self.headers, thorough=False, samples=samples, start_s=self.deadline_s)
            if self.address
            else None
        )
        return Asking(targets, way) if targets and way else nullcontext()

    def replay(
        self,
        models: Sequence[ShownModel],
        stopped: Callable[[], bool] = lambda: False,
        *,
        idle_s: float = 0.0,
        asking: Asking | None = None,
    ) -> dict[tuple[str, int], str]:
        """Ask the serving server the golden samples of shown versions.

        Args:
            models: The models.
            stopped: Returns true to give up.
            idle_s: Seconds to wait for each model to be idle.
            asking: Result of `ask_once_live` for these models.

        Returns:
            Reasons of wrong versions, by model and version. A version that does not answer is not wrong: the
            supervisor restarts a server that does not respond.

        Raises:
            ServerStopping: `stopped` was true.
            OSError: The process that asks cannot be started, or has ended.
        """
        targets = self._targets(models)
        if not targets or self.address is None:
            return {}
        deadline = time.monotonic() + self.deadline_s + idle_s * len(targets)
        shown = {model.stored.name: model for model in models}
        way = Way(address=self.address, headers=self.headers, thorough=False, idle_s=idle_s)
        with asking or Asking(targets, way) as asked:
            try:
                while not asked.wait(_POLL_S) and time.monotonic() < deadline:
                    if stopped():
                        raise ServerStopping
            except EOFError as error:
                raise ChildProcessError("the process that replays golden samples has ended") from error
            asked_for = {(target.model, target.version) for target in targets}  # fewer than `asking` began with
            found = {
                which: answers for which, answers in asked.answers.items() if answers.answered and which in asked_for
            }
        for (name, version), answers in found.items():
            self._record(shown[name], version, answers, replayed=True)
        return {which: answers.reason for which, answers in found.items() if answers.reason}

    def read_counters(self, models: Iterable[ShownModel]) -> dict[tuple[str, int], dict[str, int]]:
        """Read what the server has counted of versions with golden samples since they were loaded.

        Raises:
            OSError: The server does not respond.
        """
        control = RepositoryControl(http=self.address, headers=self.headers)
        versions = [(model.stored.name, version) for model in models for version in model.provable]
        return {which: control.read_counters(*which) for which in versions} if self.address else {}

    def _targets(self, models: Sequence[ShownModel]) -> list[Target]:
        return [
            Target(
                model=model.stored.name,
                version=version,
                folder=str(model.stored.folder / str(version)),
                config=str(self.mirror / model.stored.name / CONFIG_FILE),
            )
            for model in models
            for version in model.provable
        ]

    def note(self, model: ShownModel) -> None:
        """Record which versions of a model serve now, and which of them cannot be proven."""
        self.book.keep(model.stored.name, model.versions)
        if model.other:
            for version in set(model.versions) - set(model.provable):
                self.book.record(_state(model, version))

    def _record(self, model: ShownModel, version: int, answers: Answers, *, replayed: bool = False) -> None:
        before = self.book.find(model.stored.name, version) or _state(model, version)
        right = not answers.reason
        self.book.record(
            replace(
                before,
                proven=right,
                error=answers.error if right else before.error,
                replays=before.replays + replayed,
                failures=before.failures + (replayed and not right),
                last_right_at=time.time() if right else before.last_right_at,
            )
        )


def _state(model: ShownModel, version: int) -> ProofState:
    config = Candidate(shown=model, version=version).config
    if model.native is None:
        instances, device = 0, ""
    else:
        read = ModelConfig.from_protobuf(config, has_gpu=bool(gpus()))
        instances, device = read.processes, str(read.device)
    return ProofState(
        model=model.stored.name,
        version=version,
        backend=config.backend or config.platform,
        seat=NATIVE if model.native is not None else "",
        proven=False,
        instances=instances,
        device=device,
    )
