"""Interfaces of protocols and transports, their values, ownership of connections, and size limits of responses.

A protocol has a `Wire`, which builds requests and parses responses without I/O, and two transports, which send them:
one blocks, one is for event loops. Both are written as coroutines (see `graphkiln_client.client.run`).

Dataclasses that are created for every request are not frozen, because that takes three times as long.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import time
import uuid
import zlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import InvalidInput, ProtocolError
from graphkiln_backend.graph.files import KIB, MIB, format_size

T = TypeVar("T")

VARIABLE = "GRAPHKILN_MAX_RESPONSE_MIB"
# Size limits of responses, in case the server is faulty or not a Triton server.
INFER_LIMIT = 256 * MIB  # responses with tensors; overridden by the environment variable
JSON_LIMIT = 64 * MIB  # tensors in JSON, and the JSON header of binary tensors
DOCUMENT_LIMIT = 16 * MIB  # metadata, configurations, statistics and the repository index
HEAD_LIMIT = 256 * KIB  # all HTTP headers

_MAX_JSON_CONTAINERS = 4_000_000  # an empty list takes 2 bytes in the response and 80 in memory
_CHUNK_OVERHEAD = 8  # bytes per chunk of HTTP's chunked encoding
_MAX_GZIP_MEMBERS = 16
_WBITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
_MADV_WIPEONFORK = 18  # not among the constants of `mmap`


@dataclass(kw_only=True, slots=True)
class Deadline:
    """Deadline of a call including its retries.

    Attributes:
        timeout_s: Seconds from the start of the call.
        at: Time of the deadline on the clock of `time.monotonic()`.
    """

    timeout_s: float
    at: float

    @classmethod
    def after(cls, timeout_s: float) -> Self:
        """Create a deadline `timeout_s` seconds from now."""
        return cls(timeout_s=timeout_s, at=time.monotonic() + timeout_s)

    @property
    def remaining_s(self) -> float:
        """Remaining seconds; 0 after the deadline."""
        left = self.at - time.monotonic()
        return left if left > 0 else 0.0  # half the time of `max`


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedTensor:
    """Location of a tensor in a registered shared-memory region.

    Attributes:
        size_bytes: Size of an input, or maximum size of an output, in bytes.
        shape: Shape of an input; empty for an output.
    """

    region: str
    offset: int
    size_bytes: int
    datatype: DType
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestedOutput:
    """Options of a requested output.

    Attributes:
        class_count: Number of classes for the classification extension; 0 for the plain tensor.
        shared: Location in shared memory; None to return the output in the response.
    """

    class_count: int = 0
    shared: SharedTensor | None = None


PLAIN = RequestedOutput()


@dataclass(kw_only=True, slots=True)
class InferRequest:
    """One inference request.

    Attributes:
        inputs: Arrays or shared-memory locations by input name.
        outputs: Requested outputs by name; empty for all outputs as plain tensors.
        request_id: Id that the server returns and logs.
        contract: Digest of the expected contract; the server rejects the request for any other. Empty to accept any.
    """

    model: str
    version: str
    inputs: Mapping[str, AnyArray | SharedTensor]
    outputs: Mapping[str, RequestedOutput] = field(default_factory=dict)
    request_id: str = ""
    contract: str = ""

    def is_shared(self, output: str, datatype: str) -> bool:
        """Check whether an output is returned in shared memory.

        Raises:
            ProtocolError: It is, with another datatype than requested.
        """
        shared = self.outputs[output].shared if output in self.outputs else None
        if shared and shared.datatype != datatype:
            raise ProtocolError(f"the response has output '{output}' of type {datatype} instead of {shared.datatype}")
        return shared is not None


@dataclass(kw_only=True, slots=True)
class InferResponse:
    """One inference response.

    Attributes:
        outputs: Arrays by output name, as read-only views of the response.
        shared_shapes: Shapes of the outputs in shared memory, by name.
    """

    model: str
    version: str
    outputs: Mapping[str, AnyArray]
    shared_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class Call(Generic[T]):
    """One call, encoded for a protocol.

    Attributes:
        read: Parses the transport's response; raises only `ClientError` and its subclasses.
    """

    request: Any
    read: Callable[[Any], T]


class Wire(Protocol):
    """Encodes the calls of KServe v2 and of Triton's extensions for one protocol. Does no I/O."""

    def ready(self) -> Call[bool]:
        """Check that every model of the server is ready."""
        ...

    def live(self) -> Call[bool]:
        """Check that the server responds."""
        ...

    def server_metadata(self) -> Call[dict[str, Any]]:
        """Get the name, version and extensions of the server, in the form of the JSON protocol."""
        ...

    def model_metadata(self, model: str, version: str) -> Call[dict[str, Any]]:
        """Get the KServe v2 metadata of a model, in the form of the JSON protocol."""
        ...

    def model_config(self, model: str, version: str) -> Call[dict[str, Any]]:
        """Get the Triton configuration of a model, in the form of the JSON protocol."""
        ...

    def model_statistics(self, model: str, version: str) -> Call[dict[str, Any]]:
        """Get the statistics of a model, or of all models if `model` is empty, in the form of the JSON protocol."""
        ...

    def repository_index(self) -> Call[list[dict[str, Any]]]:
        """List the model versions in the repository index with their states."""
        ...

    def load(self, model: str, config: str = "") -> Call[None]:
        """Load or reload a model; a non-empty `config` (JSON) overrides its configuration."""
        ...

    def unload(self, model: str) -> Call[None]:
        """Start unloading a model."""
        ...

    def register_region(self, name: str, key: str, size_bytes: int) -> Call[None]:
        """Register a shared-memory region."""
        ...

    def region_status(self, name: str) -> Call[None]:
        """Check that a shared-memory region is registered; fail if not."""
        ...

    def unregister_region(self, name: str) -> Call[None]:
        """Unregister a shared-memory region."""
        ...

    def infer(self, request: InferRequest, timeout_s: float, *, binary: bool) -> Call[InferResponse]:
        """Run a model.

        Args:
            request: The request.
            timeout_s: Remaining seconds of the call, sent to the server.
            binary: Send tensors as bytes after the JSON header; gRPC always does so.
        """
        ...


