"""State of rollouts: what the user wants of a new version, and how far the server is.

A rollout tries a version, the candidate, on live requests: `shadow` computes a share of the requests a second time and
compares, `traffic` lets the candidate answer a share, `promoted` and `aborted` end it. Contents of the state folder:

- `STORE/NAME.wanted.json`: written by the user (`graphkiln rollout`), and by the supervisor when a gate decides
- `STORE/NAME.progress.json`: written by the supervisor only

`STORE` is a digest of the store's path or address. Files are replaced atomically: after a crash the state is the one
before or the one asked for. A damaged file is logged and counts as missing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from graphkiln_backend.graph.decoding import decode, encode_json
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.repository.stores import walk
from graphkiln_backend.repository.version_folders import version_folders
from graphkiln_backend.system.files import replace_file
from graphkiln_backend.system.locks import lock, try_lock
from graphkiln_backend.triton.rollout_files import Example, Latencies, Tally

__all__ = [
    "Example",
    "Gates",
    "Latencies",
    "Phase",
    "Progress",
    "RolloutError",
    "RolloutFolder",
    "Rollouts",
    "Tally",
    "Wanted",
]

_log = logging.getLogger("graphkiln.server")

STATE_VARIABLE = "GRAPHKILN_STATE"

Phase = Literal["shadow", "traffic", "promoted", "aborted"]

_WANTED, _PROGRESS, _CLAIM = ".wanted.json", ".progress.json", "server.lock"
_MOST_BYTES = 1 << 20
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://")

_T = TypeVar("_T", "Wanted", "Progress")


class RolloutError(GraphkilnError):
    """A rollout cannot be changed as requested."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Gates:
    """Conditions for the next step of a rollout; a value of 0 is not asked for.

    Attributes:
        agree: Least share of requests with the same decision, 0..1.
        p99_ratio: Largest ratio of the candidate's p99 latency to that of the serving version, in traffic.
        errors: Largest share of requests on which the candidate fails, 0..1.
        requests: Number of requests to see before each step.
        then: Shares of the traffic after the shadow, in order, 0..1; after the last one the candidate is promoted.
    """

    agree: float = 0.0
    p99_ratio: float = 0.0
    errors: float = 0.0
    requests: int = 0
    then: tuple[float, ...] = ()

    @property
    def are_set(self) -> bool:
        """True if the rollout goes on by itself."""
        return self != Gates()


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A rollout as asked for.

    Attributes:
        model: Name of the model.
        candidate: The new version.
        serving: The version that serves.
        phase: What is asked for.
        share: Share of the requests that are compared (`shadow`), or that the candidate answers (`traffic`), 0..1.
        gates: Conditions for steps that the server takes by itself.
        reason: Why it was aborted or promoted; empty if the user asked for it.
        serial: Number of the change, 1 for the first.
        changed_at: Seconds since the epoch.
    """

    model: str
    candidate: int
    serving: int
    phase: Phase = "shadow"
    share: float = 0.0
    gates: Gates = field(default_factory=Gates)
    reason: str = ""
    serial: int = 1
    changed_at: float = 0.0

    @property
    def is_running(self) -> bool:
        """True while the candidate gets requests."""
        return self.phase in {"shadow", "traffic"}

    @property
    def traffic(self) -> float:
        """Share of the requests that the candidate answers, 0..1."""
        return self.share if self.phase == "traffic" else 0.0

    def changed(self, phase: Phase, share: float = 0.0, reason: str = "") -> Wanted:
        """The next change of the rollout, to be written."""
        return replace(self, phase=phase, share=share, reason=reason, serial=self.serial + 1, changed_at=time.time())


@dataclass(kw_only=True, slots=True)
class Progress(Tally):
    """Progress of a rollout, as the server writes it.

    Attributes:
        model: Name of the model.
        candidate: The new version.
        serving: The version that serves.
        phase: What the server does; empty while the candidate is being proven and loaded.
        share: Share of the requests, as in `Wanted`.
        reason: Why it was aborted, refused or promoted by itself.
        files: Digest of the candidate's files.
        aborted: Digest of the files of each version whose rollout was aborted; with other files it is a new one.
        updated_at: Seconds since the epoch.
        applied_serial: Serial of the change that the server has applied; the user's is pending if it is higher.
    """

    model: str
    candidate: int
    serving: int
    phase: Literal["", "shadow", "traffic", "promoted", "aborted"] = ""
    share: float = 0.0
    reason: str = ""
    files: str = ""
    aborted: dict[str, str] = field(default_factory=dict)
    updated_at: float = 0.0
    applied_serial: int = 0


def state_folder(chosen: Path | None = None) -> Path:
    """Folder of the state: the chosen one, `GRAPHKILN_STATE`, or the user's own.

    Raises:
        RolloutError: The user has no home folder.

    Source: XDG Base Directory Specification, `XDG_STATE_HOME`, where relative paths are invalid.
    """
    if named := chosen or os.environ.get(STATE_VARIABLE):
        return Path(named).absolute()
    if (configured := Path(os.environ.get("XDG_STATE_HOME", ""))).is_absolute():
        return configured / "graphkiln"
    try:
        return Path.home() / ".local" / "state" / "graphkiln"
    except RuntimeError as error:
        hint = f"set HOME, XDG_STATE_HOME or {STATE_VARIABLE}, or name a folder: --state DIR"
        raise RolloutError("there is no folder for the state of rollouts", hint=hint) from error


class RolloutFolder:
    """The rollouts of one store.

    Args:
        state: The state folder; it need not exist.
        store: Path of the store, or its address such as `s3://BUCKET/PATH`.

    Attributes:
        path: The folder of this store's files.
    """

    def __init__(self, state: Path, store: str | Path) -> None:
        text = str(store)
        key = text.rstrip("/") if _REMOTE.match(text) else os.path.realpath(text)
        self.path = state / "rollouts" / hashlib.sha256(os.fsencode(key)).hexdigest()[:16]
        self._stamps: dict[str, tuple[int, ...]] = {}
        self._reported: dict[Path, str] = {}
        self._claim: int | None = None

    def models(self) -> list[str]:
        """Names of the models with a rollout, also an ended one."""
        try:
            names = [path.name for path in self.path.iterdir()]
        except OSError:
            return []
        return sorted(name.removesuffix(_WANTED) for name in names if name.endswith(_WANTED))

    def changed(self) -> list[str]:
        """Names of the models whose rollout was changed since the last call; one `stat` for each if none was."""
        stamps: dict[str, tuple[int, ...]] = {}
        for name in self.models():
            try:
                status = (self.path / f"{name}{_WANTED}").stat()
            except OSError:
                continue
            stamps[name] = (status.st_mtime_ns, status.st_ino, status.st_size)
        before, self._stamps = self._stamps, stamps
        return [name for name in sorted(before.keys() | stamps.keys()) if before.get(name) != stamps.get(name)]

    def claim(self) -> str:
        """Make this process the one that carries out the rollouts; return why it cannot be, or an empty text.

        The claim ends with the process. A folder that does not exist has no rollouts, and needs no claim.
        """
        if self._claim is None and self.path.is_dir():
            try:
                claim = os.open(self.path / _CLAIM, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except OSError as error:
                return f"the state folder {self.path} cannot be written: {error.strerror}"
            if not try_lock(claim):
                os.close(claim)
                return "another server carries out the rollouts of this store"
            self._claim = claim
        return ""

    def read_wanted(self, model: str) -> Wanted | None:
        """Read what is asked for; None without a rollout, or if the file is damaged."""
        wanted = self._read(Wanted, self.path / f"{model}{_WANTED}")
        return wanted if wanted and wanted.model == model else None

    def read_progress(self, model: str) -> Progress | None:
        """Read how far the server is; None if it has not begun, or if the file is damaged."""
        progress = self._read(Progress, self.path / f"{model}{_PROGRESS}")
        return progress if progress and progress.model == model else None

    def write_wanted(self, wanted: Wanted) -> None:
        """Ask for a change.

        Raises:
            RolloutError: It is not the next change: another one was made meanwhile.
            OSError: The file cannot be written.
        """
        with self._lock():
            before = self.read_wanted(wanted.model)
            if wanted.serial != (before.serial if before else 0) + 1:
                raise RolloutError(
                    f"the rollout of {wanted.model} was changed meanwhile", hint="look at its status, and try again"
                )
            replace_file(self.path / f"{wanted.model}{_WANTED}", encode_json(wanted), durably=True)

    def write_progress(self, progress: Progress) -> None:
        """Write how far the server is.

        Raises:
            OSError: The file cannot be written.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(self.path / f"{progress.model}{_PROGRESS}", encode_json(progress))

    def _read(self, kind: type[_T], path: Path) -> _T | None:
        try:
            with path.open("rb") as file:
                content = file.read(_MOST_BYTES)
            found = decode(kind, json.loads(content))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError, GraphkilnError) as error:
            if self._reported.get(path) != str(error):
                _log.error("%s is ignored: %s", path, error)
            self._reported[path] = str(error)
            return None
        self._reported.pop(path, None)
        return found

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            lock(descriptor)
            yield
        finally:
            os.close(descriptor)


