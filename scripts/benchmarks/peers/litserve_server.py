"""LitServe peer: one inference worker process, batched by LitServe."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import litserve as ls
import numpy as np
from fastapi import Body
from image import BATCH_WAIT_SECONDS, HOST, MAX_BATCH, THREADS, Label, options, preprocess, score, session, top5

Jpeg = Annotated[bytes, Body(media_type="image/jpeg")]


class Classifier(ls.LitAPI):
    """Classifies JPEGs; a batch is decoded side by side and scored in one run."""

    def __init__(self, path: str) -> None:
        super().__init__(max_batch_size=MAX_BATCH, batch_timeout=BATCH_WAIT_SECONDS)
        self.path = path

    def setup(self, device: str) -> None:  # noqa: ARG002 - as LitServe calls it
        """Load the model in the worker process."""
        self.model = session(self.path)
        self.pool = ThreadPoolExecutor(THREADS)

    def decode_request(self, request: Jpeg) -> bytes:
        """Take the raw body."""
        return request

    def batch(self, inputs: list[bytes]) -> list[np.ndarray]:
        """Preprocess all images of a batch."""
        return list(self.pool.map(preprocess, inputs))

    def predict(self, x: list[np.ndarray]) -> np.ndarray:
        """Score a batch."""
        return score(self.model, x)

    def unbatch(self, output: np.ndarray) -> list[np.ndarray]:
        """Split the scores by image."""
        return list(output)

    def encode_response(self, output: np.ndarray) -> list[Label]:
        """Label the scores of one image."""
        return top5(output)


def stop_on_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl-C does, and its children at once."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def main() -> None:
    """Serve until SIGTERM."""
    chosen = options()
    stop_on_sigterm()
    server = ls.LitServer(Classifier(chosen.model), accelerator="cpu", fast_queue=True)
    server.run(host=HOST, port=chosen.port, log_level="warning", generate_client_file=False)


if __name__ == "__main__":
    main()
