"""The model class that Triton's Python stub loads: requests in, one response each out.

Runs inside the stub process only. Everything that can be done without Triton lives elsewhere: lowering in
`graphkiln_backend.lowering`, grouping in `graphkiln_backend.triton.batching`.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from graphkiln_backend.engines.cores import usable_cores
from graphkiln_backend.engines.registry import probe
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.lowering.adoption import adopted
from graphkiln_backend.lowering.deployment import Deployment
from graphkiln_backend.lowering.plan import Resources
from graphkiln_backend.lowering.selection import Lowered
from graphkiln_backend.repository.config import complete_dictionary
from graphkiln_backend.repository.overlay import labels_file, version_signature
from graphkiln_backend.triton.batching import Concatenator, Feeds, cut_to_batches, group_by_shape, split_rows
from graphkiln_backend.triton.environment import asked_for, open_cache, shared_folder
from graphkiln_backend.triton.instance_status import InstanceStatus, StatusFile
from graphkiln_backend.triton.log import log_to_triton
from graphkiln_backend.triton.metrics import InstanceMetrics
from graphkiln_backend.triton.tensors import to_array, to_tensor

_log = logging.getLogger("graphkiln.triton")

_WORTH_ASKING_S = 2e-3
"""Asking Triton whether a request was cancelled costs 40 us: not worth it where computing it takes hardly longer."""
_GOOD_SHAPES_KEPT = 1024


class TritonPythonModel:
    """One instance of one model version.

    Source: Triton Python backend, "Usage" (`initialize`, `execute`, `finalize` and their arguments).
    """

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Completes a configuration from the graph, when Triton asks for it (`serve` normally has done it before).

        Raises:
            TritonModelException: The configuration contradicts the graph, or the graph cannot be read.
        """
        document = config.as_dict()
        log_to_triton(document["name"])
        version = Path(pb_utils.get_model_dir())
        try:
            with open_cache() as cache:
                graph = adopted(version, cache)
            signature = version_signature(graph, document.get("default_model_filename", ""))
            complete_dictionary(document, signature, labels_file=labels_file(version.parent))
        except GraphkilnError as error:
            raise pb_utils.TritonModelException(f"{document['name']}: {error}") from error
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Loads and proves the version's graph.

        Raises:
            TritonModelException: The version cannot be served; the message holds the full cause.
        """
        begun = time.monotonic()
        config = json.loads(args["model_config"])
        folder = Path(args["model_repository"]) / args["model_version"]
        log_to_triton(args["model_name"])
        self._cache = open_cache()
        try:
            machine = Resources(
                device=_device(args),
                cores=usable_cores(),
                probe=probe,
                shared_folder=shared_folder(),
            )
            graph = adopted(folder, self._cache)
            deployment = Deployment.read(graph, config, machine, asked_for(args["model_name"]))
            self._lowered = deployment.lower(self._cache)
        except GraphkilnError as error:
            self._cache.close()
            raise pb_utils.TritonModelException(f"{args['model_name']}: {error}") from error
        self._session = self._lowered.session
        self._batching = config["max_batch_size"] > 0
        self._fixed_batch = self._session.signature.fixed_batch if self._batching else None
        self._signature = self._session.signature
        if self._fixed_batch:
            self._signature = self._signature.with_varying_batch()
            _log.warning(
                "%s was saved with a fixed batch of %d: batches are padded or split to it; "
                "convert the model with a dynamic batch to avoid the waste",
                args["model_name"],
                self._fixed_batch,
            )
        names = (*self._signature.inputs, *self._signature.optional_inputs)
        self._input_types = {spec.name: spec.dtype for spec in names}
        self._output_names = [spec.name for spec in self._signature.outputs]
        self._scalars = {spec.name for spec in names if not spec.shape}
        self._concatenator = Concatenator()
        self._good_shapes: set[tuple[object, ...]] = set()
        self._run_s = 0.0
        load_ms = (time.monotonic() - begun) * 1e3
        status = _status(args, self._lowered, load_ms)
        for line in (*deployment.plan.explain().splitlines(), f"runs: {self._lowered.step}: {self._lowered.placement}"):
            _log.info(line)
        for line in (*self._lowered.fallbacks, *self._lowered.notes):
            _log.warning(line)
        instance = args["model_instance_name"]
        self._metrics = InstanceMetrics(instance, status, _shared_memory_bytes())
        self._status = StatusFile.publish(instance, status)
        self._computing: AbstractContextManager[object] = self._status or nullcontext()
        gc.freeze()  # what was loaded lives as long as the instance: collections need not look at it

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answers every request; an error in one is that one's answer only.

        Args:
            requests: `pb_utils.InferenceRequest`s of at most `max_batch_size` rows together.

        Returns:
            One `pb_utils.InferenceResponse` per request, in order.
        """
        with self._computing:
            if len(requests) == 1:
                return [self._answer_alone(requests[0])]
            return self._answer_batch(requests)

    def finalize(self) -> None:
        """Frees the session; Triton calls it when the version is unloaded."""
        self._metrics.close()
        if self._status:
            self._status.close()
        self._session.close()
        self._cache.close()

    # What follows is kept short for a single request: after a run has filled the processor's caches, each line of
    # Python costs ten times what a benchmark of it alone says.

    def _answer_alone(self, request: Any) -> Any:
        try:
            feeds = self._accept(request)
            wanted = self._wanted(request)
            return _response(self._run(feeds, wanted), wanted)
        except GraphkilnError as error:
            return _error_response(error)

    def _answer_batch(self, requests: list[Any]) -> list[Any]:
        responses: list[Any] = [None] * len(requests)
        accepted: list[int] = []
        feeds: list[Feeds] = []
        for index, request in enumerate(requests):
            try:
                feeds.append(self._accept(request))
                accepted.append(index)
            except GraphkilnError as error:
                responses[index] = _error_response(error)
        for group in group_by_shape(feeds) if self._batching else [[index] for index in range(len(feeds))]:
            answers = self._answer_group([feeds[i] for i in group], [requests[accepted[i]] for i in group])
            for i, response in zip(group, answers, strict=True):
                responses[accepted[i]] = response
        return responses

    def _accept(self, request: Any) -> Feeds:
        """A request's tensors by name, as views of Triton's shared memory, validated."""
        if self._run_s > _WORTH_ASKING_S and request.is_cancelled():
            raise _Cancelled("the client cancelled the request before it was computed")
        feeds: dict[str, AnyArray] = {}
        for tensor in request.inputs():
            name = tensor.name()
            feeds[name] = to_array(tensor, self._input_types[name])
        for name in self._scalars:
            if name in feeds:
                feeds[name] = feeds[name].reshape(())
        shapes = tuple([(name, array.dtype.char, array.shape) for name, array in feeds.items()])
        if shapes not in self._good_shapes:
            self._signature.check(feeds)
            if len(self._good_shapes) < _GOOD_SHAPES_KEPT:
                self._good_shapes.add(shapes)
        return feeds

    def _wanted(self, request: Any) -> tuple[str, ...]:
        """The outputs that a request asks for, in the signature's order."""
        requested = request.requested_output_names()
        return tuple([name for name in self._output_names if name in requested])

    def _answer_group(self, feeds: list[Feeds], requests: list[Any]) -> list[Any]:
        """Runs requests of like shapes at once; when that fails, each alone, so that only the guilty one fails."""
        if len(requests) == 1:
            return [self._answer_alone(requests[0])]
        wanted = [self._wanted(request) for request in requests]
        together = tuple([name for name in self._output_names if any(name in names for names in wanted)])
        try:
            outputs = self._run(self._concatenator.join(feeds), together)
            shares = split_rows(outputs, [_rows(request_feeds) for request_feeds in feeds])
        except GraphkilnError:
            return [self._answer_alone(request) for request in requests]
        return [_response(share, names) for share, names in zip(shares, wanted, strict=True)]

    def _run(self, feeds: Feeds, wanted: tuple[str, ...]) -> dict[str, AnyArray]:
        if self._batching:
            self._metrics.observe_batch(_rows(feeds))
        begun = time.monotonic()
        try:
            if self._fixed_batch:
                return self._run_fixed(feeds, wanted, self._fixed_batch)
            return self._session.run(feeds, wanted)
        finally:
            self._run_s = time.monotonic() - begun

    def _run_fixed(self, feeds: Feeds, wanted: tuple[str, ...], size: int) -> dict[str, AnyArray]:
        runs = [
            {name: array[:count] for name, array in self._session.run(batch, wanted).items()}
            for batch, count in cut_to_batches(feeds, size)
        ]
        return {name: np.concatenate([outputs[name] for outputs in runs]) for name in wanted}


