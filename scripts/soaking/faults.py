"""Faults injected by the soak (processes, model store, disks, requests), and the modes they apply to.

A fault is a context manager: it causes the damage on entry, yields a function that returns true once the damage has
taken effect, and undoes lasting damage on exit. To add a fault, write one and add it to one of the lists of `Fault`.
"""

from __future__ import annotations

import hashlib
import http.client
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import psutil
from onnx import numpy_helper

from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.graph.manifest import Labels, Manifest
from graphkiln_backend.server.edge import find_haproxy
from graphkiln_backend.system import processes
from graphkiln_client import Client
from soaking.models import DIGITS, digit_labels, scaled_graph, write_version
from soaking.service import Certificates, Service
from soaking.traffic import DEADLINE_S, Ledger, NoAnswer, Versions, WrongAnswer

# True once the fault has taken effect, so that recovery can be checked.
Over = Callable[[], bool]


@dataclass(frozen=True, kw_only=True)
class Field:
    """Environment of the faults.

    Attributes:
        service: The service.
        folder: Folder of the soak.
        store: The served model store.
        versions: Versions that may answer.
        ledger: Counts of requests.
        chance: Random generator.
        explicit: Whether the server is in explicit mode.
        numbers: Numbers of added good versions, above those of bad versions.
        live_s: Seconds until each good version was live.
        stops: Exit code and seconds of each SIGTERM.
    """

    service: Service
    folder: Path
    store: Path
    versions: Versions
    ledger: Ledger
    chance: random.Random
    explicit: bool = False
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(20))
    live_s: list[float] = field(default_factory=list)
    stops: list[tuple[int, float]] = field(default_factory=list)

    def publish(self, model: str) -> str:
        """Load a model in explicit mode; return the error, or an empty text."""
        return self.service.load(model) if self.explicit else ""


