"""Model class that Triton's Python stub loads: an instance from its start to ready, and its requests.

Runs inside the stub process only. Code that needs no Triton is elsewhere: `graphkiln_backend.lowering` builds and
proves the session, `triton.executor` executes requests on it, `triton.replayer` proves it again while it serves.

The stub imports the class from the backend's `model.py`, which `server.run_folder` writes. An instance is ready once
`TritonPythonModel.initialize` returns; then Triton sends it requests.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.registry import probe
from graphkiln_backend.graph.contract import CONTRACTS
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.manifest import sha256_of
from graphkiln_backend.graph.text import bounded
from graphkiln_backend.lowering.deployment import Deployment
from graphkiln_backend.lowering.importing import convert_if_needed
from graphkiln_backend.lowering.plan import Resources
from graphkiln_backend.lowering.proven_session import Phases, ProvenSession
from graphkiln_backend.repository.batch_tensors import BatchTensors, read_batch_tensors, read_sequence_tensors
from graphkiln_backend.repository.config import (
    IDLE_CORES,
    NATIVE,
    ModelConfigProto,
    complete_dictionary,
    parse_json,
    refuse_response_cache,
)
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.publication import check_published, labels_file_of
from graphkiln_backend.repository.version import ModelVersion, check_label_files, read_version_signature
from graphkiln_backend.system.processes import process_age_s
from graphkiln_backend.system.resources import stay_on, trim_memory, usable_cores
from graphkiln_backend.triton.environment import (
    be_ended_first,
    instances_folder,
    lift_memory_limit,
    native_threads,
    open_cache,
    overrides_for,
    record_settings,
    replay_interval_s,
    run_on_idle_cores,
    shared_folder,
)
from graphkiln_backend.triton.executor import Executor, Refusal
from graphkiln_backend.triton.instance_status import InstanceStatus, StatusFile, report_loading
from graphkiln_backend.triton.log import log_to_triton
from graphkiln_backend.triton.metrics import InstanceMetrics
from graphkiln_backend.triton.oversized_shapes import protect_stub
from graphkiln_backend.triton.replayer import Replayer
from graphkiln_backend.triton.request_notes import RequestNotes
from graphkiln_backend.triton.responses import FAILURES, to_response
from graphkiln_backend.triton.rollout_files import assignment_path, read_assignment, tried_model
from graphkiln_backend.triton.sent_models import note_sent

if TYPE_CHECKING:
    from graphkiln_backend.triton.recording import Recorder, RecordingExecutor
    from graphkiln_backend.triton.rollout import Candidate, Rollout
    from graphkiln_backend.triton.sequences import SequenceExecutor

_log = logging.getLogger("graphkiln.triton")


class TritonPythonModel:
    """One instance of one model version.

    Source: Triton Python backend, "Usage" (`initialize`, `execute`, `finalize` and their arguments).
    """

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Complete a configuration from the graph if Triton requests it (normally `serve` has already done so).

        Raises:
            TritonModelException: The configuration contradicts the graph, the graph cannot be read, or versions that
                would be served together accept different requests.
        """
        from graphkiln_backend.repository.agreement import check_agreement  # rarely needed
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
        """Load and prove the version's graph.

        Raises:
            TritonModelException: The version cannot be served; the message contains the cause.
        """
        instance, model, version = args["model_instance_name"], args["model_name"], int(args["model_version"])
        self._is_idle, self._rollout_fault = False, ""
        self._stub_threads = native_threads()
        if tried_model(model):  # a candidate must not cost the version that serves
            be_ended_first()
            self._is_idle = IDLE_CORES in parse_json(args["model_config"]).parameters
        lift_memory_limit()  # inherited from tritonserver, whose limit is meant for requests
        note_sent(args["model_repository"])  # Triton's name for the model's folder
        self._cache = open_cache()
        try:
            with report_loading(instance, model, version):
                self._load(args)
        except (GraphkilnError, OSError) as error:
            self._cache.close()
            raise pb_utils.TritonModelException(bounded(f"{model}: {error}")) from error
        if self._is_idle:  # not while it loads, which has a time limit
            run_on_idle_cores(self._stub_threads)

    def _load(self, args: dict[str, str]) -> None:
        begun = time.monotonic()
        phases = Phases()
        phases.seconds["stub start"] = process_age_s(os.getpid())
        log_to_triton(args["model_name"])
        instance = args["model_instance_name"]

        # Read the version, choose engine and precision, build the session and prove it on the golden samples.
        with phases.measure("read"):
            document = parse_json(args["model_config"])
            refuse_response_cache(document)  # again: Triton may have been told to complete no configuration
            device = _device(args)
            # has_gpu only decides KIND_AUTO, which Triton has already replaced by the instance's device.
            config = ModelConfig.from_protobuf(document, has_gpu=device.is_gpu)
            tensors, sequence = read_batch_tensors(document), read_sequence_tensors(document)  # few models have some
            deployment = _read_deployment(args, document, config, device, cache=self._cache)
            stay_on(core for place in deployment.places for core in place.cores)  # no place: no pinning
        proven = deployment.build(self._cache)
        self._session = proven.session

        # Build the executor of requests. If the server publishes contracts, requests that name another are refused.
        version = deployment.version
        contract = version.contract.digest if CONTRACTS in config.parameters else ""
        executor = _build_executor(proven, config, tensors, contract)
        self._executor: Executor | SequenceExecutor | RecordingExecutor | Refusal = executor
        if sequence:
            from graphkiln_backend.triton.sequences import SequenceExecutor  # needed by few models

            self._executor = SequenceExecutor(executor, sequence)
        protect_stub(pb_utils, self._session.signature, batching=config.max_batch_size > 0)

        # Publish the status, and keep proving the session.
        phases.seconds |= proven.phases
        load_ms = (time.monotonic() - begun) * 1e3
        status = _status(args, document.backend, proven, phases.seconds, load_ms=load_ms)
        kernels = proven.placement or "the kernels are unknown"
        for line in (*deployment.plan.explain().splitlines(), f"runs: {proven.config}: {kernels}", *proven.slower):
            _log.info(line)
        for line in (*proven.failures, *proven.notes):
            _log.warning(line)
        if deployment.settings.seat == NATIVE:
            _log.warning("seat: native has no effect in explicit mode, in which Triton reads the store itself")
        warm_ups = sum(max(1, each.count) for each in document.model_warmup)
        self._recorder = self._record(version, status, warm_ups)
        self._metrics = InstanceMetrics(
            instance,
            status,
            _shared_memory_bytes(),
            executor.batch_sizes,
            FAILURES.counts,
            recorder=self._recorder,
        )
        self._status = StatusFile.publish(instance, status)
        # Held around each batch and each replay; counts them for the supervisor if there is one.
        self._computing: AbstractContextManager[object] = self._status.computing if self._status else threading.Lock()
        self._replayer = proven.replay and Replayer(
            proven.replay,
            executor,
            lock=self._computing,
            interval_s=replay_interval_s(),
            instance=instance,
            metrics=self._metrics,
            on_fault=self._refuse,
        )
        self._rollout: Rollout | Candidate | None = None
        folder = instances_folder()
        if folder:
            computed_by = f"{status.model} {version.stamp()} {status.engine} {status.precision} {status.device}"
            executor.notes = RequestNotes(folder, instance, status.pid, computed_by)
        self._notes = executor.notes
        if self._status and not sequence:
            self._args, self._document, self._contract = args, document, version.contract
            self._assigned = 0
            self._status.computing.on_beat = self._follow_rollout
        gc.collect()  # otherwise garbage in cycles would be frozen, too
        gc.freeze()  # loaded objects live as long as the instance: collections can skip them
        trim_memory()

    def _record(self, version: ModelVersion, status: InstanceStatus, warm_ups: int) -> Recorder | None:
        """Have the executor record requests if the command line asks for it."""
        settings = record_settings()
        if settings is None or tried_model(status.model):  # a candidate answers copies
            return None
        if type(self._executor) is not Executor:
            _log.warning("requests are not recorded: their answers depend on others (sequences, ragged batches)")
            return None
        from graphkiln_backend.triton.recording import Origin, Recorder, RecordingExecutor  # imports pyarrow

        origin = Origin(
            model=status.model,
            version=status.version,
            graph_sha256=version.manifest.sha256 if version.manifest else sha256_of(version.graph_path),
            engine=status.engine,
            precision=status.precision,
        )
        recorder = Recorder(settings, origin)
        self._executor = RecordingExecutor(self._executor, recorder, warm_ups)
        return recorder

    def execute(self, requests: list[Any]) -> list[Any]:
        """Compute a response for every request; an error of one request affects only its own response.

        Args:
            requests: `pb_utils.InferenceRequest`s of at most `max_batch_size` rows together.

        Returns:
            One `pb_utils.InferenceResponse` per request, in order.
        """
        if self._rollout:
            return self._rollout.execute(requests)
        with self._computing:
            if len(requests) == 1:
                return [to_response(self._executor.execute(requests[0]), requests[0])]
            return list(map(to_response, self._executor.execute_batch(requests), requests))

    def finalize(self) -> None:
        """Free the session; Triton calls this when the version is unloaded."""
        if self._replayer:
            self._replayer.close()
        if self._status:
            self._status.computing.on_beat = None
        if self._recorder:  # first: a rollout that ends slowly must not take its time to write
            self._recorder.close()
        if self._rollout:
            self._rollout.close()
        self._metrics.close()
        if self._status:
            self._status.close()
        if self._notes:
            self._notes.close()
        self._session.close()
        self._cache.close()

    def _follow_rollout(self) -> None:
        """Begin, follow or end a part in a rollout, as the supervisor says; called once a second."""
        folder, name = instances_folder(), self._args["model_name"]
        tried = tried_model(name)
        try:
            assigned = assignment_path(folder, tried or name).stat().st_mtime_ns if folder else 0
        except OSError:
            assigned = 0
        try:
            if assigned != self._assigned:
                self._take_part(folder, tried) if folder and assigned else self._leave_rollout()
                self._assigned = assigned
            if self._rollout:
                self._rollout.report()
            if self._is_idle:
                run_on_idle_cores(self._stub_threads)  # threads of runtimes that inherited no class
        except Exception as error:  # noqa: BLE001 - the heartbeat must go on
            if repr(error) != self._rollout_fault:  # a full disk is reported once
                _log.warning("rollout: %s", error, exc_info=error)
            self._rollout_fault = repr(error)
        else:
            self._rollout_fault = ""

    def _take_part(self, folder: Path, tried: str) -> None:
        from graphkiln_backend.triton.rollout import Candidate, Rollout  # while a rollout is active only

        assignment = read_assignment(folder, tried or self._args["model_name"])
        if assignment is None or (not tried and assignment.candidate == int(self._args["model_version"])):
            self._leave_rollout()  # this is the candidate, promoted
        elif self._rollout:
            self._rollout.assign(assignment)
        else:
            name, instance = self._args["model_name"], self._args["model_instance_name"]
            shared: dict[str, Any] = {
                "instance": instance,
                "folder": folder,
                "executor": lambda: self._executor,
                "computing": self._computing,
                "assignment": assignment,
            }
            if tried:
                self._rollout = Candidate(name=name, **shared)
            else:
                self._rollout = Rollout(model=name, config=self._document, contract=self._contract, **shared)

    def _leave_rollout(self) -> None:
        rollout, self._rollout = self._rollout, None
        if rollout:
            rollout.close()

    def _refuse(self, fault: str) -> None:
        """Answer every request with an error from now on, and have the supervisor restart the server."""
        self._executor = Refusal(fault)
        _log.error("replayed samples: this instance computes wrong outputs and refuses all requests: %s", fault)
        if self._status:
            try:
                self._status.report_fault(fault)
            except OSError:  # the disk is full: the supervisor also restarts after an instance has ended
                os._exit(1)


