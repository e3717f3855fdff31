"""Stages and shards on GPUs: tensors stay where they were computed, and NCCL adds those of shards from GPU to GPU.

All shards of a stage are threads of one process, which has a communicator of all its GPUs (`torch.cuda.nccl`): no other
process need be found, and none can be lost. What a stage hands on is copied to the next one's GPU by the engine.

Not yet run on GPUs: built from the documentation, and tested on the CPU with everything but NCCL itself.

Source: NVIDIA, "NCCL User Guide" (one process, several devices); PyTorch, `torch.cuda.nccl`; ONNX Runtime, "I/O
Binding".
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from graphkiln_backend.engines.base import DeviceSession, Session
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.graph.parallelism import Place
from graphkiln_backend.lowering.parallel.sums import Handing, HostSums, Sums, Tensor

_log = logging.getLogger("graphkiln.lowering")


class DeviceHanding:
    """Between stages on GPUs; see `Handing`."""

    def run(self, session: Session, feeds: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
        """See `Handing.run`; of sessions that `handing_for` has looked at."""
        return _run_on_device(session, feeds, outputs)

    def fetch(self, tensor: Tensor) -> AnyArray:
        """See `Handing.fetch`."""
        array: AnyArray = tensor if isinstance(tensor, np.ndarray) else np.array(tensor.numpy())
        return array


class DeviceSums:
    """Between shards on GPUs; see `Sums`. The same GPUs give the same bits each time, in an order of NCCL's own.

    Raises:
        ImportError: PyTorch is not installed.
    """

    def __init__(self) -> None:
        import torch  # which nothing else in a server needs

        self._torch: Any = torch

    def run(self, session: Session, feeds: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
        """See `Handing.run`; of sessions that `sums_for` has looked at."""
        return _run_on_device(session, feeds, outputs)

    def add(self, partials: Sequence[Tensor]) -> Sequence[Tensor]:
        """See `Sums.add`: each GPU has the sum for itself.

        Raises:
            ExecutionError: NCCL failed: a GPU, or the link between two, is lost.
        """
        tensors = [self._torch.from_dlpack(partial) for partial in partials]
        totals = [self._torch.empty_like(tensor) for tensor in tensors]
        if not tensors[0].numel():
            return totals
        try:
            self._torch.cuda.nccl.all_reduce(tensors, totals)
            for total in totals:
                self._torch.cuda.synchronize(total.device)  # sessions run on streams of their own
        except RuntimeError as error:
            raise ExecutionError(f"NCCL failed: {error}") from error
        return totals

    def fetch(self, tensor: Tensor) -> AnyArray:
        """See `Handing.fetch`."""
        if isinstance(tensor, np.ndarray):  # of the request
            return tensor
        array: AnyArray = self._torch.from_dlpack(tensor).cpu().numpy()
        return array


def handing_for(places: Sequence[Place], sessions: Sequence[Session]) -> Handing:
    """How the stages of a pipeline hand tensors on where they run.

    Args:
        places: Of all of them.
        sessions: Of each.
    """
    if len(sessions) == 1 or not _on_gpus(places):
        return HostSums()
    if reason := _why_not_on_device(sessions):
        _log.warning("what stages hand on passes through the memory of the host, which is slower: %s", reason)
        return HostSums()
    return DeviceHanding()


def sums_for(places: Sequence[Place], sessions: Sequence[Session]) -> Sums:
    """How the shards of a stage are added up where they run.

    Args:
        places: Of the shards.
        sessions: All of them.
    """
    if not _on_gpus(places):
        return HostSums()
    if reason := _why_not_by_nccl() or _why_not_on_device(sessions):
        _log.warning("sums of shards pass through the memory of the host, which is slower than NCCL: %s", reason)
        return HostSums()
    return DeviceSums()


def _on_gpus(places: Sequence[Place]) -> bool:
    return all(place.device.is_gpu for place in places)


def _run_on_device(session: Session, feeds: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
    on_device: Any = session  # a look at each run would cost more than handing a small tensor on
    found: Mapping[str, Tensor] = on_device.run_on_device(feeds, outputs)
    return found


def _why_not_on_device(sessions: Sequence[Session]) -> str:
    """Why tensors cannot stay where they are computed; empty where they can."""
    for session in sessions:
        if not isinstance(session, DeviceSession):
            return f"{type(session).__name__} does not leave its tensors on a device"
        if session.why_not_on_device:
            return session.why_not_on_device
    return ""


def _why_not_by_nccl() -> str:
    """Why NCCL cannot add; empty where it can."""
    if find_spec("torch") is None:
        return "PyTorch is not installed (pip install 'graphkiln[parallel]')"
    try:
        from torch import distributed
    except (ImportError, OSError) as error:  # a library of CUDA that is not there
        return f"PyTorch cannot be used: {error}"
    if not distributed.is_available() or not distributed.is_nccl_available():
        return "this build of PyTorch has no NCCL (pip install a build for CUDA)"
    return ""