def first_change(
    model: str, *, candidate: int, serving: int, share: float, gates: Gates, before: Wanted | None
) -> Wanted:
    """Make the change that begins a rollout, to be written.

    Args:
        model: Name of the model.
        candidate: The new version.
        serving: The version that serves.
        share: Share of the requests to compare, 0..1.
        gates: Conditions for steps that the server takes by itself.
        before: The rollout that the folder holds now, or None.

    Raises:
        RolloutError: Another rollout of the model is running, or the versions are the same.
    """
    if before and before.is_running:
        raise RolloutError(
            f"a rollout of {model} to version {before.candidate} is running", hint="promote or abort it first"
        )
    if candidate == serving:
        raise RolloutError(f"version {candidate} of {model} is the one that serves", hint="name another version")
    return Wanted(
        model=model,
        candidate=candidate,
        serving=serving,
        phase="shadow",
        share=share,
        gates=gates,
        serial=before.serial + 1 if before else 1,
        changed_at=time.time(),
    )


def digest_files(folder: Path) -> str:
    """Digest of the names, sizes and times of the files of a version; empty if they cannot be listed.

    Unlike the stamp of `repository.stores`, it is the same in the next run of the server.
    """
    digest = hashlib.sha256()
    try:
        for path, status in walk(folder):
            if not path.is_dir():
                digest.update(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}\n".encode())
    except OSError:
        return ""
    return digest.hexdigest()[:16]


