"""Errors of graphkiln, in one tree; errors of a single room derive from it there.

GraphkilnError                  what happened, what was expected; `hint` says what to do next
├── ManifestError               a manifest or another external file is malformed
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
    ├── ModelNotReady           the model exists but is not ready
    ├── Unauthorized            the server requires other credentials
    ├── Overloaded              the server is overloaded
    ├── DeadlineExceeded        the deadline of the call has passed
    ├── ConnectionFailed        the server cannot be reached
    ├── ServerError             the server failed to process the request
    └── ProtocolError           the response violates the protocol

Errors of each third-party library are translated in one place, with `raise ... from`.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar


class GraphkilnError(Exception):
    """Base of all errors of this project.

    Args:
        message: What happened and what was expected.
        hint: What to do; may be empty.
    """

    triton_code: ClassVar[str] = "INTERNAL"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        # An error is sent between processes without `__init__`, whose keywords are not in `args`.
        return type(self).__new__, (type(self), *self.args), self.__dict__

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ManifestError(GraphkilnError):
    """A manifest or another external file is malformed; the message names the path of the bad key."""

    triton_code = "INVALID_ARG"
    exit_code = 2


class RepositoryError(GraphkilnError):
    """A model repository, a version folder or a config.pbtxt is missing or unusable."""

    triton_code = "NOT_FOUND"
    exit_code = 2


class SignatureError(GraphkilnError):
    """Tensors do not match the signature.

    Args:
        message: The mismatch.
        expected: Requirement of the signature.
        got: The given tensor.
    """

    triton_code = "INVALID_ARG"
    exit_code = 2

    def __init__(self, message: str, *, expected: str, got: str, hint: str = "") -> None:
        super().__init__(f"{message}: expected {expected}, got {got}", hint=hint)
        self.expected = expected
        self.got = got


class EngineUnavailable(GraphkilnError):
    """An engine supports the settings, but is not installed or cannot run on this machine.

    Args:
        message: The engine and the reason.
        extra: Extra of the `graphkiln` distribution that installs it, if any.
    """

    triton_code = "UNAVAILABLE"

    def __init__(self, message: str, *, extra: str | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint or (f"pip install 'graphkiln[{extra}]'" if extra else ""))
        self.extra = extra


class LoweringError(GraphkilnError):
    """No configuration of a lowering plan produced a session.

    Args:
        message: The graph.
        attempts: One line per attempt: configuration and reason of failure.
    """

    triton_code = "UNAVAILABLE"

    def __init__(self, message: str, *, attempts: tuple[str, ...], hint: str = "") -> None:
        super().__init__("; ".join((message, *attempts)), hint=hint)
        self.attempts = attempts


class CacheError(GraphkilnError):
    """The artifact cache does not contain the requested artifact and cannot be written."""

    triton_code = "UNAVAILABLE"


class ExecutionError(GraphkilnError):
    """An engine failed while it ran a graph."""


class VerificationError(GraphkilnError):
    """The outputs of a graph changed by more than the policy allows.

    Args:
        message: The change.
        report: The verdict with the measured errors.
        relative_l2: Relative L2 error; infinite if there is none.
    """

    def __init__(self, message: str, *, report: str, hint: str = "", relative_l2: float = math.inf) -> None:
        super().__init__(f"{message}: {report}", hint=hint)
        self.report = report
        self.relative_l2 = relative_l2


class UndecidedError(VerificationError):
    """The samples cannot distinguish a correct graph from a wrong one."""


class ConversionError(GraphkilnError):
    """A source model could not be converted to a saved graph."""

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
        status: HTTP status code or gRPC status name, if the server responded.
        body: Body of the response, if the server responded.
        request_id: Id of the request.
        retry_after_s: Seconds to wait before a retry, if the server specifies them.
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
    """The server has no such model or version."""

    triton_code = "NOT_FOUND"
    exit_code = 2


class ModelNotReady(ClientError):
    """The model exists but is not ready."""

    triton_code = "UNAVAILABLE"


class Unauthorized(ClientError):
    """The server rejects the credentials."""


class Overloaded(ClientError):
    """The server is overloaded."""

    triton_code = "UNAVAILABLE"


class DeadlineExceeded(ClientError):
    """The deadline of the call has passed."""

    triton_code = "CANCELLED"


class ConnectionFailed(ClientError):
    """The server cannot be reached."""

    triton_code = "UNAVAILABLE"


class ServerError(ClientError):
    """The server failed to process the request."""


class ProtocolError(ClientError):
    """The response violates the KServe v2 protocol."""