Inject = Callable[[Field], AbstractContextManager[Over]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A kind of fault.

    Attributes:
        name: Name in the report.
        inject: Context manager of the fault.
        heavy: Whether the whole service restarts; excluded from the short soak of the tests.
        cause: Expected cause in `graphkiln_restarts_total`; empty for no restart.
        hold_s: Duration before it is undone.
        begins_anew: Whether the supervisor restarts, which resets its metrics.
    """

    name: str
    inject: Inject
    heavy: bool = True
    cause: str = ""
    hold_s: float = 0.0
    begins_anew: bool = False


def at_once() -> bool:
    """Condition of faults that take effect immediately."""
    return True


def check_done(trouble: str) -> None:
    """Raise `MeasurementError` if an administrative request returned an error."""
    if trouble:
        raise MeasurementError(trouble)


# Faults of processes.

_ABRUPT_S = 0.5
_PAUSE_S = 8.0
_EXPIRED_S = 10.0  # the edge takes up changed files within five seconds


def signal_one(find: Callable[[Service], list[psutil.Process]], signum: signal.Signals) -> Inject:
    """Send a signal to a random one of some processes, each of which must be replaced."""

    @contextmanager
    def inject(field: Field) -> Iterator[Over]:
        found = find(field.service)
        victim = field.chance.choice(found)
        victim.send_signal(signum)
        yield lambda: is_gone(victim) and len(find(field.service)) >= len(found)

    return inject


@contextmanager
def expired_certificate(field: Field) -> Iterator[Over]:
    """Replace the server's certificate by an expired one, and back."""
    if field.service.reach.certificates:
        with field.service.reach.certificates.expired():
            yield at_once


@contextmanager
def kill_supervisor(field: Field) -> Iterator[Over]:
    """Kill the supervisor and start it, like a service manager."""
    field.service.signal(signal.SIGKILL)
    field.service.wait_end()
    time.sleep(field.chance.random() * _ABRUPT_S)
    field.service.start()
    yield lambda: bool(field.service.servers())


@contextmanager
def terminate(field: Field) -> Iterator[Over]:
    """Stop and start the service under traffic: a rollout."""
    field.stops.append(field.service.stop())
    field.service.start()
    yield lambda: bool(field.service.servers())


@contextmanager
def pause_supervisor(field: Field) -> Iterator[Over]:
    """Suspend the supervisor for some seconds, while its child processes continue."""
    field.service.signal(signal.SIGSTOP)
    try:
        time.sleep(_PAUSE_S)
    finally:
        field.service.signal(signal.SIGCONT)
    yield at_once


def is_gone(process: psutil.Process) -> bool:
    """Return true if a process has exited, including zombies."""
    return not process.is_running() or processes.is_gone(process.pid)


def process_faults() -> list[Fault]:
    """One of each."""
    instance = dict.fromkeys((signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT), "instance_died")
    server = dict.fromkeys((signal.SIGKILL, signal.SIGSEGV), "server_died")
    edge = dict.fromkeys((signal.SIGKILL, signal.SIGSTOP) if find_haproxy() else (), "")
    instance[signal.SIGSTOP], server[signal.SIGSTOP] = "instance_hung", "server_hung"
    targets = (
        ("an instance", Service.stubs, instance),
        ("tritonserver", Service.servers, server),
        ("the edge", Service.edges, edge),
    )
    return [
        *(
            Fault(name=f"{signum.name} to {name}", inject=signal_one(find, signum), cause=cause)
            for name, find, causes in targets
            for signum, cause in causes.items()
        ),
        Fault(name="SIGKILL to the supervisor, start", inject=kill_supervisor, begins_anew=True),
        Fault(name="SIGTERM, start", inject=terminate, begins_anew=True),
        Fault(name="supervisor stopped for 8 s", inject=pause_supervisor, heavy=False),
    ]


# Faults of the model store: bad versions, replaced files, good versions added and removed.

_HOLD_S = 8.0
_LIVE_LIMIT_S = 60.0
_BAD = "9"  # number of bad versions, higher than those of the store, so that they would answer if they went live


def bad_version(model: str, put: Callable[[Path], None]) -> Inject:
    """Add a version that must not go live, and remove it."""

    @contextmanager
    def inject(field: Field) -> Iterator[Over]:
        folder = field.store / model / _BAD
        try:
            put(folder)
            if not field.publish(model) and field.explicit:
                raise MeasurementError(f"the server loaded a bad version of {model}; expected an error")
            yield at_once
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            check_done(field.publish(model))  # if it was loaded in spite of that, it would stay

    return inject


def swapped_file(file: str, change: Callable[[bytes], bytes]) -> Inject:
    """Replace a file of a serving version, and restore it."""

    @contextmanager
    def inject(field: Field) -> Iterator[Over]:
        content = (DIGITS / file).read_bytes()
        replace_file(field.store / "digits" / file, change(content))
        try:
            yield at_once
        finally:
            replace_file(field.store / "digits" / file, content)

    return inject


def good_version(model: str, put: Callable[[Path, int], None]) -> Inject:
    """Add a good version under traffic, wait until it is live, and remove it."""

    @contextmanager
    def inject(field: Field) -> Iterator[Over]:
        version = next(field.numbers)
        folder = field.store / model / str(version)
        field.versions.add(model, version)
        begun = time.monotonic()
        try:
            put(folder, version)
            check_done(field.publish(model))
            _wait_live(field, model, version, live=True)
            field.live_s.append(time.monotonic() - begun)
            field.versions.announce(model, version)
            yield at_once
        finally:
            field.versions.withdraw(model, version)
            shutil.rmtree(folder, ignore_errors=True)
            check_done(field.publish(model))
            _wait_live(field, model, version, live=False)

    return inject


def _wait_live(field: Field, model: str, version: int, *, live: bool) -> None:
    """Wait until a version is live, or no longer live."""
    limit = time.monotonic() + _LIVE_LIMIT_S
    while (field.service.status(f"/v2/models/{model}/versions/{version}/ready") == 200) != live:
        if time.monotonic() > limit:
            raise MeasurementError(f"a good version is {'not ' * live}live after {_LIVE_LIMIT_S:.0f} s")
        time.sleep(0.1)


def put_scaled(folder: Path, version: int) -> None:
    """Write a version of `scaled`."""
    write_version(folder, scaled_graph(version))


def put_other_contract(folder: Path, version: int) -> None:
    """Write a version of `digits` with other labels: each answer must have those of its version."""
    temporary = folder.parents[2] / f"{folder.parent.name}-{folder.name}.tmp"
    shutil.copytree(DIGITS / "1", temporary)
    labels = "".join(f"{label}\n" for label in digit_labels(version)).encode()
    (temporary / "labels.txt").write_bytes(labels)
    manifest = Manifest.read(temporary / "manifest.json")
    if not isinstance(manifest.labels, Labels):
        raise TypeError(f"{DIGITS} describes no labels")
    described = replace(manifest.labels, sha256=hashlib.sha256(labels).hexdigest())
    replace(manifest, labels=described).write(temporary / "manifest.json")
    temporary.rename(folder)


@contextmanager
def unload_load(field: Field) -> Iterator[Over]:
    """Unload a model with the admin key, and load it again."""
    check_done(field.service.unload("several"))
    try:
        yield at_once
    finally:
        check_done(field.service.load("several"))


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(content)
    temporary.rename(path)


def _put_half(folder: Path) -> None:
    """A version of `digits` without golden samples and labels."""
    folder.mkdir()
    for name in ("manifest.json", "model.onnx"):
        shutil.copyfile(DIGITS / "1" / name, folder / name)


def _put_changed(folder: Path, file: str, change: Callable[[bytes], bytes]) -> None:
    """A complete version of `digits` of which one file is not the proven one."""
    folder.mkdir()
    for name in {"manifest.json", "golden.npz", "model.onnx", "labels.txt"} - {file}:
        shutil.copyfile(DIGITS / "1" / name, folder / name)
    replace_file(folder / file, change((DIGITS / "1" / file).read_bytes()))


def _put_unknown_operator(folder: Path) -> None:
    graph = scaled_graph(1)
    graph.graph.node[0].op_type = "NoSuchOperator"
    write_version(folder, graph)


def _put_other_signature(folder: Path) -> None:
    graph = scaled_graph(1)
    graph.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 5
    write_version(folder, graph)


def other_weights(content: bytes) -> bytes:
    """A graph with its largest weight negated: valid but wrong."""
    model = onnx.load_from_string(content)
    largest = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    largest.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(largest), largest.name))
    changed: bytes = model.SerializeToString()
    return changed


