"""Ask a running tritonserver the golden samples of versions, and judge the answers.

This proves what no instance of graphkiln computes: versions of other backends and of the native seat. Samples and
answers are compared in another process, so that the supervisor needs no numpy, and a server that hangs delays nothing.
The requests take the way of a user's: HTTP, Triton's scheduler and batcher, the backend.
"""

from __future__ import annotations

import io
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from http import HTTPStatus
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.graph.errors import (
    ExecutionError,
    GraphkilnError,
    RepositoryError,
    UndecidedError,
    VerificationError,
)
from graphkiln_backend.graph.modules import LazyModule
from graphkiln_backend.graph.text import plain_reason
from graphkiln_backend.repository.version import GOLDEN_FILE
from graphkiln_backend.server.flags import ListenAddress
from graphkiln_backend.server.repository_control import RepositoryControl
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.processes import end_with_parent
from graphkiln_backend.system.resources import usable_cores
from graphkiln_backend.triton.served_model import BusyError, Reshapes, ServedModel

if TYPE_CHECKING:
    from concurrent import futures
    from http import client

    import numpy as np

    from graphkiln_backend.graph.dtypes import AnyArray
    from graphkiln_backend.graph.golden import GoldenSamples
    from graphkiln_backend.graph.signature import Signature
    from graphkiln_backend.proof.policy import Limits
    from graphkiln_backend.repository.config import ModelConfigProto
    from graphkiln_backend.repository.version import ModelVersion
else:
    client, futures = LazyModule("http.client"), LazyModule("concurrent.futures")  # of the process that asks
    np = LazyModule("numpy")

_CONNECT_S = 0.02  # between attempts to reach a server that is starting
_REQUEST_S = 60.0
_ATTEMPTS, _RETRY_S = 3, 1.0  # if the backend fails: memory may be short for a moment
_EARLY_BYTES = 32 << 20  # of compressed samples that are read before the server is up
_IDLE_S = 0.2  # a model without a request for this long is idle
_REQUEST_ID = "graphkiln-golden-sample"  # in Triton's log and traces


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A version to ask.

    Attributes:
        model: Name on the server.
        version: Version number.
        folder: The version's folder, with manifest and golden samples.
        config: File with the configuration that the server has.
    """

    model: str
    version: int
    folder: str
    config: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Judgment of a version's answers.

    Attributes:
        model: Name on the server.
        version: Version number.
        reason: Why the version is refused; empty if its answers are right.
        verdict: Measured errors and limits, if they were compared.
        error: Relative L2 error; -1 if nothing was compared.
        answered: False if the server did not answer, which says nothing about the version.
    """

    model: str = ""
    version: int = 0
    reason: str = ""
    verdict: str = ""
    error: float = -1.0
    answered: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """Way of asking.

    Attributes:
        address: HTTP address of the server.
        headers: Headers for restricted endpoints.
        thorough: Ask every instance at the same time, alone and in the largest batch, and verify the hashes of the
            version's files; otherwise ask one sample after the other, while the model is idle.
        samples: Number of samples to ask, if not `thorough`; 0 for all.
        start_s: Seconds to wait until the server listens.
        idle_s: Seconds to wait until the model is idle, if not `thorough`.
    """

    address: ListenAddress
    headers: dict[str, str]
    thorough: bool = True
    samples: int = 0
    start_s: float = 0.0
    idle_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """Input of the process that asks."""

    targets: tuple[Target, ...]
    way: Way


