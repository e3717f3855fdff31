"""Rollouts as their users change them: `graphkiln rollout` and `graphkiln.rollout`.

Both write what is wanted into the state folder (`graphkiln_backend.server.rollouts`). The server that serves the store
reads it, and writes how far it is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.repository.version import newest_version
from graphkiln_backend.repository.version_folders import version_folders
from graphkiln_backend.server.rollout_gates import Verdict, judge
from graphkiln_backend.server.rollouts import (
    Gates,
    Progress,
    RolloutError,
    RolloutFolder,
    Wanted,
    first_change,
    state_folder,
)
from graphkiln_backend.storage.address import parse_store

# Proving and loading of a candidate included.
DEFAULT_TIMEOUT_S = 600.0
# A server that serves the store sees a change within a second, and writes a sign of life every five.
SILENCE_S = 15.0
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutStatus:
    """A rollout: what is wanted, how far the server is, and what its gates say.

    Attributes:
        wanted: The last change.
        progress: Counts since the last change that the server has applied; None if no server has begun.
        verdict: Verdict of the gates on these counts; its bounds are those of agreement, also without gates.
    """

    wanted: Wanted
    progress: Progress | None
    verdict: Verdict | None

    @property
    def is_applied(self) -> bool:
        """True if the server has applied the last change."""
        return self.progress is not None and self.progress.applied_serial >= self.wanted.serial

    @property
    def silence_s(self) -> float:
        """Seconds since a server wrote about it, or since the change if none ever did."""
        return max(0.0, time.time() - (self.progress.updated_at if self.progress else self.wanted.changed_at))

    @property
    def phase(self) -> str:
        """Phase of the server; empty until it has begun."""
        return self.progress.phase if self.progress else ""

    @property
    def reason(self) -> str:
        """Reason for its end or refusal; empty while it runs, or if the user ended it."""
        return (self.progress.reason if self.progress else "") or self.wanted.reason

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the gates have seen enough requests; None if nothing is known of their rate."""
        progress, needed = self.progress, self.wanted.gates.requests
        if progress is None or not needed or not self.wanted.is_running or not self.is_applied:
            return None
        seen = progress.requests if progress.phase == "traffic" else progress.compared
        passed = progress.updated_at - self.wanted.changed_at
        return max(0.0, (needed - seen) * passed / seen) if seen and passed > 0 else None