def _other_labels(content: bytes) -> bytes:
    return b"\n".join(reversed(content.split())) + b"\n"


def store_faults(*, explicit: bool) -> list[Fault]:
    """One of each that needs no small disk."""
    bad: dict[str, tuple[str, Callable[[Path], None]]] = {
        "garbage": ("scaled", lambda folder: write_version(folder, b"\x08\x09 this is no graph")),
        "cut off": ("digits", lambda folder: write_version(folder, (DIGITS / "1/model.onnx").read_bytes()[:5000])),
        "empty folder": ("scaled", Path.mkdir),
        "half copied": ("digits", _put_half),
        "other weights": ("digits", partial(_put_changed, file="model.onnx", change=other_weights)),
        "other labels": ("digits", partial(_put_changed, file="labels.txt", change=_other_labels)),
        "other preprocessing": (
            "digits",
            partial(_put_changed, file="manifest.json", change=lambda content: content.replace(b"0.5", b"0.4")),
        ),
        "unknown operator": ("scaled", _put_unknown_operator),
        "other signature": ("scaled", _put_other_signature),
    }
    injected: dict[str, Inject] = {
        **{f"bad version: {name}": bad_version(model, put) for name, (model, put) in bad.items()},
        "swapped model.onnx": swapped_file("1/model.onnx", other_weights),
        "swapped labels.txt": swapped_file("1/labels.txt", _other_labels),
        "good version added, removed": good_version("scaled", put_scaled),
        "good version of another contract": good_version("digits", put_other_contract),
    }
    faults = [Fault(name=name, inject=inject, heavy=False, hold_s=_HOLD_S) for name, inject in injected.items()]
    return faults + ([Fault(name="unload, load", inject=unload_load, heavy=False, hold_s=2.0)] if explicit else [])


# Faults of disks: small disks are mounted for the service and filled.

CACHE_BYTES = 32 << 20
TEMPORARY_BYTES = 192 << 20
_FILLER = "filler"