class Asking(Closeable):
    """Ask targets in another process, which ends when this is closed.

    It begins to read the samples at once, so that it is ready when the server is.

    Args:
        targets: The targets.
        way: Way of asking.

    Attributes:
        answers: Judgments so far, by model and version.
    """

    def __init__(self, targets: Sequence[Target], way: Way) -> None:
        self._open = {(target.model, target.version) for target in targets}
        self.answers: dict[tuple[str, int], Answers] = {}
        # No process of multiprocessing, which would take two more processes and import the whole command line.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # `select` sees every line
        )
        if self._process.stdin:
            task = json.dumps(encode(_Task(targets=tuple(targets), way=way))).encode()
            with suppress(BrokenPipeError), io.BufferedWriter(self._process.stdin) as stdin:  # `wait` reports its end
                stdin.write(task)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the next judgment; return true once all are known.

        Raises:
            EOFError: The process that asks has ended.
        """
        lines = self._process.stdout
        if self._open and lines and select.select([lines], [], [], timeout_s)[0]:
            if not (line := lines.readline()):
                raise EOFError
            answers = decode(Answers, json.loads(line))
            self.answers[answers.model, answers.version] = answers
            self._open.discard((answers.model, answers.version))
        return not self._open

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()


def _ask(task: _Task, report: Callable[[Answers], None]) -> None:
    """Ask all targets of a task, a few at a time."""
    way = task.way
    sizes = accumulate(_golden_bytes(target) for target in task.targets)
    early = [_read(target, way) for target, size in zip(task.targets, sizes, strict=True) if size < _EARLY_BYTES]
    _wait_until_listening(way)

    def judge(number: int) -> Answers:
        target = task.targets[number]
        version = early[number] if number < len(early) else _read(target, way)
        try:
            answers = version if isinstance(version, Answers) else _judge_patiently(target, version, way)
        except (OSError, client.HTTPException) as error:
            answers = Answers(reason=f"the server did not answer a golden sample: {error}", answered=False)
        except GraphkilnError as error:
            answers = Answers(reason=str(error))
        except Exception as error:  # noqa: BLE001 - an unexpected answer is the reason for a refusal
            answers = Answers(reason=f"{type(error).__name__}: {error}")
        return replace(answers, model=target.model, version=target.version)

    # While one version computes, the answers of another are compared.
    with futures.ThreadPoolExecutor(1 if way.idle_s else usable_cores()) as pool:
        for answers in pool.map(judge, range(len(task.targets))):
            report(answers)


def _golden_bytes(target: Target) -> int:
    with suppress(OSError):
        return (Path(target.folder) / GOLDEN_FILE).stat().st_size
    return 0


def _read(target: Target, way: Way) -> ModelVersion | Answers:
    from graphkiln_backend.graph.golden import GoldenSamples
    from graphkiln_backend.graph.manifest import MANIFEST_FILE, Manifest
    from graphkiln_backend.repository.config import read_config
    from graphkiln_backend.repository.publication import check_published
    from graphkiln_backend.repository.version import ModelVersion, read_version

    folder = Path(target.folder)
    try:
        if way.thorough:
            version = read_version(folder)
            check_published(read_config(Path(target.config)), folder.parent, target.version, version)
            return version
        manifest = Manifest.read(folder / MANIFEST_FILE)
        golden = GoldenSamples.read(folder / (manifest.golden.file if manifest.golden else GOLDEN_FILE))
        return ModelVersion(graph_path=folder / manifest.graph_file, manifest=manifest, golden=golden)
    except (GraphkilnError, OSError) as error:
        return Answers(reason=str(error))
    except Exception as error:  # noqa: BLE001 - damaged samples of one version must not affect others
        return Answers(reason=f"{type(error).__name__}: {error}")


def _wait_until_listening(way: Way) -> None:
    """Wait until the server accepts connections, after loading. If it never does, the requests report it."""
    deadline = time.monotonic() + way.start_s
    while time.monotonic() < deadline:
        connection = client.HTTPConnection(*way.address.local_address, timeout=_REQUEST_S)
        try:
            connection.connect()
        except OSError:
            time.sleep(_CONNECT_S)
        else:
            return
        finally:
            connection.close()


def _judge_patiently(target: Target, version: ModelVersion, way: Way) -> Answers:
    """Judge a version, and try again if the backend fails. Wrong answers are final."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return _judge(target, version, way)
        except ExecutionError as error:
            if answers := _look_up(target, way):
                return answers
            if attempt == _ATTEMPTS:
                return Answers(reason=str(error), answered=not isinstance(error, BusyError))
        time.sleep(_RETRY_S)
    raise AssertionError


def _look_up(target: Target, way: Way) -> Answers | None:
    """Return the server's reason why a version is not loaded; None if it is loaded.

    Raises:
        OSError: The server does not list its models.
    """
    rows = RepositoryControl(http=way.address, headers=way.headers).index()
    row = next((row for row in rows if (row.model, row.version) == (target.model, str(target.version))), None)
    if row and row.failed:
        return Answers(reason=plain_reason(row.reason))
    if way.thorough or (row and row.state == "READY"):
        return None
    return Answers(reason="it is not loaded any more", answered=False)  # the user unloads it


def _judge(target: Target, version: ModelVersion, way: Way) -> Answers:
    """Ask a version its golden samples and compare the answers.

    Raises:
        VerificationError: They are wrong.
        OSError, HTTPException: The server does not answer.
    """
    from graphkiln_backend.lowering.acceptance import Replay, check_golden, limits_behind_triton
    from graphkiln_backend.repository.model_config import ModelConfig

    golden = version.golden
    if golden is None:
        raise VerificationError("the samples prove nothing", report="the manifest names none")
    with ServedSession(target, way) as server:
        config = server.config
        if golden.whole and config.max_batch_size > 0:
            raise RepositoryError(
                f"max_batch_size is {config.max_batch_size}, but the graph was verified without batching",
                hint="set max_batch_size: 0 and write dims with all dimensions",
            )
        limits = limits_behind_triton(version)
        if version.adoption:
            _check_decides(golden, limits)
        read = ModelConfig.from_protobuf(config, has_gpu=False)
        if not way.thorough:
            replay = Replay.of_golden(server, golden.first(way.samples or golden.count), limits, version.reading)
            computed = []
            for sample in range(len(replay.samples)):
                server.wait_until_idle(way.idle_s)
                computed.append(replay.run(sample, tuple(replay.reference)))
            verification = replay.judge(computed)
            return Answers(verdict=verification.verdict, error=verification.relative_l2)
        largest = max(1, read.max_batch_size)
        # As many callers as instances, all at once: each instance computes, and requests share batches.
        with futures.ThreadPoolExecutor(read.processes) as callers:
            asked = [
                callers.submit(check_golden, server, golden, limits, largest, version.reading)
                for _ in range(read.processes)
            ]
            verifications = [future.result() for future in asked]
        worst = max(verifications, key=lambda verification: verification.relative_l2)
        return Answers(verdict=worst.verdict, error=worst.relative_l2)


