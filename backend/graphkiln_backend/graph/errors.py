"""The errors that any part of graphkiln raises, in one tree; those of one part derive from it where they belong.

GraphkilnError                  what happened, what was expected; `hint` says what to do next
├── ManifestError               a manifest or another file from outside does not say what it must
├── RepositoryError             a model repository, version folder or config.pbtxt is not usable
├── SignatureError              tensors do not fit the signature (`expected`, `got`)
├── EngineUnavailable           an engine is not installed (`extra`) or cannot run here
├── LoweringError               no engine could run the graph (`attempts`)
├── CacheError                  the artifact cache cannot be used
├── ExecutionError              an engine failed while it ran a graph
├── VerificationError           the outputs changed (`report`)
│   └── UndecidedError          the samples cannot tell a right graph from a wrong one
├── ConversionError             a source model could not become a saved graph
├── ServerSetupError            the server cannot be started as configured
├── MeasurementError            something could not be measured
└── ClientError                 a request failed (`status`, `body`, `request_id`, `retry_after_s`)
    ├── InvalidInput            the image or tensor cannot be sent
    ├── ModelNotFound           no such model or version
    ├── ModelNotReady           the model is there but cannot run now
    ├── Unauthorized            the server requires other credentials
    ├── Overloaded              the server refuses work for now
    ├── DeadlineExceeded        the time given for the call is over
    ├── ConnectionFailed        no server answers at the address
    ├── ServerError             the server failed while it worked on the request
    └── ProtocolError           the response is not what the protocol promises

Third-party errors are translated into these at one edge per library, with `raise ... from`.
"""

from __future__ import annotations

from typing import ClassVar


class GraphkilnError(Exception):
    """Base of all errors of this project.

    Args:
        message: What happened and what was expected.
        hint: What the reader can do about it; empty when there is nothing to do.
    """

    triton_code: ClassVar[str] = "INTERNAL"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ManifestError(GraphkilnError):
    """A manifest (or another file from outside) is malformed; the message names the path of the bad key."""

    triton_code = "INVALID_ARG"
    exit_code = 2


class RepositoryError(GraphkilnError):
    """A model repository, a version folder or a config.pbtxt is missing or not usable."""

    triton_code = "NOT_FOUND"
    exit_code = 2


class SignatureError(GraphkilnError):
    """Tensors do not fit the signature.

    Args:
        message: What does not fit.
        expected: What the signature asks for.
        got: What came.
    """

    triton_code = "INVALID_ARG"
    exit_code = 2

    def __init__(self, message: str, *, expected: str, got: str, hint: str = "") -> None:
        super().__init__(f"{message}: expected {expected}, got {got}", hint=hint)
        self.expected = expected
        self.got = got


class EngineUnavailable(GraphkilnError):
    """An engine fits the task but is not installed or cannot run on this machine.

    Args:
        message: Which engine, and why it cannot run.
        extra: The extra of the `graphkiln` distribution that brings it, if one does.
    """

    triton_code = "UNAVAILABLE"

    def __init__(self, message: str, *, extra: str | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint or (f"pip install 'graphkiln[{extra}]'" if extra else ""))
        self.extra = extra


class LoweringError(GraphkilnError):
    """No configuration of a lowering plan produced a session.

    Args:
        message: What was to be lowered.
        attempts: One line per attempt: the configuration and why it failed.
    """

    triton_code = "UNAVAILABLE"

    def __init__(self, message: str, *, attempts: tuple[str, ...], hint: str = "") -> None:
        super().__init__("; ".join((message, *attempts)), hint=hint)
        self.attempts = attempts


class CacheError(GraphkilnError):
    """The artifact cache cannot be written, and does not hold the requested artifact."""

    triton_code = "UNAVAILABLE"


class ExecutionError(GraphkilnError):
    """An engine failed while it ran a graph."""


class VerificationError(GraphkilnError):
    """The outputs of a graph changed by more than the policy allows.

    Args:
        message: What changed.
        report: The verdict with the figures.
        relative_l2: How far they are off, where that is known.
    """

    def __init__(self, message: str, *, report: str, hint: str = "", relative_l2: float = 0.0) -> None:
        super().__init__(f"{message}: {report}", hint=hint)
        self.report = report
        self.relative_l2 = relative_l2


class UndecidedError(VerificationError):
    """The samples decide nothing, so that a graph which is wrong would pass as one that is right."""


class ConversionError(GraphkilnError):
    """A source model could not be turned into a saved graph."""

    exit_code = 2


class ServerSetupError(GraphkilnError):
    """The server cannot be started as configured: no tritonserver, a busy port, a missing folder, a wrong flag."""

    exit_code = 2


class MeasurementError(GraphkilnError):
    """Something could not be measured."""


class ClientError(GraphkilnError):
    """A request failed.

    Args:
        message: What happened.
        status: The HTTP status code or gRPC status name, when the server responded.
        body: Of the response, when the server responded.
        request_id: The id that the request carried.
        retry_after_s: Seconds to wait before another attempt, when the server names them.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        status: int | str | None = None,
        body: str | None = None,
        request_id: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.body = body
        self.request_id = request_id
        self.retry_after_s = retry_after_s


class InvalidInput(ClientError):
    """The image or tensor cannot be sent: not an image, wrong shape, wrong dtype."""

    triton_code = "INVALID_ARG"
    exit_code = 2


class ModelNotFound(ClientError):
    """The server has no model or version of that name."""

    triton_code = "NOT_FOUND"
    exit_code = 2


class ModelNotReady(ClientError):
    """The model exists but cannot run now."""

    triton_code = "UNAVAILABLE"


class Unauthorized(ClientError):
    """The server refuses the credentials."""


class Overloaded(ClientError):
    """The server refuses work for now."""

    triton_code = "UNAVAILABLE"


class DeadlineExceeded(ClientError):
    """The time given for the call is over."""

    triton_code = "CANCELLED"


class ConnectionFailed(ClientError):
    """No server answers at the address."""

    triton_code = "UNAVAILABLE"


class ServerError(ClientError):
    """The server failed while it worked on the request."""


class ProtocolError(ClientError):
    """The response is not what the KServe v2 protocol promises."""
