"""Steps 3 to 5: a Triton server with dynamic batching; callers preprocess while it computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from graphkiln.story.workloads.base import Predictions, Predictor, load_batch
from graphkiln_backend.graph.dtypes import AnyArray


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedWorkload:
    """Requests to a server that runs.

    Attributes:
        url: gRPC address of the server.
        model: Model name.
        callers: Concurrent requests.
        top_k: Answers for each image where the graph ranks its scores; 0 where it does not.
        gradient: Whether the graph has the gradient as an output.
    """

    url: str
    model: str
    callers: int
    top_k: int
    gradient: bool

    @contextmanager
    def open(self) -> Iterator[Predictor]:
        """See `Workload`."""
        from graphkiln_client import Client

        with Client(self.url, timeout_s=600) as client:
            model = client.model(self.model)

            def infer(jpeg: bytes) -> Mapping[str, AnyArray]:
                return model.infer({"INPUT_0": load_batch([jpeg], model.preprocess)})

            def classify(jpeg: bytes) -> object:
                return model.classify(jpeg, top_k=self.top_k)

            def predict(jpegs: Sequence[bytes]) -> Predictions:
                with ThreadPoolExecutor(self.callers) as pool:
                    return Predictions.concatenate(list(pool.map(infer, jpegs)))

            yield Predictor(
                run_one=classify if self.top_k and not self.gradient else infer, predict=predict, callers=self.callers
            )
