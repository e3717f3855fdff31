"""The model class that Triton's Python stub loads: a thin layer between Triton and an executor.

Runs inside the stub process only. Everything that can be done without Triton lives elsewhere: building the session in
`graphkiln_backend.lowering`, executing requests in `graphkiln_backend.triton.executor`.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import triton_python_backend_utils as pb_utils

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.registry import probe
from graphkiln_backend.graph.contract import PARAMETER
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.errors import GraphkilnError, VerificationError
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.graph.text import bounded
from graphkiln_backend.lowering.artifacts import Phases
from graphkiln_backend.lowering.deployment import Deployment
from graphkiln_backend.lowering.importing import convert_if_needed
from graphkiln_backend.lowering.plan import Resources
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.lowering.replaying import Arrays, Replay
from graphkiln_backend.repository.batch_tensors import BatchTensors, read_batch_tensors, read_sequence_tensors
from graphkiln_backend.repository.config import ModelConfigProto, complete_dictionary, parse_json
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.publication import check_published, labels_file_of
from graphkiln_backend.repository.version import read_version_signature
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.resources import stay_on, trim_memory, usable_cores
from graphkiln_backend.triton.environment import (
    lift_memory_limit,
    open_cache,
    overrides_for,
    replay_interval_s,
    shared_folder,
)
from graphkiln_backend.triton.executor import Executor, Refusal
from graphkiln_backend.triton.instance_status import InstanceStatus, StatusFile, record_crash, report_loading
from graphkiln_backend.triton.log import log_to_triton
from graphkiln_backend.triton.metrics import InstanceMetrics
from graphkiln_backend.triton.numpy_functions import NEW_COPY, call_with
from graphkiln_backend.triton.oversized_shapes import needs_protection, protect_arrays, protect_texts
from graphkiln_backend.triton.responses import FAILURES, to_response
from graphkiln_backend.triton.sent_models import note_sent

# Inputs of requests without a copy: arrays that view the memory which Triton shares with its Python stub.
#
# The stub means to hand out views, but makes each array without an owner of its memory, and pybind11 copies what has
# none: 600 kB for an image, once more. So it is given a function in the place of numpy's copy that hands out the array
# itself. `PyObject_SelfIter` does just that: it takes a reference to its first argument and returns it.
#
# Such an array can be read as long as its request lives. It cannot be written, and it lies wherever Triton put it,
# which is seldom where its type should: what a runtime reads is copied once, into the batch (`executor`).
#
# Source: Triton Python backend, `PbTensor`; pybind11, `array::array`, which ends in `PyArray_NewCopy`.


def view_inputs(make_first_array: Callable[[], object]) -> None:
    """Calls what makes the first array of somebody, who from then on makes views of memory instead of copies."""
    call_with(NEW_COPY, ctypes.cast(ctypes.pythonapi.PyObject_SelfIter, ctypes.c_void_p), make_first_array)


# Which instance of its model a process is: by it, `parallel` gives each one cores of its own.


def instance_number(name: str, model: str, groups: Sequence[tuple[str, int]]) -> int:
    """Which instance of its model one is, from 0.

    Args:
        name: Of the instance as Triton gives it: the name of its group and its number within the group.
        model: Name of the model.
        groups: The name of each instance group, empty where it has none of its own (Triton calls it `MODEL_INDEX`
            then), and how many instances it has.

    Source: Triton core, `SetDefaultInstanceCount`, `NormalizeInstanceGroup` and the names of instances.
    """
    own, _, number = name.rpartition("_")
    before = 0
    for index, (group, count) in enumerate(groups):
        if own == (group or f"{model}_{index}") and number.isdecimal():
            return before + int(number)
        before += count
    return 0


# Replays the golden samples while an instance serves: memory, cores and runtimes may fail long after the start.
#
# When the instance is idle, and in any case at times; sample by sample, each under the lock that requests take, so
# that a request waits for one sample at most (of stages that compute parts of a batch: for one batch) and never runs
# beside one. Outputs that the policy refuses are a fault at once. An engine that fails is asked again, because memory
# may be short for a moment; when it fails every time, that is a fault, too. After a request on which the engine
# failed, the samples are replayed at once: they tell a bad request from a device that is lost.

_IDLE_S = 0.2  # without a run for so long, an instance is idle
_LOOK_EVERY_S = 0.05
_RETRY_S = 1.0
_MOST_FAILURES = 3  # an engine that fails so often in a row on samples that it has computed before is broken
_CALM_S = 10.0  # between two replays because of requests that failed: bad requests cost no more than that


class ReplayRecord(Protocol):
    """Where the results of replays are counted."""

    def count_replay(self, *, passed: bool) -> None:
        """Counts a replay that is over."""
        ...


class Replayer(Closeable):
    """Replays golden samples in a thread of its own until it is closed, or finds a fault.

    Args:
        replay: The samples, and the session that serves.
        executor: What runs the requests on the same session.
        lock: Held around each run.
        interval_s: Seconds between two replays, which are put off by as much again while the instance is busy; 0 for
            replays after failures of the engine only.
        instance: Triton's name of the instance; others replay at other times.
        record: Counts the replays.
        on_fault: Told what differed, once; nothing is replayed after that.
    """

    def __init__(
        self,
        replay: Replay,
        executor: Executor,
        *,
        lock: AbstractContextManager[object],
        interval_s: float,
        instance: str,
        record: ReplayRecord,
        on_fault: Callable[[str], None],
    ) -> None:
        self._replay = replay
        self._executor = executor
        self._lock = lock
        self._interval_s = interval_s
        self._first_s = interval_s * random.Random(instance).uniform(0.1, 1)  # noqa: S311 - spreads instances
        self._record = record
        self._on_fault = on_fault
        self._closing = threading.Event()
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="graphkiln-replay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops after the sample that is being computed."""
        self._closing.set()
        self._executor.engine_failed.set()  # wakes the thread
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        wait_s = self._first_s
        while not self._closing.is_set():
            failed = self._executor.engine_failed.wait(wait_s or None)
            self._executor.engine_failed.clear()
            if not (failed or self._failures):
                self._wait_until_idle()
            if self._closing.is_set():
                return
            if fault := self._find_fault():
                self._on_fault(fault)
                self._record.count_replay(passed=False)
                return
            if failed and not self._failures:
                self._closing.wait(_CALM_S)
            wait_s = _RETRY_S if self._failures else self._interval_s

    def _wait_until_idle(self) -> None:
        """Waits until no request came for a while, at most as long as the interval."""
        deadline = time.monotonic() + self._interval_s
        while time.monotonic() - self._executor.last_run_at < _IDLE_S and time.monotonic() < deadline:
            if self._closing.wait(_LOOK_EVERY_S):
                return

    def _find_fault(self) -> str:
        """Replays everything once; returns what is wrong for good, or nothing."""
        try:
            for outputs in self._replay.output_subsets:
                computed = [self._run_sample(sample, outputs) for sample in range(len(self._replay.samples))]
                self._replay.judge(computed)
        except _Closed:
            return ""
        except VerificationError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not end the watch
            return self._count_failure(error)
        self._failures = 0
        self._record.count_replay(passed=True)
        return ""

    def _count_failure(self, error: Exception) -> str:
        self._failures += 1
        _log.warning("golden samples: the engine failed, time %d of %d: %s", self._failures, _MOST_FAILURES, error)
        if self._failures >= _MOST_FAILURES:
            return f"the engine fails on golden samples: {error}"
        self._record.count_replay(passed=False)
        return ""

    def _run_sample(self, sample: int, outputs: tuple[str, ...]) -> Arrays:
        """Runs a sample alone, then leaves the session to requests for as long as that took."""
        if self._closing.is_set():
            raise _Closed
        with self._lock:
            begun = time.monotonic()
            computed = self._replay.run(sample, outputs)
            seconds = time.monotonic() - begun
        self._closing.wait(seconds)
        return computed


