"""Prove versions in a second tritonserver, which no client reaches and which ends afterwards.

Versions of other backends and of the native seat compute inside tritonserver. Before such a version is shown, a second
server with the same backends loads it with the configuration and the instances that will serve, and is asked its golden
samples (`server.golden_requests`). A version that ends its server, hangs, or computes wrong outputs therefore harms
nobody. The cost is one more load of the version: its memory and its time.

What was proven is remembered in the artifact cache, so that the next start loads every version once. The key names
everything that the proof depends on: the files, the configuration, the backend, the server, the processor.
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.engines import hardware
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.lowering.artifacts import Kind, recall
from graphkiln_backend.repository.config import ModelConfigProto, read_config
from graphkiln_backend.repository.overlay import write_mirror
from graphkiln_backend.repository.version import CONFIG_FILE
from graphkiln_backend.server.flags import DEFAULT_HOST, ListenAddress, reserved_port
from graphkiln_backend.server.golden_requests import Answers, Asking, Target, Way
from graphkiln_backend.server.managed_stores import ShownModel
from graphkiln_backend.server.run_folder import SHARED_MEMORY
from graphkiln_backend.server.watchdog import describe_exit
from graphkiln_backend.system.processes import Guard, kill_group
from graphkiln_backend.system.signals import ServerStopping

_log = logging.getLogger("graphkiln.server")

_POLL_S = 0.05
_ENDS_S = 1.0  # from a broken connection to the end of the server


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvenAnswers:
    """A remembered proof."""

    verdict: str
    error: float


# Raise the version when the rules of the proof change: `golden_requests.py`, `lowering/acceptance.py`, `proof`.
_SERVED_PROOF = Kind(name="served proof", file="proof.json", record=ProvenAnswers, version="1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A version to prove.

    Attributes:
        shown: The model as it would be shown.
        version: The version.
    """

    shown: ShownModel
    version: int

    @property
    def which(self) -> tuple[str, int]:
        """Model and version."""
        return self.shown.stored.name, self.version

    @property
    def folder(self) -> Path:
        """The version's folder."""
        return self.shown.stored.folder / str(self.version)

    @property
    def config(self) -> ModelConfigProto:
        """The configuration that Triton will get."""
        return self.shown.served_config or read_config(self.shown.stored.folder / CONFIG_FILE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvingServer:
    """Proves versions.

    Attributes:
        start: Starts a tritonserver with the arguments that follow the program's name.
        backends: Folder of the installed backends.
        arguments: The user's arguments that concern backends.
        temporary: Folder for temporary files.
        regions: Name prefix of the shared-memory regions of its Python instances.
        cache: Remembers proofs.
        release: Version of tritonserver.
        deadline_s: Time limit of one proof.
        memory_bytes: Versions are proven together as long as their files are not larger together.
    """

    start: Callable[[Sequence[str]], subprocess.Popen[bytes]]
    backends: Path
    arguments: Sequence[str]
    temporary: Path
    regions: str
    cache: CacheSettings
    release: str
    deadline_s: float
    memory_bytes: int

    def prove(
        self, candidates: Sequence[Candidate], stopped: Callable[[], bool] = lambda: False
    ) -> dict[tuple[str, int], Answers]:
        """Prove versions, side by side as far as memory allows, unless a proof is remembered.

        Raises:
            ServerStopping: `stopped` was true.
            OSError: The server cannot be started.
        """
        answers: dict[tuple[str, int], Answers] = {}
        keys = {candidate.which: self._key(candidate) for candidate in candidates}
        for candidate in candidates:
            if known := self._recall(candidate, keys[candidate.which]):
                answers[candidate.which] = Answers(verdict=known.verdict, error=known.error)
        for group in _groups([each for each in candidates if each.which not in answers], self.memory_bytes):
            found = self._prove_together(group, stopped)
            unknown = [each for each in group if not found[each.which].answered]
            for each in unknown if len(group) > 1 else ():  # which of them ended or blocked the server is not known
                found |= self._prove_together([each], stopped)
            answers |= found
        for candidate in candidates:
            if not answers[candidate.which].reason:
                self._remember(candidate, keys[candidate.which], answers[candidate.which])
        return answers

    def _prove_together(
        self, candidates: Sequence[Candidate], stopped: Callable[[], bool]
    ) -> dict[tuple[str, int], Answers]:
        """Load versions into one server, and ask it."""
        with TemporaryDirectory(prefix="proof-", dir=self.temporary) as scratch, reserved_port() as port:
            address = ListenAddress(protocol="HTTP", host=DEFAULT_HOST, port=port)
            store = Path(scratch) / "models"
            targets = _fill(store, candidates)
            way = Way(address=address, headers={}, start_s=self.deadline_s)
            with self._serving(store, address) as server, Asking(targets, way) as asked:
                reason = self._wait(asked, server, stopped)
            answers = {}
            for candidate in candidates:
                name, _ = candidate.which
                found = asked.answers.get(candidate.which, Answers(reason="it was not asked", answered=False))
                cause = found.reason if found.answered else reason or found.reason
                cause = cause.replace(str(store / name), str(candidate.shown.stored.folder))
                answers[candidate.which] = replace(found, reason=cause)
            return answers

    def _wait(self, asked: Asking, server: subprocess.Popen[bytes], stopped: Callable[[], bool]) -> str:
        """Wait for all judgments; return the reason why some are missing, or an empty string."""
        deadline = time.monotonic() + self.deadline_s
        try:
            while not asked.wait(_POLL_S):
                if stopped():
                    raise ServerStopping
                if server.poll() is not None:
                    break
                if time.monotonic() > deadline:
                    return f"its proof did not finish within {self.deadline_s:g} s"
        except EOFError:
            return "the process that asked its golden samples has ended"
        if all(answers.answered for answers in asked.answers.values()) and server.poll() is None:
            return ""
        try:
            code = server.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            return ""
        return f"it ended the server that proved it: {describe_exit(code).what}"

    @contextmanager
    def _serving(self, store: Path, address: ListenAddress) -> Iterator[subprocess.Popen[bytes]]:
        arguments = [
            f"--model-repository={store}",
            f"--backend-directory={self.backends}",
            f"--backend-config=python,shm-region-prefix-name={self.regions}",
            *self.arguments,
            f"--http-address={address.host}",
            f"--http-port={address.port}",
            "--allow-grpc=false",
            "--allow-metrics=false",
            "--model-control-mode=none",
            "--exit-on-error=false",
            "--strict-readiness=false",
        ]
        server = self.start(arguments)
        try:
            with Guard(server):
                yield server
        finally:
            kill_group(server)
            for region in SHARED_MEMORY.glob(f"{self.regions}*"):  # a killed server leaves them
                region.unlink(missing_ok=True)

    def _key(self, candidate: Candidate) -> dict[str, str]:
        """Everything that a proof depends on."""
        stored, config = candidate.shown.stored, candidate.config
        backend = self.backends / (config.backend or config.platform.partition("_")[0])
        return {
            "version": f"{stored.versions.get(candidate.version)} {candidate.version}",
            "model": stored.stamp,
            "config": str(config),
            "backend": " ".join(_stamps(backend)),
            "arguments": " ".join(self.arguments),
            "triton": self.release,
            "machine": ", ".join([hardware.identity(CPU), *map(str, hardware.gpus())]),
        }

    def _recall(self, candidate: Candidate, key: Mapping[str, str]) -> ProvenAnswers | None:
        cache = self.cache.open(self.temporary / "artifacts")
        with cache, recall(_SERVED_PROOF, cache, _title(candidate), key) as fact:
            return fact.value

    def _remember(self, candidate: Candidate, key: Mapping[str, str], answers: Answers) -> None:
        cache = self.cache.open(self.temporary / "artifacts")
        with cache, recall(_SERVED_PROOF, cache, _title(candidate), key) as fact:
            fact.keep(ProvenAnswers(verdict=answers.verdict, error=answers.error))


def _title(candidate: Candidate) -> str:
    name, version = candidate.which
    return f"{name}/{version}"


def _fill(store: Path, candidates: Sequence[Candidate]) -> list[Target]:
    """Make a store of the versions to load."""
    store.mkdir()
    targets = []
    for candidate in candidates:
        name, version = candidate.which
        mirror, folder = store / name, candidate.shown.stored.folder
        if not mirror.exists():
            versions = [each.version for each in candidates if each.which[0] == name]
            write_mirror(folder, mirror, versions, _with_all_versions(candidate.config))
        targets.append(
            Target(model=name, version=version, folder=str(candidate.folder), config=str(mirror / CONFIG_FILE))
        )
    return targets


def _with_all_versions(config: ModelConfigProto) -> ModelConfigProto:
    """Copy a configuration for a store that holds only the versions to load."""
    copied = ModelConfigProto()
    copied.CopyFrom(config)
    copied.ClearField("version_policy")
    copied.version_policy.all.SetInParent()
    return copied


def _groups(candidates: Sequence[Candidate], limit_bytes: int) -> list[list[Candidate]]:
    """Divide versions into groups that may be loaded together."""
    groups: list[list[Candidate]] = []
    total = 0
    for candidate in candidates:
        size = _bytes_of(candidate.folder)
        if groups and total + size <= limit_bytes:
            groups[-1].append(candidate)
            total += size
        else:
            groups.append([candidate])
            total = size
    return groups


def _bytes_of(folder: Path) -> int:
    """Size of the files of a version, which may change meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _stamps(folder: Path) -> Iterator[str]:
    """Name, size and time of each file of a backend."""
    for path in sorted(folder.resolve().iterdir()) if folder.is_dir() else ():
        if path.is_file():
            status = path.stat()
            yield f"{path.name}:{status.st_size}:{status.st_mtime_ns}"
