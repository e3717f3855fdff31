"""Transport of tensors between the stages and shards of a split graph, and the sums that join shards.

On the CPU all of them are threads of one process: tensors are read where they were computed, and sums are added there.
On GPUs tensors stay where they were computed; the engine copies what a stage hands to the next one's GPU, and NCCL adds
the partial sums of shards from GPU to GPU. All shards of a stage are threads of one process, which has a communicator
of all its GPUs (`torch.cuda.nccl`): no other process need be found, and none can be lost.

GPUs: not yet run on any; built from the documentation, and tested on the CPU with everything but NCCL itself.

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
from graphkiln_backend.graph.device import Place
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ExecutionError

_log = logging.getLogger("graphkiln.lowering")

Tensor = Any  # an array, or a tensor on a device: whatever `run` returns


class HostTransport:
    """Tensors in the memory of the process."""

    def run(self, session: Session, feeds: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
        """Compute a part in the thread of its stage or shard.

        Args:
            session: Session of the part.
            feeds: Arrays of the request, and what `run` or `add` returned before.
            outputs: Names.
        """
        return session.run(feeds, outputs)

    def add(self, partials: Sequence[Tensor]) -> Sequence[Tensor]:
        """Add equal shapes in the order of the shards into new arrays, and return the sum for each of them."""
        total = partials[0].copy()
        for partial in partials[1:]:
            np.add(total, partial, out=total)
        return [total] * len(partials)

    def fetch(self, tensor: Tensor) -> AnyArray:
        """Return a tensor as an array in the memory of the process."""
        array: AnyArray = tensor
        return array


class DeviceTransport(HostTransport):
    """Tensors on the GPUs that computed them. Sums need PyTorch: the same GPUs give the same bits each time."""

    def run(self, session: Session, feeds: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
        """See `HostTransport.run`; for sessions that `choose_transport` has checked."""
        on_device: Any = session  # a check at each run would cost more than handing a small tensor on
        found: Mapping[str, Tensor] = on_device.run_on_device(feeds, outputs)
        return found

    def add(self, partials: Sequence[Tensor]) -> Sequence[Tensor]:
        """See `HostTransport.add`.

        Raises:
            ExecutionError: NCCL failed: a GPU, or the link between two, is lost.
        """
        import torch  # which nothing else in a server needs

        library: Any = torch
        tensors = [library.from_dlpack(partial) for partial in partials]
        totals = [library.empty_like(tensor) for tensor in tensors]
        if not tensors[0].numel():
            return totals
        try:
            library.cuda.nccl.all_reduce(tensors, totals)
            for total in totals:
                library.cuda.synchronize(total.device)  # sessions run on streams of their own
        except RuntimeError as error:
            raise ExecutionError(f"NCCL failed: {error}") from error
        return totals

    def fetch(self, tensor: Tensor) -> AnyArray:
        """See `HostTransport.fetch`."""
        if isinstance(tensor, np.ndarray):  # of the request
            return tensor
        return np.array((tensor.cpu() if hasattr(tensor, "cpu") else tensor).numpy())


def choose_transport(places: Sequence[Place], sessions: Sequence[Session], *, adds: bool) -> HostTransport:
    """Choose how the stages of a pipeline or the shards of a stage hand tensors to each other.

    Args:
        places: Places of all of them.
        sessions: All of them.
        adds: Whether they are shards, whose partial sums are added.
    """
    if not all(place.device.is_gpu for place in places) or (len(sessions) == 1 and not adds):
        return HostTransport()
    if reason := (_why_not_by_nccl() if adds else "") or _why_not_on_device(sessions):
        what = "sums of shards are added in the memory of the host" if adds else "stages pass on tensors by the host"
        _log.warning("%s, which is slower: %s", what, reason)
        return HostTransport()
    return DeviceTransport()


def _why_not_on_device(sessions: Sequence[Session]) -> str:
    for session in sessions:
        if not isinstance(session, DeviceSession):
            return f"{type(session).__name__} does not leave its tensors on a device"
        if session.why_not_on_device:
            return session.why_not_on_device
    return ""


def _why_not_by_nccl() -> str:
    if find_spec("torch") is None:
        return "PyTorch is not installed (pip install 'graphkiln[parallel]')"
    try:
        from torch import distributed
    except (ImportError, OSError) as error:  # a library of CUDA that is not there
        return f"PyTorch cannot be used: {error}"
    if not distributed.is_available() or not distributed.is_nccl_available():
        return "this build of PyTorch has no NCCL (pip install a build for CUDA)"
    return ""