class _Closed(Exception):
    """The instance ends while its samples are being replayed."""


if TYPE_CHECKING:
    from graphkiln_backend.triton.sequences import SequenceExecutor

_log = logging.getLogger("graphkiln.triton")


class TritonPythonModel:
    """One instance of one model version.

    Source: Triton Python backend, "Usage" (`initialize`, `execute`, `finalize` and their arguments).
    """

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Completes a configuration from the graph, when Triton asks for it (`serve` normally has done it before).

        Raises:
            TritonModelException: The configuration contradicts the graph, the graph cannot be read, or it is not for
                the requests of the versions that it would be served with.
        """
        from graphkiln_backend.repository.agreement import check_agreement  # `serve` seldom has Triton ask
        from graphkiln_backend.triton.snapshot import serving_versions

        document = config.as_dict()
        log_to_triton(document["name"])
        version = Path(pb_utils.get_model_dir())
        note_sent(version.parent)
        try:
            with open_cache() as cache:
                graph = convert_if_needed(version, cache)
                written, serving = parse_json(json.dumps(document)), serving_versions(document["name"])
                check_agreement(written, version, serving, partial(convert_if_needed, cache=cache))
            signature = read_version_signature(graph, document.get("default_model_filename", ""))
            complete_dictionary(document, signature, labels_file=labels_file_of(version))
        except GraphkilnError as error:
            raise pb_utils.TritonModelException(bounded(f"{document['name']}: {error}")) from error
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Loads and proves the version's graph.

        Raises:
            TritonModelException: The version cannot be served; the message holds the full cause.
        """
        lift_memory_limit()
        note_sent(args["model_repository"])
        instance = args["model_instance_name"]
        with record_crash(instance), report_loading(instance, args["model_name"], int(args["model_version"])):
            self._load(args)

    def _load(self, args: dict[str, str]) -> None:
        begun = time.monotonic()
        phases = Phases()
        phases.seconds["stub start"] = _process_age_s()
        log_to_triton(args["model_name"])
        self._cache = open_cache()
        try:
            with phases.measure("read"):
                device = _device(args)
                document = parse_json(args["model_config"])
                config = ModelConfig.from_protobuf(document, has_gpu=device.is_gpu)
                tensors, sequence = read_batch_tensors(document), read_sequence_tensors(document)
                deployment = _read_deployment(args, _number(args, document, config), config, device, self._cache)
                stay_on(core for place in deployment.places for core in place.cores)
            proven = deployment.build(self._cache)
        except GraphkilnError as error:
            self._cache.close()
            raise pb_utils.TritonModelException(bounded(f"{args['model_name']}: {error}")) from error
        self._session = proven.session
        contract = deployment.version.contract.digest if PARAMETER in config.parameters else ""
        executor = _build_executor(proven, config, tensors, contract)
        self._executor: Executor | SequenceExecutor | Refusal = executor
        if sequence:
            from graphkiln_backend.triton.sequences import SequenceExecutor  # few models have sequences

            self._executor = SequenceExecutor(executor, sequence)
        _prepare_arrays(self._session.signature, batching=config.max_batch_size > 0)
        phases.seconds |= proven.phases
        status = _status(args, proven, phases.seconds, load_ms=(time.monotonic() - begun) * 1e3)
        _log_choices(deployment, proven)
        instance = args["model_instance_name"]
        self._metrics = InstanceMetrics(instance, status, _shared_memory_bytes(), executor.batch_sizes, FAILURES.counts)
        self._status = StatusFile.publish(instance, status)
        self._computing: AbstractContextManager[object] = self._status.computing if self._status else threading.Lock()
        self._replayer = self._start_replayer(proven.replay, executor, instance)
        gc.collect()  # garbage in cycles would be frozen with the rest
        gc.freeze()  # what was loaded lives as long as the instance: no collection need look at it
        trim_memory()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Computes a response for every request; an error in one is in that one's response only.

        Args:
            requests: `pb_utils.InferenceRequest`s of at most `max_batch_size` rows together.

        Returns:
            One `pb_utils.InferenceResponse` per request, in order.
        """
        with self._computing:
            if len(requests) == 1:
                return [to_response(self._executor.execute(requests[0]), requests[0])]
            return list(map(to_response, self._executor.execute_batch(requests), requests))

    def finalize(self) -> None:
        """Frees the session; Triton calls it when the version is unloaded."""
        if self._replayer:
            self._replayer.close()
        self._metrics.close()
        if self._status:
            self._status.close()
        self._session.close()
        self._cache.close()

    def _start_replayer(self, replay: Replay | None, executor: Executor, instance: str) -> Replayer | None:
        if replay is None:
            return None
        return Replayer(
            replay,
            executor,
            lock=self._computing,
            interval_s=replay_interval_s(),
            instance=instance,
            record=self._metrics,
            on_fault=self._refuse,
        )

    def _refuse(self, fault: str) -> None:
        """Computes nothing more: every request gets an error, and the supervisor is told to restart the server."""
        self._executor = Refusal(fault)
        _log.error("golden samples: this instance refuses all requests, because it computes wrongly: %s", fault)
        if self._status:
            try:
                self._status.report_fault(fault)
            except OSError:  # a full disk: an instance that is gone is noticed as well
                os._exit(1)


def _number(args: dict[str, str], document: ModelConfigProto, config: ModelConfig) -> int:
    """Which instance of its model this is."""
    names = [group.name for group in document.instance_group] or [""]
    counts = [group.count for group in config.instance_groups]
    groups = list(zip(names, counts, strict=True))
    return instance_number(args["model_instance_name"], args["model_name"], groups)


def _read_deployment(
    args: dict[str, str], instance: int, config: ModelConfig, device: Device, cache: ArtifactCache
) -> Deployment:
    resources = Resources(
        device=device,
        cores=usable_cores(),
        probe=probe,
        shared_folder=shared_folder(),
        instance=instance,
    )
    model = Path(args["model_repository"])
    graph = convert_if_needed(model / args["model_version"], cache)
    deployment = Deployment.read(graph, config, resources, overrides_for(args["model_name"]))
    check_published(parse_json(args["model_config"]), model, int(args["model_version"]), deployment.version)
    return deployment


def _build_executor(proven: ProvenSession, config: ModelConfig, tensors: BatchTensors, contract: str) -> Executor:
    session = proven.session
    if tensors := tensors.of_graph(session.signature):
        from graphkiln_backend.triton.ragged import RaggedExecutor  # fewer still have ragged batches

        return RaggedExecutor(session, tensors, input_ranks=config.input_ranks, contract=contract)
    return Executor(
        session,
        batching=config.max_batch_size > 0,
        input_ranks=config.input_ranks,
        contract=contract,
        separate=proven.separate,
    )


def _prepare_arrays(signature: Signature, *, batching: bool) -> None:
    """Chooses how the stub makes arrays: views of what is sent, and none of an impossible shape, which fails alone.

    Called before the stub makes its first array.
    """
    first = partial(pb_utils.Tensor, "first", np.zeros(1, np.float32))
    if not needs_protection(signature, batching=batching):
        return view_inputs(first)
    pb_utils.deserialize_bytes_tensor = protect_texts(pb_utils.deserialize_bytes_tensor)
    return view_inputs(partial(protect_arrays, first))


def _device(args: dict[str, str]) -> Device:
    on_gpu = args["model_instance_kind"] == "GPU"
    return Device.gpu(int(args["model_instance_device_id"])) if on_gpu else CPU


def _log_choices(deployment: Deployment, proven: ProvenSession) -> None:
    """Logs the plan, what runs, and what the owner of the model should know."""
    for line in (*deployment.plan.explain().splitlines(), f"runs: {proven.config}: {proven.placement}"):
        _log.info(line)
    for line in (*proven.fallbacks, *proven.notes):
        _log.warning(line)


def _status(
    args: dict[str, str], proven: ProvenSession, phases_s: Mapping[str, float], *, load_ms: float
) -> InstanceStatus:
    return InstanceStatus(
        pid=os.getpid(),
        model=args["model_name"],
        version=int(args["model_version"]),
        engine=proven.config.engine,
        device=str(proven.config.device),
        precision=proven.placement.precision if proven.placement else "unknown",
        nodes=dict(proven.placement.nodes) if proven.placement else {},
        products={str(name): count for name, count in proven.placement.products.items()} if proven.placement else {},
        threads=proven.config.threads,
        load_ms=load_ms,
        warmup_ms=proven.warmup_s * 1e3,
        self_test=proven.self_test.verdict if proven.self_test else "",
        self_test_error=proven.self_test.relative_l2 if proven.self_test else -1.0,
        fallbacks=len(proven.fallbacks),
        phases_ms={name: seconds * 1e3 for name, seconds in phases_s.items()},
    )


def _process_age_s() -> float:
    """How long ago this process was started. Source: proc(5), `starttime` of /proc/self/stat."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def _shared_memory_bytes() -> int:
    """Size of the region that Triton's stub shares with the server: its name is in the stub's own command line."""
    arguments = Path("/proc/self/cmdline").read_bytes().split(b"\0")
    regions = (Path("/dev/shm") / argument.decode() for argument in arguments if b"/" not in argument and argument)
    return sum(region.stat().st_size for region in regions if region.is_file())
