"""Ray Serve peer: one replica, decoding in threads, batched by serve.batch."""

import asyncio
import signal
import sys
from pathlib import Path

import numpy as np
import ray
from image import BATCH_WAIT_SECONDS, HOST, MAX_BATCH, THREADS, Label, options, preprocess, score, session, top5
from ray import serve
from starlette.requests import Request


@serve.deployment(max_ongoing_requests=8 * MAX_BATCH)
class Classifier:
    """Classifies JPEGs: each is decoded on its own, a batch is scored in one run."""

    def __init__(self, path: str) -> None:
        self.model = session(path)

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=BATCH_WAIT_SECONDS)
    async def score(self, images: list[np.ndarray]) -> list[np.ndarray]:
        """Score a batch; blocking the event loop here lets the next batch fill up."""
        return list(score(self.model, images))

    async def __call__(self, request: Request) -> list[Label] | str:
        """Classify one JPEG, or answer that the model is loaded."""
        if request.url.path == "/health":
            return "ok"
        image = await asyncio.to_thread(preprocess, await request.body())
        return top5(await self.score(image))


def main() -> None:
    """Serve until SIGTERM."""
    chosen = options()
    application = Classifier.bind(str(Path(chosen.model).resolve()))
    paths = {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}}
    ray.init(num_cpus=THREADS, include_dashboard=False, runtime_env=paths)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        serve.start(http_options={"host": HOST, "port": chosen.port})
        serve.run(application, blocking=True, logging_config={"enable_access_log": False})
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