class Rollout:
    """The rollout of a model: try another version on live requests, then promote or abort it.

    Args:
        model: `STORE/NAME`, as the server serves it; also `s3://` and others.
        state: State folder of the server; None for the user's (`$XDG_STATE_HOME/graphkiln`).
        timeout_s: Time limit for the server to apply a change.

    Raises:
        RepositoryError: There is no such model.
        RolloutError: There is no folder for the state.
    """

    def __init__(self, model: str | Path, *, state: Path | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._model = str(model).rstrip("/")
        self._is_local = isinstance(parse_store(self._model), Path)
        if self._is_local:
            newest_version(Path(self._model))  # errors that name what is there
            folder = Path(self._model).absolute()
            store, self.name = str(folder.parent), folder.name
        else:
            store, _, self.name = self._model.rpartition("/")
        self._timeout_s = timeout_s
        self._folder = RolloutFolder(state_folder(state), store)

    def start(self, version: int, *, shadow: float, gates: Gates | None = None) -> RolloutStatus:
        """Compare the answers of another version on a share of the requests.

        Args:
            version: The version to try; older ones are fine.
            shadow: Share of the requests that it computes a second time, 0..1.
            gates: Conditions by which the server goes on by itself; None to decide by hand.

        Returns:
            The status once the version is proven and loaded, and copies are sent to it.

        Raises:
            RolloutError: There is no such version, it serves already, a rollout is running, no server serves the store,
                or the server refuses the version.
        """
        before = self._folder.read_wanted(self.name)
        serving = self._serving(version, before)
        wanted = first_change(
            self.name, candidate=version, serving=serving, share=shadow, gates=gates or Gates(), before=before
        )
        return self._apply(wanted)

    def status(self) -> RolloutStatus:
        """Return the status.

        Raises:
            RolloutError: The model has no rollout.
        """
        wanted = self._folder.read_wanted(self.name)
        if wanted is None:
            hint = f"start one: graphkiln rollout start {self._model} --version N --shadow 5%"
            raise RolloutError(f"{self.name} has no rollout (state folder {self._folder.path})", hint=hint)
        progress = self._folder.read_progress(self.name)
        return RolloutStatus(
            wanted=wanted, progress=progress, verdict=judge(progress, wanted.gates) if progress else None
        )

    def traffic(self, share: float) -> RolloutStatus:
        """Let the new version answer a share of the requests, 0..1.

        Raises:
            RolloutError: No rollout is running, or no server applies it.
        """
        return self._apply(self._running().changed("traffic", share))

    def promote(self) -> RolloutStatus:
        """Let the new version answer all requests, in one step.

        Raises:
            RolloutError: No rollout is running, or no server applies it.
        """
        return self._apply(self._running().changed("promoted"))

    def abort(self) -> RolloutStatus:
        """Let the serving version answer all requests, and unload the new one.

        Raises:
            RolloutError: No rollout is running, or no server applies it.
        """
        return self._apply(self._running().changed("aborted"))

    def _running(self) -> Wanted:
        wanted = self.status().wanted
        if not wanted.is_running:
            by = f": {wanted.reason}" if wanted.reason else ""
            raise RolloutError(
                f"the rollout of {self.name} to version {wanted.candidate} has ended, it was {wanted.phase}{by}",
                hint=f"start one: graphkiln rollout start {self._model} --version N --shadow 5%",
            )
        return wanted

    def _serving(self, candidate: int, before: Wanted | None) -> int:
        """Version that serves: the result of the last rollout, else the newest version that is not the candidate.

        Raises:
            RolloutError: There is no such version, or no other.
        """
        last = 0
        if before:
            last = before.candidate if before.phase == "promoted" else before.serving
        if not self._is_local:  # the server knows
            return last
        versions = version_folders(Path(self._model).iterdir())
        if candidate not in versions:
            known = ", ".join(map(str, versions))
            raise RolloutError(
                f"{self.name} has no version {candidate}",
                hint=f"its versions are {known}" if len(versions) > 1 else f"its only version is {known}",
            )
        if last in versions:
            return last
        others = [version for version in versions if version != candidate]
        if not others:
            hint = "a rollout needs another version that serves"
            raise RolloutError(f"version {candidate} is the only one of {self.name}", hint=hint)
        return max(others)

    def _apply(self, wanted: Wanted) -> RolloutStatus:
        """Write a change, and wait for the server.

        Raises:
            RolloutError: The change cannot be written, the server refuses it, or there is none.
        """
        began, deadline = time.time(), time.monotonic() + self._timeout_s
        try:
            self._folder.write_wanted(wanted)
        except OSError as error:
            raise RolloutError(
                f"cannot change the rollout of {self.name}, {self._folder.path} cannot be written: {error.strerror}",
                hint="make room or write permission there, or name another folder to serve and rollout: --state DIR",
            ) from error
        while True:
            status = self.status()
            if status.wanted.serial > wanted.serial or (status.is_applied and status.phase):
                break
            is_heard = status.progress is not None and status.progress.updated_at >= began
            if not is_heard and time.time() - began > min(SILENCE_S, self._timeout_s):
                raise self._no_server(wanted, status)
            if time.monotonic() >= deadline:
                raise RolloutError(
                    f"the server has not applied it within {self._timeout_s:g} s",
                    hint=f"it goes on: graphkiln rollout status {self._model}",
                )
            time.sleep(_POLL_S)
        # A server writes first that it has aborted a rollout, and then its progress.
        if wanted.is_running and "aborted" in (status.wanted.phase, status.phase):
            raise RolloutError(
                f"version {wanted.candidate} of {self.name} is not tried: {status.reason or 'it was aborted'}",
                hint=f"version {status.wanted.serving} serves on",
            )
        return status

    def _no_server(self, wanted: Wanted, status: RolloutStatus) -> RolloutError:
        silence = f"none has written for {status.silence_s:.0f} s" if status.progress else "none has ever written"
        withdraw = "; `graphkiln rollout abort` withdraws it" if wanted.is_running else ""
        return RolloutError(
            f"no server applies the rollout of {self.name}: {silence} to {self._folder.path}",
            hint="start `graphkiln serve` with this store and state folder (--state), which then applies the change"
            + withdraw,
        )


def rollout(model: str | Path, *, state: Path | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Rollout:
    """Open the rollout of a model that a server of this machine serves.

        rollout = graphkiln.rollout("store/resnet50")
        rollout.start(2, shadow=0.05)
        print(rollout.status().verdict)
        rollout.promote()

    Args:
        model: `STORE/NAME`, as the server serves it; also `s3://` and others.
        state: State folder of the server; None for the user's (`$XDG_STATE_HOME/graphkiln`).
        timeout_s: Time limit for the server to apply a change.

    Raises:
        RepositoryError: There is no such model.
        RolloutError: There is no folder for the state.
    """
    return Rollout(model, state=state, timeout_s=timeout_s)
