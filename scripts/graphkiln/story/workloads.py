"""Workloads of the variants, and the worker process in which each runs.

A workload is a picklable `functools.partial` of a function below. Heavy modules are imported when a workload is opened,
so that the memory of a worker is that of its variant.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphkiln.bench.generator import Throughput, in_turn, measure_throughput
from graphkiln.story.variants import StoryRequest
from graphkiln_backend.graph.decoding import decode
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError, GraphkilnError, MeasurementError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import load_sample
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.processes import safe_path

if TYPE_CHECKING:
    from graphkiln.story.training_step import TrainingStep
    from graphkiln_backend.engines.base import Session
    from graphkiln_converters.sources.pytorch import TorchModel

_GRADIENT_SUFFIX = "_gradient"
_BATCH = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictions:
    """Predictions of a variant for some images.

    Attributes:
        scores: All scores `[images, classes]`, or the top k `[images, k]`.
        indices: Classes of the top k, `[images, k]`, or None.
        gradients: Gradients with respect to the image, `[images, 3, height, width]`, or None.
        noise: Relative L2 change of the gradients for a change of the image by fp32's precision.
    """

    scores: AnyArray
    indices: AnyArray | None = None
    gradients: AnyArray | None = None
    noise: float = 0.0

    def write(self, path: Path) -> None:
        """Write scores, gradients and noise as .npz, without indices."""
        gradients = np.zeros(0) if self.gradients is None else self.gradients
        np.savez(path, scores=self.scores, gradients=gradients, noise=np.float64(self.noise))

    @classmethod
    def read(cls, path: Path) -> Predictions:
        """Read a file of `write`."""
        with np.load(path) as arrays:
            gradients = arrays["gradients"]
            return cls(
                scores=arrays["scores"], gradients=gradients if gradients.size else None, noise=float(arrays["noise"])
            )

    @classmethod
    def concatenate(cls, outputs: Sequence[Mapping[str, AnyArray]]) -> Predictions:
        """Join the outputs of several runs: scores, top-k indices and gradient by their names in the graph."""
        arrays = {name: np.concatenate([row[name] for row in outputs]) for name in outputs[0]}
        return cls(scores=arrays["OUTPUT_0"], indices=arrays.get("INDEX_0"), gradients=arrays.get("OUTPUT_1"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictor:
    """An open workload.

    Attributes:
        run_one: Processes one JPEG; thread-safe if there are several callers.
        predict: Computes predictions for several JPEGs, for the proof.
        callers: Number of concurrent callers of `run_one`.
        parameter_gradients: Computes the gradients of one image by all parameters, `[values]`, and their noise; or
            None.
    """

    run_one: Callable[[bytes], object]
    predict: Callable[[Sequence[bytes]], Predictions]
    callers: int = 1
    parameter_gradients: Callable[[bytes], tuple[AnyArray, float]] | None = None


Workload = Callable[[], AbstractContextManager[Any]]


def load_batch(jpegs: Sequence[bytes], preprocess: Preprocess) -> AnyArray:
    """Preprocess images into one array, `[images, ...]`."""
    if len(jpegs) == 1:
        return load_sample(jpegs[0], preprocess)[np.newaxis]
    return np.stack([load_sample(jpeg, preprocess) for jpeg in jpegs])


def flatten_gradients(gradients: Mapping[str, AnyArray]) -> AnyArray:
    """Join gradients by parameter name into one row, `[values]`, sorted by name."""
    return np.concatenate([gradients[name].ravel() for name in sorted(gradients)])


def parameter_gradients_of(outputs: Mapping[str, AnyArray]) -> AnyArray:
    """Join the outputs `NAME_gradient` of a saved training step into one row, `[values]`, sorted by name."""
    named = {name: array for name, array in outputs.items() if name.endswith(_GRADIENT_SUFFIX)}
    return flatten_gradients({name.removesuffix(_GRADIENT_SUFFIX): array for name, array in named.items()})


def open_source_model(request: StoryRequest) -> TorchModel:
    """Open the source model; the caller closes it.

    Raises:
        ConversionError: It is not a PyTorch model with a single image as input, or its preprocess spec is unknown.
    """
    from graphkiln_converters.recipe import Recipe
    from graphkiln_converters.sources.base import open_source
    from graphkiln_converters.sources.pytorch import TorchModel

    shape = (3, request.image_size, request.image_size)
    model = open_source(Recipe(source=request.source, weights=request.weights, shape=("x".join(map(str, shape)),)))
    if not isinstance(model, TorchModel) or len(model.inputs) != 1 or model.keywords:
        model.close()
        raise ConversionError(
            f"a story needs a PyTorch model with a single image as input, got {request.source}",
            hint="torchvision:ARCH, timm:ARCH, or python:FILE:FACTORY",
        )
    source_preprocess(model, request)
    return model


def source_preprocess(model: TorchModel, request: StoryRequest) -> Preprocess:
    """Return the requested preprocess spec, or that of the source.

    Raises:
        ConversionError: There is no preprocess spec.
        ManifestError: The requested spec is invalid.
    """
    if request.preprocess is not None:
        return decode(Preprocess, request.preprocess, path="preprocess")
    if model.preprocess is None:
        raise ConversionError(
            f"{request.source} has no preprocess spec for images",
            hint='give --preprocess \'{"resize": 256, "crop": [224, 224], "mean": [...], "std": [...]}\'',
        )
    return model.preprocess


@contextmanager
def open_session(graph: Path, device: Device) -> Iterator[Session]:
    """Build a session with the default settings: ONNX Runtime in fp32, all cores."""
    from graphkiln_backend.engines.registry import load_engine, probe
    from graphkiln_backend.lowering.plan import Resources, plan
    from graphkiln_backend.lowering.settings import Settings
    from graphkiln_backend.system.resources import usable_cores

    (config,) = plan(Settings(), Resources(device=device, cores=usable_cores(), probe=probe)).candidates
    with load_engine(config.engine).build(graph, config) as session:
        yield session


def _predict_one_by_one(
    session: Session, jpegs: Sequence[bytes], preprocess: Preprocess, *, outputs: int
) -> Predictions:
    """Predict image by image, as measured; `outputs` is 1 for scores, 2 with the gradient."""
    rows = []
    for jpeg in jpegs:
        arrays = list(session.run({"INPUT_0": load_batch([jpeg], preprocess)}).values())
        rows.append({f"OUTPUT_{number}": array for number, array in enumerate(arrays[:outputs])})
    return Predictions.concatenate(rows)


@contextmanager
def eager_workload(request: StoryRequest, derivative: str) -> Iterator[Predictor]:
    """Step 0: preprocessing, forward, backward by the parameters, and a second forward in eager PyTorch."""
    from graphkiln.story.training_step import TrainingStep

    with closing(open_source_model(request)) as model:
        step, preprocess = TrainingStep(model=model), source_preprocess(model, request)
        (graph_input,) = model.inputs

        def feeds(jpegs: Sequence[bytes]) -> dict[str, AnyArray]:
            return {graph_input.name: load_batch(jpegs, preprocess)}

        yield Predictor(
            run_one=lambda jpeg: step.repeat(feeds([jpeg]), by_input=request.gradient),
            predict=lambda jpegs: _predict_eagerly(model, feeds(jpegs), derivative if request.gradient else ""),
            parameter_gradients=lambda jpeg: _parameter_gradients(step, feeds([jpeg])),
        )


def _predict_eagerly(model: TorchModel, feeds: Mapping[str, AnyArray], derivative: str) -> Predictions:
    from graphkiln_converters.gradient import add_gradient
    from graphkiln_converters.sources.base import run_in_batches

    model.module.to("cpu")
    if not derivative:
        (scores,) = run_in_batches(model.run, feeds, size=_BATCH).values()
        return Predictions(scores=scores)
    derived = add_gradient(model, derivative)
    scores, gradients = run_in_batches(derived.run, feeds, size=_BATCH).values()
    noise = derived.gradient_noise({name: array[:_BATCH] for name, array in feeds.items()})
    return Predictions(scores=scores, gradients=gradients, noise=noise)


def _parameter_gradients(step: TrainingStep, feeds: Mapping[str, AnyArray]) -> tuple[AnyArray, float]:
    """Compute the gradients, and their relative change for a change of the image by fp32's precision."""
    from graphkiln_converters.gradient import perturb

    step.model.module.to("cpu")
    steady = flatten_gradients(step.run(feeds)[1])
    generator = np.random.default_rng(0)
    changed = flatten_gradients(step.run({name: perturb(array, generator) for name, array in feeds.items()})[1])
    return steady, float(np.linalg.norm(np.subtract(changed, steady)) / np.linalg.norm(steady))


