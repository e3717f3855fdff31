"""PyTriton peer: one inference callable behind Triton's dynamic batcher."""

import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from image import BATCH_WAIT_SECONDS, HOST, MAX_BATCH, THREADS, options, preprocess, score, session, top5
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


class Classifier:
    """Classifies JPEGs; a batch is decoded side by side and scored in one run."""

    def __init__(self, path: str) -> None:
        self.model = session(path)
        self.pool = ThreadPoolExecutor(THREADS)

    @batch
    def classify(self, jpeg: np.ndarray) -> dict[str, np.ndarray]:
        """Classify the images of a batch, a [n, 1] array of bytes."""
        rows = score(self.model, self.pool.map(preprocess, jpeg[:, 0]))
        best = [list(zip(*top5(row), strict=True)) for row in rows]
        labels = np.char.encode([names for names, _ in best], "utf-8")
        return {"labels": labels, "scores": np.array([values for _, values in best], np.float32)}


def main() -> None:
    """Serve until SIGTERM."""
    chosen = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = TritonConfig(http_address=HOST, http_port=chosen.port, allow_grpc=False, allow_metrics=False)
    batcher = DynamicBatcher(max_queue_delay_microseconds=round(BATCH_WAIT_SECONDS * 1e6))
    with Triton(config=config) as triton:
        triton.bind(
            model_name="resnet50",
            infer_func=Classifier(chosen.model).classify,
            inputs=[Tensor(name="jpeg", dtype=bytes, shape=(1,))],
            outputs=[
                Tensor(name="labels", dtype=bytes, shape=(5,)),
                Tensor(name="scores", dtype=np.float32, shape=(5,)),
            ],
            config=ModelConfig(max_batch_size=MAX_BATCH, batcher=batcher),
        )
        triton.serve()


if __name__ == "__main__":
    main()
