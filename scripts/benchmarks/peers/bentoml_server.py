"""BentoML peer: one service worker, batched by BentoML's adaptive batching."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import bentoml
from image import HOST, MAX_BATCH, THREADS, Label, options, score, session, tensor, top5
from PIL.Image import Image

HERE = Path(__file__).parent
MODEL_VARIABLE = "PEER_MODEL"


@bentoml.service(workers=1, logging={"access": {"enabled": False}})
class Classifier:
    """Classifies JPEGs; a batch is decoded side by side and scored in one run."""

    def __init__(self) -> None:
        self.model = session(os.environ[MODEL_VARIABLE])
        self.pool = ThreadPoolExecutor(THREADS)

    @bentoml.api(batchable=True, max_batch_size=MAX_BATCH)
    def classify(self, images: list[Image]) -> list[list[Label]]:
        """Classify the images of a batch."""
        return [top5(row) for row in score(self.model, self.pool.map(tensor, images))]


def main() -> None:
    """Become `bentoml serve`, which starts its worker and stops it on SIGTERM."""
    chosen = options()
    os.environ[MODEL_VARIABLE] = str(Path(chosen.model).resolve())
    os.environ["BENTOML_DO_NOT_TRACK"] = "True"
    os.chdir(HERE)
    serve = ["-m", "bentoml", "serve", "bentoml_server:Classifier"]
    where = ["--host", HOST, "--port", str(chosen.port)]
    os.execv(  # noqa: S606 - this process becomes the server
        sys.executable, [sys.executable, *serve, *where]
    )


if __name__ == "__main__":
    main()