@contextmanager
def static_workload(
    training_graph: Path, forward_graph: Path, preprocess: Preprocess, device: Device
) -> Iterator[Predictor]:
    """Step 1: as step 0 with saved graphs instead of PyTorch, one image at a time."""
    with open_session(training_graph, device) as training, open_session(forward_graph, device) as forward:

        def run_one(jpeg: bytes) -> None:
            feeds = {"INPUT_0": load_batch([jpeg], preprocess)}
            training.run(feeds)
            forward.run(feeds)

        def parameter_gradients(jpeg: bytes) -> tuple[AnyArray, float]:
            return parameter_gradients_of(training.run({"INPUT_0": load_batch([jpeg], preprocess)})), 0.0

        yield Predictor(
            run_one=run_one,
            predict=lambda jpegs: _predict_one_by_one(training, jpegs, preprocess, outputs=1),
            parameter_gradients=parameter_gradients,
        )


@contextmanager
def session_workload(graph: Path, preprocess: Preprocess, device: Device) -> Iterator[Predictor]:
    """Step 2: a session in the process, one image at a time, with the gradient by the image if requested."""
    with open_session(graph, device) as session:
        yield Predictor(
            run_one=lambda jpeg: session.run({"INPUT_0": load_batch([jpeg], preprocess)}),
            predict=lambda jpegs: _predict_one_by_one(session, jpegs, preprocess, outputs=2),
        )


