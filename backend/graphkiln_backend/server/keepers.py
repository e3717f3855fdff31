"""What each control mode does beside a running server: see `server.rollout`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.repository.config import write_config
from graphkiln_backend.server.control_mode import ControlMode
from graphkiln_backend.server.managed_stores import ManagedStores, ServedModel
from graphkiln_backend.server.mirror import Mirror
from graphkiln_backend.server.polling import Poller
from graphkiln_backend.server.recovery import all_loaded, forget_failures, replace_failed
from graphkiln_backend.server.repository_control import RepositoryControl
from graphkiln_backend.triton.environment import Overrides

if TYPE_CHECKING:
    from graphkiln_backend.server.admission import Verdict

_SOON_S = 1.0
"""Until the next look at a folder that still changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """How versions are admitted.

    Attributes:
        overrides: Settings of the command line, by model.
        cache: The artifact cache.
        temporary: A folder for what need not last.
        deadline_s: How long loading a version may take.
        stopped: Whether the server stops.
    """

    overrides: Overrides
    cache: CacheSettings
    temporary: Path
    deadline_s: float
    stopped: Callable[[], bool]

    def __call__(self, model: ServedModel, version: int) -> Verdict:
        """Proves a version, under the configuration that it would be served with.

        Raises:
            AdmissionStopped: The server stops.
            OSError: The configuration cannot be written.
        """
        from graphkiln_backend.server.admission import Candidate, admit  # the whole of lowering, for later versions

        config = self.temporary / "candidate.pbtxt"
        if model.config is not None:
            write_config(model.config, config)
        candidate = Candidate(
            folder=model.stored.folder / str(version),
            config=config,
            overrides=self.overrides.get(model.stored.name, ()),
            cache=self.cache,
            temporary=self.temporary,
        )
        return admit(candidate, deadline_s=self.deadline_s, stopped=self.stopped)


@dataclass(kw_only=True, slots=True)
class ManagedKeeper:
    """The control modes `none` and `poll`: we decide what Triton sees.

    Attributes:
        mode: The user's control mode.
        stores: What is served.
        mirror: What Triton sees.
        control: The running server.
        admission: Proves versions that appear while it runs.
        load_timeout_s: For one load.
    """

    mode: ControlMode
    stores: ManagedStores
    mirror: Mirror
    control: RepositoryControl
    admission: Admission
    load_timeout_s: float
    _poller: Poller = field(init=False)

    def __post_init__(self) -> None:
        self._poller = Poller(self.stores, self.mirror, self.control, self.admission, self.load_timeout_s)

    @property
    def ticks(self) -> bool:
        """Whether the stores are polled."""
        return self.mode.name == "poll"

    def is_settled(self) -> bool:
        """Whether everything that the mirror shows is served.

        Raises:
            OSError: The server does not list its models.
        """
        return all_loaded(self.stores, self.control)

    def settle(self) -> None:
        """Gives versions that failed at the start a successor.

        Raises:
            OSError: The server ended, or the mirror cannot be written.
        """
        replace_failed(self.stores, self.mirror, self.control, timeout_s=self.load_timeout_s)
        forget_failures(self.stores, self.mirror, self.control)

    def tick(self) -> float | None:
        """Takes over what changed in the stores, in poll mode.

        Raises:
            OSError: The server ended, or the mirror cannot be written.
            AdmissionStopped: The server stops.
        """
        if not self.ticks:
            return None
        return min(_SOON_S, self.mode.poll_s) if self._poller.poll() else self.mode.poll_s