def _check_decides(golden: GoldenSamples, limits: Limits) -> None:
    """Check that samples which another program may have written differ in their outputs.

    Raises:
        UndecidedError: They do not: a graph that ignores its inputs would pass.
    """
    outputs = golden.graph_outputs
    if golden.count > 1:
        from graphkiln_backend.proof.comparison import compare

        others = {name: np.roll(array, 1, axis=0) for name, array in outputs.items()}
        if all(error.within(limits) for error in compare(outputs, others)):
            raise UndecidedError(
                "the samples prove nothing",
                report=f"all have the same outputs, within the limits of {limits.name}",
                hint="adopt the version again, with other samples: graphkiln adopt --samples",
            )


class ServedSession(Closeable):
    """A version behind a server, with the methods of a session that proofs need.

    Args:
        target: The version.
        way: Way of asking.
    """

    def __init__(self, target: Target, way: Way) -> None:
        self._target = target
        self._timeout_s = max(_REQUEST_S, way.start_s)  # a first request may build an engine
        self._model = ServedModel(way.address.local_address, way.headers, target.model, str(target.version))

    def close(self) -> None:
        """Close the connections of all threads."""
        self._model.close()

    @cached_property
    def config(self) -> ModelConfigProto:
        """Configuration that the server has, which may be more complete than the file."""
        from graphkiln_backend.repository.config import parse_json, read_config

        status, _, answer = self._model.send("GET", "/config", timeout_s=self._timeout_s)
        if status == HTTPStatus.OK:
            return parse_json(answer.decode())
        return read_config(Path(self._target.config))  # the user restricts this endpoint, or the version is not loaded

    @cached_property
    def signature(self) -> Signature:
        """Signature of the manifest."""
        from graphkiln_backend.graph.manifest import MANIFEST_FILE, Manifest

        return Manifest.read(Path(self._target.folder) / MANIFEST_FILE).signature

    @cached_property
    def _reshapes(self) -> Reshapes:
        return Reshapes(self.config)

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        """Ask the server, in several requests if there are more rows than it takes in one.

        Raises:
            ExecutionError: It answers with an error.
            OSError, HTTPException: It does not answer.
        """
        from graphkiln_backend.graph.golden import joined

        largest = self.config.max_batch_size
        rows = max(map(len, feeds.values())) if largest > 0 else 1
        step = max(1, largest)
        if rows <= step:
            return self._ask(feeds, outputs)
        starts = range(0, rows, step)
        parts = [{name: array[start : start + step] for name, array in feeds.items()} for start in starts]
        return joined([self._ask(part, outputs) for part in parts])

    def _ask(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None) -> dict[str, AnyArray]:
        specs = {spec.name: spec for spec in self.signature.outputs}
        inputs = {name: self._reshapes.outside(name, array) for name, array in feeds.items()}
        names = [*specs] if outputs is None else outputs
        try:
            found = self._model.infer(inputs, names, request_id=_REQUEST_ID, timeout_s=self._timeout_s)
        except ExecutionError as error:
            raise type(error)(f"the server answers a golden sample with an error: {error}") from error
        inside = {name: self._reshapes.inside(name, array) for name, array in found.items()}
        return {
            name: array.reshape(()) if name in specs and not specs[name].shape and array.shape == (1,) else array
            for name, array in inside.items()
        }

    def wait_until_idle(self, timeout_s: float) -> None:
        """Wait until the model has had no request for a moment. Source: Triton's statistics extension."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status, _, answer = self._model.send("GET", "/stats", timeout_s=self._timeout_s)
            if status != HTTPStatus.OK:
                return
            last_ms = json.loads(answer)["model_stats"][0].get("last_inference", 0)
            idle_s = time.time() - last_ms / 1e3
            if idle_s > _IDLE_S:
                return
            time.sleep(_IDLE_S - max(0.0, idle_s) + 0.01)


def _main() -> None:
    """Read a task from standard input; write a line for each judgment."""
    end_with_parent()
    if os.getppid() != int(sys.argv[1]):  # it ended before the call above
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles Ctrl-C and ends this process

    def report(answers: Answers) -> None:
        sys.stdout.write(f"{json.dumps(encode(answers))}\n")
        sys.stdout.flush()

    _ask(decode(_Task, json.load(sys.stdin)), report)


if __name__ == "__main__":
    _main()