@contextmanager
def full_cache(field: Field) -> Iterator[Over]:
    """Fill the disk of the artifact cache while a good version is added."""
    fill_disk(cache_folder(field.folder))
    try:
        with good_version("scaled", put_scaled)(field) as over:
            yield over
            empty_disk(cache_folder(field.folder))
    finally:
        empty_disk(cache_folder(field.folder))


def full_temporary(inject: Inject) -> Inject:
    """Inject a fault of a process while the disk of temporary files is full."""

    @contextmanager
    def inject_both(field: Field) -> Iterator[Over]:
        fill_disk(field.service.temporary)
        try:
            with inject(field) as over:
                yield over
        finally:
            empty_disk(field.service.temporary)

    return inject_both


FULL_CACHE = Fault(name="cache's disk full, good version", inject=full_cache, heavy=False, hold_s=_HOLD_S)
FULL_TEMPORARY = Fault(
    name="temporary files' disk full, SIGKILL to tritonserver",
    inject=full_temporary(signal_one(Service.servers, signal.SIGKILL)),
    cause="server_died",
    hold_s=4.0,
)
FULL_EDGE = Fault(
    name="temporary files' disk full, SIGKILL to the edge",
    inject=full_temporary(signal_one(Service.edges, signal.SIGKILL)),
    hold_s=4.0,
)


def fill_disk(folder: Path) -> None:
    """Fill the disk of a folder."""
    with (folder / _FILLER).open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass


def empty_disk(folder: Path) -> None:
    """Undo `fill_disk`."""
    (folder / _FILLER).unlink(missing_ok=True)


def cache_folder(folder: Path) -> Path:
    """The artifact cache of the served models."""
    return folder / "cache.mount"


@contextmanager
def small_disk(mount: Path, size_bytes: int) -> Iterator[bool]:
    """Mount a small disk; yield whether mounting is permitted. Otherwise the folder is an ordinary one."""
    mount.mkdir(mode=0o700)
    options = f"size={size_bytes},mode=700"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "soak", str(mount)], check=False, capture_output=True)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "--lazy", str(mount)], check=False)


# Requests that must fail without side effects. Requests that crash servers are reported to their makers, not kept here.

_JSON = {"Content-Type": "application/json"}
_INFER = "/v2/models/scaled/infer"
_SETTLE_S = 0.5  # until a crashed server has exited


def hostile_request(send: Callable[[Service], None]) -> Inject:
    """Send a request that may fail or crash the server, but must not affect other responses."""

    @contextmanager
    def inject(field: Field) -> Iterator[Over]:
        with field.ledger.request("hostile"):
            send(field.service)
        time.sleep(_SETTLE_S)
        yield lambda: bool(field.service.servers())

    return inject


def post(service: Service, path: str, body: bytes, headers: dict[str, str] | None = None) -> int:
    """Send a POST; return the status.

    Raises:
        HTTPException: The response is an error, or incomplete.
        NoAnswer: There was no response.
    """
    connection = service.reach.connect_http(DEADLINE_S)
    try:
        connection.request("POST", path, body, headers or _JSON)
        response = connection.getresponse()
        response.read()
    except TimeoutError as error:
        raise NoAnswer(f"{path} within {DEADLINE_S:.0f} s") from error
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        raise http.client.HTTPException(f"HTTP {response.status}")
    return response.status


def _wrong_shape(service: Service) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 127], "data": [1.0] * 127}
    try:
        post(service, _INFER, json.dumps({"inputs": [tensor]}).encode())
    except http.client.HTTPException as error:
        if str(error) != "HTTP 400":
            raise


def _without_the_key(service: Service) -> None:
    """Send administrative requests without the key."""
    body = json.dumps({"key": "/x", "offset": 0, "byte_size": 1}).encode()
    for path in ("repository/models/scaled/load", "systemsharedmemory/region/x/register", "logging", "trace/setting"):
        try:
            post(service, f"/v2/{path}", body)
        except http.client.HTTPException as error:
            if str(error) not in ("HTTP 401", "HTTP 403"):
                raise
        else:
            raise WrongAnswer(f"{path} was done without the key")


