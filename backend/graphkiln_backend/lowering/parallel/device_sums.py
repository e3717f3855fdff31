"""Sums of shards on GPUs: tensors stay where they were computed, and NCCL adds them from GPU to GPU.

All shards of a stage are threads of one process, which has a communicator of all its GPUs (`torch.cuda.nccl`): no other
process need be found, and none can be lost.

Not yet run on GPUs: built from the documentation, and tested on the CPU with everything but NCCL itself.

Source: NVIDIA, "NCCL User Guide" (one process, several devices); PyTorch, `torch.cuda.nccl`.
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
from graphkiln_backend.lowering.parallel.sums import HostSums, Sums, Tensor

_log = logging.getLogger("graphkiln.lowering")


class DeviceSums:
    """On GPUs; see `Sums`. Results are the same in each run on the same GPUs: NCCL adds in an order of its own.

    Raises:
        ImportError: PyTorch is not installed.
    """

    def __init__(self) -> None:
        import torch  # half a second, which nothing else in a server needs

        self._torch: Any = torch

    def run(self, session: Session, feeds: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
        """See `Sums.run`; of sessions that `sums_for` has looked at."""
        on_device: Any = session  # a look at each run would cost more than handing a small tensor on
        found: Mapping[str, Tensor] = on_device.run_on_device(feeds, outputs)
        return found

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
        """See `Sums.fetch`."""
        if isinstance(tensor, np.ndarray):  # of the request
            return tensor
        array: AnyArray = self._torch.from_dlpack(tensor).cpu().numpy()
        return array


def sums_for(places: Sequence[Place], sessions: Sequence[Session]) -> Sums:
    """How the shards of a stage are added up where they run.

    Args:
        places: Of the shards.
        sessions: All of them.
    """
    if not all(place.device.is_gpu for place in places):
        return HostSums()
    if reason := _why_not(sessions):
        _log.warning("sums of shards pass through the memory of the host, which is slower than NCCL: %s", reason)
        return HostSums()
    return DeviceSums()


def _why_not(sessions: Sequence[Session]) -> str:
    """Why NCCL cannot add the shards; empty where it can."""
    if find_spec("torch") is None:
        return "PyTorch is not installed (pip install 'graphkiln[parallel]')"
    try:
        from torch import distributed
    except (ImportError, OSError) as error:  # a library of CUDA that is not there
        return f"PyTorch cannot be used: {error}"
    if not distributed.is_available() or not distributed.is_nccl_available():
        return "this build of PyTorch has no NCCL (pip install a build for CUDA)"
    for session in sessions:
        if not isinstance(session, DeviceSession):
            return f"{type(session).__name__} does not leave its tensors on a device"
        if session.why_not_on_device:
            return session.why_not_on_device
    return ""
