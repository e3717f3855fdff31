"""MLServer peer: one inference worker process, batched by MLServer's adaptive batching."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from image import BATCH_WAIT_SECONDS, HOST, MAX_BATCH, THREADS, options, preprocess, score, session, top5
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import Base64Codec, NumpyCodec, StringCodec
from mlserver.settings import ModelParameters
from mlserver.types import InferenceRequest, InferenceResponse


class Classifier(MLModel):
    """Classifies JPEGs; a batch is decoded side by side and scored in one run."""

    async def load(self) -> bool:
        """Load the model in the worker process."""
        self.model = session(self.settings.parameters.uri)
        self.pool = ThreadPoolExecutor(THREADS)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Classify the images of a batch."""
        jpegs = Base64Codec.decode_input(payload.inputs[0])
        best = [top5(row) for row in score(self.model, self.pool.map(preprocess, jpegs))]
        labels = StringCodec.encode_output("labels", [name for row in best for name, _ in row])
        labels.shape = [len(best), 5]
        values = np.array([[value for _, value in row] for row in best], np.float32)
        scores = NumpyCodec.encode_output("scores", values)
        return InferenceResponse(model_name=self.name, outputs=[labels, scores])


async def serve(path: str, port: int) -> None:
    """Serve until SIGTERM."""
    settings = Settings(
        host=HOST,
        http_port=port,
        grpc_port=0,
        metrics_endpoint=None,
        parallel_workers=1,
        debug=False,
    )
    model = ModelSettings(
        name="resnet50",
        implementation="mlserver_server.Classifier",
        parameters=ModelParameters(uri=path),
        max_batch_size=MAX_BATCH,
        max_batch_time=BATCH_WAIT_SECONDS,
    )
    await MLServer(settings).start([model])


def main() -> None:
    """Read the options and serve."""
    chosen = options()
    asyncio.run(serve(chosen.model, chosen.port))


if __name__ == "__main__":
    main()