def instance_number(name: str, model: str, groups: Sequence[tuple[str, int]]) -> int:
    """Index of an instance among all instances of its model; it selects the instance's cores.

    Args:
        name: Triton's name of the instance: group name, `_`, number within the group.
        model: Name of the model.
        groups: Name and count of each instance group; Triton names unnamed groups `MODEL_INDEX`.

    Source: Triton core, `SetDefaultInstanceCount`, `NormalizeInstanceGroup` and the names of instances.
    """
    own, _, number = name.rpartition("_")
    before = 0
    for index, (group, count) in enumerate(groups):
        if own == (group or f"{model}_{index}") and number.isdecimal():
            return before + int(number)
        before += count
    return 0


def _read_deployment(
    args: dict[str, str], document: ModelConfigProto, config: ModelConfig, device: Device, *, cache: ArtifactCache
) -> Deployment:
    names = [group.name for group in document.instance_group] or [""]
    groups = list(zip(names, (group.count for group in config.instance_groups), strict=True))
    resources = Resources(
        device=device,
        cores=usable_cores(),
        probe=probe,
        shared_folder=shared_folder(),
        instance=instance_number(args["model_instance_name"], args["model_name"], groups),
    )
    model = Path(args["model_repository"])
    folder = convert_if_needed(model / args["model_version"], cache)
    deployment = Deployment.read(
        folder, config, resources, overrides_for(tried_model(args["model_name"]) or args["model_name"])
    )
    check_published(document, model, int(args["model_version"]), deployment.version)
    check_label_files(document, model)
    return deployment


