"""A dimension of 1 after the batch, inside the server alone, so that one request cannot break a batch of others.

Triton (24.10) keeps the batch size of a request in 32 bits. A shape that begins with 2^32 is therefore a request of 0
rows, which comes without its batch dimension. The dynamic batcher counts it as one row, but the Python backend takes
its next dimension for the rows, finds a batch larger than allowed, and refuses all requests in it; where that dimension
is 0, the request is never responded to. With a dimension of 1 in that place it counts as one row for both, and is
refused by itself: it has a dimension too few. Clients see nothing of it: `reshape` changes only what the backend is
handed.

Source: Triton core, `InferenceRequest::Normalize` and `DynamicBatchScheduler::GetDynamicBatch`; Triton Python backend,
`ModelInstanceState::ProcessRequests`.
"""

from __future__ import annotations

from graphkiln_backend.repository.config import ModelConfigProto


def guard_batch(config: ModelConfigProto) -> None:
    """Adds the dimension to every input of a batched model that needs it.

    Args:
        config: Complete; changed in place.
    """
    if config.max_batch_size < 1:
        return
    for tensor in config.input:
        shape = list(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)
        if shape[:1] == [1] or (tensor.optional and not shape):  # an optional scalar is no row of a batch
            continue
        tensor.reshape.shape[:] = [1, *shape]