def _half_a_request(service: Service) -> None:
    """Open fifty connections that announce a body and close."""
    for _ in range(50):
        with service.reach.open_http(DEADLINE_S) as connection:
            connection.sendall(f"POST {_INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{{".encode())


def _noise(service: Service) -> None:
    """Send bytes that are neither HTTP nor gRPC to both ports."""
    for port in (service.reach.http_port, service.reach.grpc_port):
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
            connection.sendall(os.urandom(4096))


@contextmanager
def endless_batch(field: Field) -> Iterator[Over]:
    """Send a request whose computation never ends."""
    servers, reach = field.service.servers(), field.service.reach
    rounds = np.array([[2**62]])
    with (
        field.ledger.request("hostile"),
        Client(reach.http_url, timeout_s=DEADLINE_S, max_retries=0, **reach.security) as client,
    ):
        client.model("looped").infer({"rounds": rounds})
    yield lambda: all(map(is_gone, servers)) and bool(field.service.servers())


def hostile_requests() -> list[Fault]:
    """One of each."""
    requests: dict[str, Callable[[Service], None]] = {
        "a shape that the model has not": _wrong_shape,
        "admin requests without the key": _without_the_key,
        "half a request, 50 times": _half_a_request,
        "noise on both ports": _noise,
    }
    return [
        *(Fault(name=f"request: {name}", inject=hostile_request(send)) for name, send in requests.items()),
        Fault(name="a batch that never ends", inject=endless_batch, cause="compute_limit"),
    ]


# Modes of the service, and their faults.

STORE = "store"
# Below the deadline of requests, so that an endless one gets an error first.
LIMIT_FLAGS = ("--compute-limit=10",)


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A mode of the service.

    Attributes:
        name: Name in the report.
        flags: Flags of `graphkiln serve`.
        explicit: Whether it uses explicit mode.
        secure: Whether both protocols use mutual TLS.
    """

    name: str
    flags: tuple[str, ...]
    explicit: bool = False
    secure: bool = False


MODES = (
    Mode(name="polling", flags=("--model-control-mode=poll", "--repository-poll-secs=1", *LIMIT_FLAGS)),
    Mode(
        name="explicit, with mutual TLS",
        flags=("--model-control-mode=explicit", "--load-model=*", *LIMIT_FLAGS),
        explicit=True,
        secure=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Set:
    """Service and faults of a mode.

    Attributes:
        service: The service, not yet started.
        disks: Faults of disks, if they could be mounted.
        notes: Limitations on this machine.
    """

    service: Service
    disks: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def faults(self, mode: Mode, *, heavy: bool) -> list[Fault]:
        """All faults that apply to a mode on this machine."""
        every = [*process_faults(), *store_faults(explicit=mode.explicit), *hostile_requests(), *self.disks]
        if mode.secure:
            every.append(Fault(name="expired certificate", inject=expired_certificate, hold_s=_EXPIRED_S))
        return [fault for fault in every if heavy or not fault.heavy]


@contextmanager
def stage(folder: Path, mode: Mode) -> Iterator[Set]:
    """Create disks, certificates and the service of a mode; end the service afterwards.

    Args:
        folder: Folder of the soak, with the models in `STORE`.
        mode: The mode.
    """
    with ExitStack() as stack:
        disks: list[Fault] = []
        if stack.enter_context(small_disk(cache_folder(folder), CACHE_BYTES)):
            disks.append(FULL_CACHE)
        if stack.enter_context(small_disk(folder / "tmp", TEMPORARY_BYTES)):
            disks += [FULL_TEMPORARY, *([FULL_EDGE] if find_haproxy() else [])]
        certificates = Certificates.issue(folder / "pki") if mode.secure else None
        environment = {"GRAPHKILN_CACHE": str(cache_folder(folder))}
        service = Service(folder, folder / STORE, *mode.flags, certificates=certificates, environment=environment)
        stack.callback(service.end)
        notes = (
            []
            if FULL_CACHE in disks and FULL_TEMPORARY in disks
            else ["no small disks could be mounted: no disk was ever full"]
        )
        yield Set(service=service, disks=disks, notes=notes)