@contextmanager
def served_workload(url: str, model: str, callers: int, *, top_k: int, gradient: bool) -> Iterator[Predictor]:
    """Steps 3 to 5: requests to a running Triton server; callers preprocess while it computes.

    Args:
        url: gRPC address of the server.
        model: Model name.
        callers: Number of concurrent requests.
        top_k: Number of classes per image for a graph with an embedded top-k, otherwise 0.
        gradient: True if the graph has the gradient as an output.
    """
    from graphkiln_client import Client

    with Client(url, timeout_s=600) as client:
        served = client.model(model)

        def infer(jpeg: bytes) -> Mapping[str, AnyArray]:
            return served.infer({"INPUT_0": load_batch([jpeg], served.preprocess)})

        def classify(jpeg: bytes) -> object:
            return served.classify(jpeg, top_k=top_k)

        def predict(jpegs: Sequence[bytes]) -> Predictions:
            with ThreadPoolExecutor(callers) as pool:
                return Predictions.concatenate(list(pool.map(infer, jpegs)))

        # `classify` would not request the gradient, and would measure less work.
        yield Predictor(run_one=classify if top_k and not gradient else infer, predict=predict, callers=callers)


_EXIT_S = 30


class Worker(Closeable):
    """A process that opens a workload and calls its methods, which isolates its memory, threads and faults."""

    def __init__(self, workload: Workload, title: str) -> None:
        self._title = title
        context = multiprocessing.get_context("spawn")  # a fork would inherit this process's memory
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(workload, theirs), daemon=True)
        with safe_path():
            self._process.start()
        theirs.close()
        self._is_open = False

    def wait_open(self) -> None:
        """Wait until the workload is open.

        Raises:
            GraphkilnError: It cannot be opened, or the process ended.
        """
        if not self._is_open:
            self._receive()
            self._is_open = True

    def send(self, method: str, *arguments: Any) -> None:
        """Send a call, which the process executes after those sent before.

        Raises:
            MeasurementError: The process ended.
        """
        with self._checked_connection():
            self._connection.send((method, *arguments))

    def receive(self) -> Any:
        """Wait for the result of the first call whose result was not received yet.

        Raises:
            GraphkilnError: The workload cannot be opened, the call failed, or the process ended.
        """
        self.wait_open()
        return self._receive()

    def _receive(self) -> Any:
        with self._checked_connection():
            succeeded, value = self._connection.recv()
        if succeeded:
            return value
        raise value if isinstance(value, GraphkilnError) else MeasurementError(value)

    def call(self, method: str, *arguments: Any) -> Any:
        """Send a call and wait for its result.

        Raises:
            GraphkilnError: The call failed, or the process ended.
        """
        self.send(method, *arguments)
        return self.receive()

    def predict(self, jpegs: Sequence[bytes]) -> Predictions:
        """Compute predictions for images.

        Raises:
            MeasurementError: The workload failed, or the process ended.
        """
        predictions: Predictions = self.call("predict", tuple(jpegs))
        return predictions

    def parameter_gradients(self, jpeg: bytes) -> tuple[AnyArray, float]:
        """Compute the gradients of the parameters, and their noise; see `Predictor`.

        Raises:
            MeasurementError: The workload failed, or the process ended.
        """
        gradients, noise = self.call("parameter_gradients", jpeg)
        return gradients, noise

    def measure(self, jpegs: Sequence[bytes], seconds: float) -> Throughput:
        """Measure the workload's throughput.

        Raises:
            MeasurementError: The workload failed, or the process ended.
        """
        throughput: Throughput = self.call("measure", tuple(jpegs), seconds)
        return throughput

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid or 0

    def close(self) -> None:
        """End the process, also during a call."""
        self._process.terminate()
        self._process.join(_EXIT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()

    @contextmanager
    def _checked_connection(self) -> Iterator[None]:
        """Convert a broken connection to an error with the exit code of the process."""
        try:
            yield
        except (EOFError, ConnectionError) as error:
            self._process.join(_EXIT_S)
            raise MeasurementError(
                f"the process of '{self._title}' ended with code {self._process.exitcode}",
                hint="a negative code is a signal, often -9 for a lack of memory; resume with --resume",
            ) from error


def _serve(workload: Workload, connection: Connection) -> None:
    """Run the worker process: open the workload, then execute calls until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C, and ends this process
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # removes temporary files
    try:
        with workload() as predictor:
            connection.send((True, None))
            while True:
                name, *arguments = connection.recv()
                connection.send(_execute(predictor, name, arguments))
    except (EOFError, ConnectionError):
        return
    except Exception as error:  # noqa: BLE001 - raised by the parent
        connection.send((False, _describe(error)))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the process ends; an exit in its last functions is a traceback


def _execute(predictor: Any, name: str, arguments: list[Any]) -> tuple[bool, object]:
    """Execute a call; return (True, value) or (False, error)."""
    try:
        if name == "measure":
            jpegs, seconds = arguments
            call = in_turn([partial(predictor.run_one, jpeg) for jpeg in jpegs])
            return True, measure_throughput(call, predictor.callers, seconds)
        return True, getattr(predictor, name)(*arguments)
    except Exception as error:  # noqa: BLE001 - raised by the parent
        return False, _describe(error)


def _describe(error: Exception) -> GraphkilnError | str:
    """Return our own errors as they are, and others as their traceback."""
    if isinstance(error, GraphkilnError):
        return error
    return "".join(traceback.format_exception(error)).strip()
