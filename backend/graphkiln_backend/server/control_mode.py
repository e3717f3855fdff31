"""Who decides which versions are served: what `--model-control-mode` of the user means for Triton and for us."""

from __future__ import annotations

from dataclasses import dataclass

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_backend.server.flags import TritonFlags

_POLL_S = 15.0
"""Source: tritonserver's default of `--repository-poll-secs`."""
_NAMES = ("none", "poll", "explicit")
_RAW_FLAGS = {"disable-auto-complete-config", "strict-model-config", "model-config-name"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlMode:
    """The user's control mode.

    Attributes:
        name: `none`, `poll` or `explicit`.
        poll_s: Seconds between two looks at the stores, in poll mode.
        managed: Whether we decide what Triton sees, over its repository API; without HTTP and gRPC nobody can.
        completes: Whether we complete configurations: not against the user's flags.
    """

    name: str
    poll_s: float
    managed: bool
    completes: bool

    @classmethod
    def read(cls, flags: TritonFlags) -> ControlMode:
        """Reads the user's flags.

        Raises:
            ServerSetupError: There is no such mode, or the interval is not a number of seconds.
        """
        name = flags.values.get("model-control-mode", "none")
        if name not in _NAMES:  # Triton would print all of its flags
            raise ServerSetupError(
                f"unknown --model-control-mode '{name}'",
                hint=did_you_mean(name, _NAMES),
            )
        ours = name in {"none", "poll"} and "load-model" not in flags.values  # the rest is Triton's to refuse
        return cls(
            name=name,
            poll_s=_poll_seconds(flags),
            managed=ours and any(flags.listen_address(service) for service in ("http", "grpc")),
            completes=not _RAW_FLAGS & flags.values.keys(),
        )

    def before_flags(self) -> tuple[str, ...]:
        """Arguments that the user's own may overrule."""
        return ("--exit-on-error=false",) if self.managed or self.name == "explicit" else ()

    def after_flags(self) -> tuple[str, ...]:
        """Arguments that overrule the user's own: the last one counts."""
        return ("--model-control-mode=explicit", "--load-model=*") if self.managed else ()


def _poll_seconds(flags: TritonFlags) -> float:
    text = flags.values.get("repository-poll-secs", str(_POLL_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise ServerSetupError(
            f"--repository-poll-secs must be a number of seconds, got '{text}'", hint="--repository-poll-secs=15"
        )
    return seconds
