"""The model class that Triton's Python stub loads: a thin layer between Triton and an executor.

Runs inside the stub process only. Everything that can be done without Triton lives elsewhere: building the session in
`graphkiln_backend.lowering`, executing requests in `graphkiln_backend.triton.executor`.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.registry import probe
from graphkiln_backend.graph.contract import PARAMETER
from graphkiln_backend.graph.cores import stay_on, usable_cores
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.error_text import bounded
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.lowering.deployment import Deployment
from graphkiln_backend.lowering.importing import convert_if_needed
from graphkiln_backend.lowering.phases import Phases
from graphkiln_backend.lowering.plan import Resources
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.lowering.replaying import Replay
from graphkiln_backend.repository.batch_tensors import BatchTensors, read_batch_tensors
from graphkiln_backend.repository.config import ModelConfigProto, complete_dictionary, parse_json
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.publication import check_published, labels_file_of
from graphkiln_backend.repository.sequence_tensors import read_sequence_tensors
from graphkiln_backend.repository.version import read_version_signature
from graphkiln_backend.triton.environment import open_cache, overrides_for, replay_interval_s, shared_folder
from graphkiln_backend.triton.executor import Executor
from graphkiln_backend.triton.input_views import view_inputs
from graphkiln_backend.triton.instance_number import instance_number
from graphkiln_backend.triton.instance_status import InstanceStatus, StatusFile, report_loading
from graphkiln_backend.triton.load_crash import record_crash
from graphkiln_backend.triton.log import log_to_triton
from graphkiln_backend.triton.memory_limit import lift_memory_limit
from graphkiln_backend.triton.metrics import InstanceMetrics
from graphkiln_backend.triton.oversized_shapes import needs_protection, protect_arrays, protect_texts
from graphkiln_backend.triton.refusal import Refusal
from graphkiln_backend.triton.replayer import Replayer
from graphkiln_backend.triton.responses import FAILURES, to_response
from graphkiln_backend.triton.sent_models import note_sent

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
        gc.freeze()  # what was loaded lives as long as the instance: no collection need look at it

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