def rolled_back(wanted: Wanted, folder: Path) -> list[int]:
    """Versions of a model's folder that the promotion of an older one replaces; later ones are served."""
    if wanted.candidate > wanted.serving:
        return []
    return [each for each in version_folders(folder.iterdir()) if wanted.candidate < each <= wanted.serving]


@dataclass(kw_only=True, slots=True)
class Rollouts:
    """The rollouts of the models of a server; kept across its restarts.

    Attributes:
        folders: Their folders.
        wanted: What is asked for, by model.
    """

    folders: Sequence[RolloutFolder] = ()
    wanted: dict[str, Wanted] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Path, stores: Sequence[Path], sources: Mapping[Path, str | Path]) -> Rollouts:
        """Find the rollouts of some stores.

        Args:
            state: The state folder.
            stores: The stores that are served.
            sources: Store of which a served one is a copy.
        """
        keys: list[str | Path] = []
        for store in stores:
            keys.append(sources.get(store, store))
            with suppress(OSError):  # models that were named one by one are links in a temporary store
                keys += [Path(os.path.realpath(path)).parent for path in store.iterdir() if path.is_symlink()]
        folders = {folder.path: folder for folder in (RolloutFolder(state, key) for key in keys)}
        return cls(folders=[*folders.values()])

    def look(self) -> list[str]:
        """Read changes; return the names of the changed models."""
        changed = []
        for folder in self.folders:
            for name in folder.changed():
                changed.append(name)
                if wanted := folder.read_wanted(name):
                    self.wanted[name] = wanted
                elif name not in folder.models():
                    self.wanted.pop(name, None)  # the user has removed it; a damaged one changes nothing
        return changed

    def folder_of(self, model: str) -> RolloutFolder:
        """The folder with the rollout of a model, which must have one."""
        return next(folder for folder in self.folders if model in folder.models())

    def is_running(self, model: str) -> bool:
        """True if a candidate of the model gets requests, or will once it is loaded."""
        wanted = self.wanted.get(model)
        return wanted is not None and wanted.is_running

    def hidden(self, model: str, folder: Path) -> dict[int, str]:
        """Versions that the model itself must not serve, with the reasons.

        Args:
            model: Name of the model.
            folder: Its folder.
        """
        wanted = self.wanted.get(model)
        if wanted is None:
            return {}
        progress = next((found for each in self.folders if (found := each.read_progress(model))), None)
        earlier = progress.aborted if progress else {}
        same = [name for name, files in earlier.items() if name.isdecimal() and files == digest_files(folder / name)]
        hidden = dict.fromkeys(map(int, same), "its rollout was aborted, or it was rolled back")
        if wanted.is_running:
            return {**hidden, wanted.candidate: f"a rollout tries it ({wanted.phase})"}
        if wanted.phase == "promoted":
            hidden.pop(wanted.candidate, None)
            return hidden | dict.fromkeys(rolled_back(wanted, folder), f"version {wanted.candidate} was promoted")
        known = progress.files if progress and progress.candidate == wanted.candidate else ""
        if known and known != digest_files(folder / str(wanted.candidate)):
            return hidden
        return {**hidden, wanted.candidate: f"its rollout was aborted: {wanted.reason or 'as requested'}"}