class Transport(Protocol):
    """A connection to one server. Thread-safe, or task-safe in its event loop.

    Methods raise only `ClientError` and its subclasses.
    """

    @property
    def wire(self) -> Wire:
        """Encoder of this transport's calls."""
        ...

    async def send(self, call: Call[T], deadline: Deadline) -> T:
        """Send a call once and return the parsed response."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait between retries."""
        ...

    async def compute(self, work: Callable[[], T]) -> T:
        """Run CPU-bound work without blocking other calls."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


class _Process:
    """Random digits that identify this process; a forked child draws its own.

    A mark is on a page that the kernel clears in a child, even if C code forks. `os.getpid` would cost a system call
    for each request. Source: madvise(2), MADV_WIPEONFORK.
    """

    def __init__(self) -> None:
        self._digits = ""
        self._mark: mmap.mmap | bytearray
        try:
            self._mark = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._mark.madvise(_MADV_WIPEONFORK)
        except OSError:  # not Linux
            self._mark = bytearray(1)
            os.register_at_fork(after_in_child=self.forget)

    def digits(self) -> str:
        """Return 16 hexadecimal digits."""
        if not self._mark[0]:
            self._digits = uuid.uuid4().hex[:16]
            self._mark[0] = 1
        return self._digits

    def forget(self) -> None:
        """Have the next call of `digits` draw others."""
        self._mark[0] = 0


PROCESS = _Process()
_Owner = tuple[str, asyncio.AbstractEventLoop | None]


class Owned(Generic[T]):
    """Connections that belong to the process, and to the event loop, that opened them.

    A forked child inherits the sockets of its parent, and one would read responses to the other. So every process opens
    its own, and neither uses nor closes those of its parent: closing may change shared state, such as a selector. There
    is no lock, because a child may inherit it locked.

    Args:
        open_new: Opens connections.
        close: Closes them.
        name: Name of the client in errors.
        in_loop: Whether connections belong to an event loop, too.
    """

    def __init__(
        self, open_new: Callable[[], T], close: Callable[[T], Coroutine[Any, Any, None]], name: object, *, in_loop: bool
    ) -> None:
        self._open_new = open_new
        self._close = close
        self._name = name
        self._in_loop = in_loop
        self._by_owner: dict[_Owner, T] = {}
        self.is_closed = False

    def get(self) -> T | None:
        """Return the connections of this process and event loop; None if `open` has to open them."""
        return self._by_owner.get(self._owner())

    async def open(self) -> T:
        """Open connections for this process and event loop.

        Raises:
            InvalidInput: They have been closed, or cannot be opened.
        """
        if self.is_closed:
            raise InvalidInput(f"the client of {self._name} is closed")
        await self._close_those(lambda loop: loop is not None and loop.is_closed())
        return self._by_owner.setdefault(self._owner(), self._open_new())  # atomic: threads agree on one

    async def close(self) -> None:
        """Close the connections of this process; other running event loops close theirs soon after."""
        self.is_closed = True
        await self._close_those(lambda _: True)

    async def _close_those(self, selects: Callable[[asyncio.AbstractEventLoop | None], bool]) -> None:
        process, current = self._owner()
        for owner in [owner for owner in list(self._by_owner) if owner[0] == process and selects(owner[1])]:
            owned, loop = self._by_owner.pop(owner, None), owner[1]
            if owned is None:
                continue
            if loop is current or loop is None or loop.is_closed():
                await self._close(owned)
            else:
                asyncio.run_coroutine_threadsafe(self._close(owned), loop)

    def _owner(self) -> _Owner:
        return PROCESS.digits(), asyncio.get_running_loop() if self._in_loop else None


class Blocking:
    """Waiting and computing in a transport that blocks the calling thread."""

    async def sleep(self, seconds: float) -> None:
        """See `Transport.sleep`."""
        time.sleep(seconds)

    async def compute(self, work: Callable[[], T]) -> T:
        """See `Transport.compute`."""
        return work()


class InEventLoop:
    """Waiting and computing in a transport for event loops."""

    async def sleep(self, seconds: float) -> None:
        """See `Transport.sleep`."""
        await asyncio.sleep(seconds)

    async def compute(self, work: Callable[[], T]) -> T:
        """See `Transport.compute`."""
        return await asyncio.to_thread(work)


def infer_limit() -> int:
    """Return the maximum size in bytes of a response with tensors.

    Raises:
        InvalidInput: The environment variable is not a number.
    """
    text = os.environ.get(VARIABLE, "")
    if text and not (text.isdecimal() and 0 < int(text) < 1 << 20):
        raise InvalidInput(f"{VARIABLE} must be a number of MiB, got {text[:40]!r}")
    return int(text) * MIB if text else INFER_LIMIT


def too_large(limit_bytes: int) -> ProtocolError:
    """Create the error for a response over its size limit."""
    hint = f"to allow larger responses, set {VARIABLE} or use shared memory"
    return ProtocolError(
        f"the response is larger than {format_size(limit_bytes)} and was not read to its end",
        hint="" if limit_bytes in (HEAD_LIMIT, JSON_LIMIT, DOCUMENT_LIMIT) else hint,
    )


def check_outputs(names: Sequence[str], request: InferRequest) -> None:
    """Check that a response has each requested output once, and no other.

    Args:
        names: Names of the outputs in the response.
        request: The request; without requested outputs, any names are accepted.

    Raises:
        ProtocolError: An output is missing, not requested or repeated, or there are no outputs.
    """
    found = dict.fromkeys(names)
    wanted = request.outputs or found
    if names and len(found) == len(names) and found.keys() == wanted.keys():
        return
    faults = [f"lacks output '{name}'" for name in wanted if name not in found]
    faults += [f"has output '{name}', which was not requested" for name in found if name not in wanted]
    faults += [f"has output '{name}' twice" for name in found if names.count(name) > 1]
    raise ProtocolError(
        f"the response {', '.join(faults) or 'has no outputs'}",
        hint="Triton's response cache answers like this: leave response_cache out of config.pbtxt",
    )


def check_json(body: bytes) -> None:
    """Reject JSON that would take a multiple of its size in memory.

    Raises:
        ProtocolError: The document is too large, or has too many lists and objects.
    """
    if len(body) > JSON_LIMIT:
        raise too_large(JSON_LIMIT)
    if body.count(b"[") + body.count(b"{") > _MAX_JSON_CONTAINERS:
        raise ProtocolError(f"the response's JSON has more than {_MAX_JSON_CONTAINERS} lists and objects")


def decompress(body: bytes, encoding: str, limit_bytes: int) -> bytes:
    """Decompress the body of a response.

    Args:
        body: The body.
        encoding: `Content-Encoding` header; empty for none.
        limit_bytes: Maximum size of the result in bytes.

    Raises:
        ProtocolError: The encoding is unknown, the body is damaged, or the result is too large.
    """
    if encoding in ("", "identity"):
        return body
    try:
        return _inflate(body, _WBITS[encoding], limit_bytes)
    except (KeyError, EOFError, zlib.error) as error:
        raise ProtocolError(f"the response cannot be decompressed as {encoding[:40]}: {str(error)[:80]}") from error


def _inflate(body: bytes, wbits: int, limit_bytes: int) -> bytes:
    is_gzip, size = wbits == _WBITS["gzip"], 0  # gzip allows several members, one after the other
    parts: list[bytes] = []
    while body or not (parts or is_gzip):
        inflater = zlib.decompressobj(wbits)
        parts.append(inflater.decompress(body, limit_bytes - size + 1))
        size += len(parts[-1])
        if size > limit_bytes or len(parts) > _MAX_GZIP_MEMBERS:
            raise too_large(limit_bytes)
        if not inflater.eof:
            raise EOFError("the data is incomplete")
        body = inflater.unused_data.lstrip(b"\0") if is_gzip else b""
    return parts[0] if len(parts) == 1 else b"".join(parts)


class BoundedBody:
    """Body of a response that is being received, of at most `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        self.size = 0
        self._limit = limit_bytes
        self._content = bytearray()

    def expect(self, length: str | None) -> None:
        """Check the `Content-Length` header.

        Raises:
            ProtocolError: The length is over the limit.
        """
        if length and length.isdecimal() and (len(length) > 18 or int(length) > self._limit):
            raise too_large(self._limit)

    def add(self, piece: bytes) -> None:
        """Add a piece. Pieces beyond the limit are only counted, for `check`."""
        self.size += len(piece)
        if self.size <= self._limit:
            self._content += piece

    def check(self, received: int = 0) -> None:
        """Check the size of the body.

        Args:
            received: Number of received bytes, including headers and chunk framing.

        Raises:
            ProtocolError: The body or its framing is too large.
        """
        if self.size > self._limit or received > HEAD_LIMIT + (1 + _CHUNK_OVERHEAD) * self.size:
            raise too_large(self._limit)

    def content(self) -> bytes:
        """Return the body."""
        return bytes(self._content)
