"""Pipelines in Daft and Ray Data that do what `graphkiln score` does: JPEG files to the top-5 of a model.

    python score_peers.py NAME ARGUMENTS    arguments as a JSON object; prints its result as JSON in its last line

The session has the same settings and threads as graphkiln's, and images are decoded by the same function, in a separate
step. Each pipeline imports its library inside its function, so that a process loads only one of them.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import load_sample

# The preprocessing of torchvision's weights.
PREPROCESS = Preprocess(
    resize=232, crop=(224, 224), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), interpolation="bilinear"
)
_TOP = 5
_RAY_BATCH = 8


class Classifier:
    """A session of ONNX Runtime.

    Args:
        graph: Path of the graph.
        threads: Threads of the session.
        settings: Further entries of its configuration.
        first: Path of a file that is made when the first batch arrives; empty for none.
    """

    def __init__(self, graph: str, threads: int, settings: dict[str, str], first: str = "") -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        for name, value in settings.items():
            options.add_session_config_entry(name, value)
        self._session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self._name = self._session.get_inputs()[0].name
        self._first = Path(first) if first else None

    def classify(self, samples: Any) -> dict[str, Any]:
        """Return `indices` and `scores` of the best classes, each `[rows, 5]`."""
        if self._first and not self._first.exists():
            self._first.touch()
        (scores,) = self._session.run(None, {self._name: np.ascontiguousarray(samples)})
        best = np.argsort(-scores, axis=1)[:, :_TOP]
        return {"indices": best, "scores": np.take_along_axis(scores, best, axis=1)}

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Classify a batch of Ray Data."""
        return {"path": batch["path"], **self.classify(batch["sample"])}


def use_daft(
    *, graph: str, source: str, destination: str, cores: int, settings: dict[str, str], batch_rows: int
) -> dict[str, Any]:
    """Score as Daft's manual advises: a function that decodes, a class that holds the session, write."""
    import daft
    from daft import DataType

    @daft.func(return_dtype=DataType.tensor(DataType.float32(), (3, 224, 224)))
    def decode(path: str) -> Any:
        return load_sample(Path(path.removeprefix("file://")), PREPROCESS)

    answer = DataType.struct({"indices": DataType.list(DataType.int64()), "scores": DataType.list(DataType.float32())})

    @daft.cls(max_concurrency=1, use_process=False)
    class Scorer:
        def __init__(self) -> None:
            self._classifier = Classifier(graph, cores, settings)

        @daft.method.batch(return_dtype=answer, batch_size=batch_rows)
        def score(self, samples: Any) -> Any:
            found = self._classifier.classify(samples.to_arrow().to_numpy_ndarray())
            return [
                {"indices": indices, "scores": scores}
                for indices, scores in zip(found["indices"].tolist(), found["scores"].tolist(), strict=True)
            ]

    files = daft.from_glob_path(f"{source}/*.jpg")
    answers = files.select(files["path"], Scorer().score(decode(files["path"])).alias("answer"))
    answers.select(answers["path"], answers["answer"].unnest()).write_parquet(destination)
    return {}


def use_ray_data(*, graph: str, source: str, destination: str, cores: int, settings: dict[str, str]) -> dict[str, Any]:
    """Score as Ray Data's manual shows: read, map, map batches with a class, write.

    Returns:
        `seconds` since the first batch; what is read before the model is loaded is not counted.
    """
    import ray
    import ray.data

    with tempfile.TemporaryDirectory(prefix="graphkiln-ray-") as scratch:
        first = Path(scratch) / "first"
        ray.init(num_cpus=cores, include_dashboard=False, log_to_driver=False, configure_logging=False)
        try:
            ray.data.DataContext.get_current().enable_progress_bars = False
            images = ray.data.read_images(source, mode="RGB", include_paths=True)
            answers = images.map(_preprocess).map_batches(
                Classifier,
                fn_constructor_args=(graph, cores, settings, str(first)),
                batch_size=_RAY_BATCH,
                concurrency=1,
                num_cpus=1,
            )
            answers.write_parquet(destination)
            ended = time.time()
        finally:
            ray.shutdown()
        return {"seconds": ended - first.stat().st_mtime}


def _preprocess(row: dict[str, Any]) -> dict[str, Any]:
    return {"path": row["path"], "sample": load_sample(row["image"], PREPROCESS)}


PEERS: dict[str, Callable[..., dict[str, Any]]] = {"daft": use_daft, "ray-data": use_ray_data}

if __name__ == "__main__":
    result = PEERS[sys.argv[1]](**json.loads(sys.argv[2]))
    print(f"\n{json.dumps(result)}", flush=True)