def _build_executor(proven: ProvenSession, config: ModelConfig, tensors: BatchTensors, contract: str) -> Executor:
    session = proven.session
    if tensors := tensors.of_graph(session.signature):
        from graphkiln_backend.triton.ragged import RaggedExecutor  # needed by few models

        return RaggedExecutor(session, tensors, input_ranks=config.input_ranks, contract=contract)
    return Executor(
        session,
        batching=config.max_batch_size > 0,
        input_ranks=config.input_ranks,
        contract=contract,
        separate=proven.separate,
    )


def _device(args: dict[str, str]) -> Device:
    on_gpu = args["model_instance_kind"] == "GPU"
    return Device.gpu(int(args["model_instance_device_id"])) if on_gpu else CPU


def _status(
    args: dict[str, str], backend: str, proven: ProvenSession, phases_s: Mapping[str, float], *, load_ms: float
) -> InstanceStatus:
    placement = proven.placement
    return InstanceStatus(
        pid=os.getpid(),
        model=args["model_name"],
        version=int(args["model_version"]),
        backend=backend,
        engine=proven.config.runtime,
        device=str(proven.config.device),
        precision=placement.precision if placement else "unknown",
        nodes=dict(placement.nodes) if placement else {},
        products={str(name): count for name, count in placement.products.items()} if placement else {},
        threads=proven.config.threads,
        load_ms=load_ms,
        warmup_ms=proven.warmup_s * 1e3,
        self_test=proven.self_test.verdict if proven.self_test else "",
        self_test_error=proven.self_test.relative_l2 if proven.self_test else -1.0,
        fallbacks=len(proven.failures),
        phases_ms={name: seconds * 1e3 for name, seconds in phases_s.items()},
    )


def _shared_memory_bytes() -> int:
    """Size of the region that Triton's stub shares with the server; the stub's command line names it."""
    arguments = Path("/proc/self/cmdline").read_bytes().split(b"\0")
    regions = (Path("/dev/shm") / argument.decode() for argument in arguments if b"/" not in argument and argument)
    return sum(region.stat().st_size for region in regions if region.is_file())