class _Cancelled(GraphkilnError):
    triton_code = "CANCELLED"


def _rows(feeds: Feeds) -> int:
    return len(next(iter(feeds.values())))


def _device(args: dict[str, str]) -> Device:
    on_gpu = args["model_instance_kind"] == "GPU"
    return Device.gpu(int(args["model_instance_device_id"])) if on_gpu else CPU


def _status(args: dict[str, str], lowered: Lowered, load_ms: float) -> InstanceStatus:
    return InstanceStatus(
        pid=os.getpid(),
        model=args["model_name"],
        version=int(args["model_version"]),
        engine=lowered.step.engine,
        device=str(lowered.step.device),
        precision=lowered.placement.precision if lowered.placement else "unknown",
        nodes=dict(lowered.placement.nodes) if lowered.placement else {},
        products=dict(lowered.placement.products) if lowered.placement else {},
        threads=lowered.step.threads,
        load_ms=load_ms,
        warmup_ms=lowered.warmup_s * 1e3,
        self_test=lowered.self_test.verdict if lowered.self_test else "",
        self_test_error=lowered.self_test.relative_l2 if lowered.self_test else -1.0,
        fallbacks=len(lowered.fallbacks),
    )


def _shared_memory_bytes() -> int:
    """Size of the region that Triton's stub shares with the server: its name stands in the stub's own command line."""
    arguments = Path("/proc/self/cmdline").read_bytes().split(b"\0")
    regions = (Path("/dev/shm") / argument.decode() for argument in arguments if b"/" not in argument and argument)
    return sum(region.stat().st_size for region in regions if region.is_file())


def _response(outputs: dict[str, AnyArray], names: tuple[str, ...]) -> Any:
    return pb_utils.InferenceResponse([to_tensor(name, outputs[name]) for name in names])


def _error_response(error: GraphkilnError) -> Any:
    code = getattr(pb_utils.TritonError, error.triton_code)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code))
