"""The work of each way: opened in a process of its own, then asked for one image after another.

All modules that compute are imported where the work is opened, so that the memory of a process is that of its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from graphkiln.story.requests import Request
from graphkiln_backend.graph.decoding import decode
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import load_sample

if TYPE_CHECKING:
    from graphkiln.story.training_step import TrainingStep
    from graphkiln_backend.engines.base import Session
    from graphkiln_converters.pytorch import TorchModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """What a way answers to images.

    Attributes:
        scores: `[images, classes]`, or the best few of them, `[images, k]`.
        indices: The classes of the best few, `[images, k]`; None where `scores` holds all of them.
        gradients: By the image, `[images, 3, height, width]`, where asked for.
        noise: How much the gradients change with what fp32 can hardly tell, as a share of their length.
    """

    scores: AnyArray
    indices: AnyArray | None = None
    gradients: AnyArray | None = None
    noise: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Work that is open.

    Attributes:
        ask: Answers one JPEG, as a user would have it; thread-safe where there are several callers.
        answers: Answers several, for the proof.
        callers: How many ask at the same time.
        parameter_gradients: One image's gradients by all parameters, in one row, and how much fp32 itself knows of
            them; only of ways that make them.
    """

    ask: Callable[[bytes], object]
    answers: Callable[[Sequence[bytes]], Answers]
    callers: int = 1
    parameter_gradients: Callable[[bytes], tuple[AnyArray, float]] | None = None


class Work(Protocol):
    """A way as plain data that another process can open."""

    def open(self) -> AbstractContextManager[Asked]:
        """Loads all that it needs."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EagerWork:
    """Step 0: a JPEG is preprocessed; forward, backward by the parameters, a second forward; one after the other.

    Attributes:
        request: What is asked for.
        derivative: `OUTPUT:INPUT`, what the gradient is of and by.
    """

    request: Request
    derivative: str

    @contextmanager
    def open(self) -> Iterator[Asked]:
        """See `Work`."""
        with closing(open_model(self.request)) as model:
            from graphkiln.story.training_step import TrainingStep

            step, spec = TrainingStep(model=model), published(model, self.request)
            name = model.inputs[0].name
            yield Asked(
                ask=lambda jpeg: step.repeat({name: _batch([jpeg], spec)}, by_input=self.request.gradient),
                answers=lambda jpegs: self._answers(model, _batch(jpegs, spec)),
                parameter_gradients=lambda jpeg: _eager_gradients(step, {name: _batch([jpeg], spec)}),
            )

    def _answers(self, model: TorchModel, samples: AnyArray) -> Answers:
        from graphkiln_converters.gradient import add_gradient
        from graphkiln_converters.proving import run_in_batches

        model.module.to("cpu")
        feeds = {model.inputs[0].name: samples}
        if not self.request.gradient:
            (scores,) = run_in_batches(model.run, feeds, size=8).values()
            return Answers(scores=scores)
        derived = add_gradient(model, self.derivative)
        scores, gradients = run_in_batches(derived.run, feeds, size=8).values()
        return Answers(
            scores=scores,
            gradients=gradients,
            noise=derived.gradient_noise({name: array[:8] for name, array in feeds.items()}),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticWork:
    """Step 1: as step 0, with a saved training step and a saved forward graph instead of PyTorch.

    Attributes:
        training_graph: Answers, then gradients by the parameters.
        forward_graph: Answers.
        preprocess: How an image becomes the input.
        device: Where it runs.
    """

    training_graph: Path
    forward_graph: Path
    preprocess: Preprocess
    device: Device

    @contextmanager
    def open(self) -> Iterator[Asked]:
        """See `Work`."""
        with open_session(self.training_graph, self.device) as both, open_session(self.forward_graph, self.device) as f:

            def ask(jpeg: bytes) -> None:
                feeds = {"INPUT_0": _batch([jpeg], self.preprocess)}
                both.run(feeds)
                f.run(feeds)

            yield Asked(
                ask=ask,
                answers=lambda jpegs: _session_answers(both, jpegs, self.preprocess, outputs=1),
                parameter_gradients=lambda jpeg: (_gradient_row(both, _batch([jpeg], self.preprocess)), 0.0),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionWork:
    """Step 2: what is needed of the work, one image at a time.

    Attributes:
        graph: Answers, and the gradient by the image where asked for.
        preprocess: How an image becomes the input.
        device: Where it runs.
    """

    graph: Path
    preprocess: Preprocess
    device: Device

    @contextmanager
    def open(self) -> Iterator[Asked]:
        """See `Work`."""
        with open_session(self.graph, self.device) as session:
            yield Asked(
                ask=lambda jpeg: session.run({"INPUT_0": _batch([jpeg], self.preprocess)}),
                answers=lambda jpegs: _session_answers(session, jpegs, self.preprocess, outputs=2),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedWork:
    """Steps 3 to 5: a Triton server with dynamic batching answers; callers preprocess while it computes.

    Attributes:
        url: Of the server, gRPC.
        model: Its name.
        callers: How many ask at the same time.
        top_k: Whether the graph ranks, and images come back with their labels.
        gradient: Whether it answers the gradient, too.
    """

    url: str
    model: str
    callers: int
    top_k: int
    gradient: bool

    @contextmanager
    def open(self) -> Iterator[Asked]:
        """See `Work`."""
        from graphkiln_client import Client

        with Client(self.url, timeout_s=600) as client:
            model = client.model(self.model)

            def infer(jpeg: bytes) -> Mapping[str, AnyArray]:
                return model.infer({"INPUT_0": _batch([jpeg], model.preprocess)})

            def classify(jpeg: bytes) -> object:
                return model.classify(jpeg, top_k=self.top_k)

            yield Asked(
                ask=classify if self.top_k and not self.gradient else infer,
                answers=lambda jpegs: self._answers(infer, jpegs),
                callers=self.callers,
            )

    def _answers(self, infer: Callable[[bytes], Mapping[str, AnyArray]], jpegs: Sequence[bytes]) -> Answers:
        with ThreadPoolExecutor(self.callers) as pool:
            return _joined(list(pool.map(infer, jpegs)))


def open_model(request: Request) -> TorchModel:
    """The source model.

    Raises:
        ConversionError: It is no PyTorch model with one image as its input, or nobody says how to preprocess.
    """
    from graphkiln_converters.pytorch import TorchModel
    from graphkiln_converters.sources.base import SourceOptions, open_source

    shape = (3, request.image_size, request.image_size)
    model = open_source(request.source, SourceOptions(weights=request.weights, shapes={"": shape}))
    if not isinstance(model, TorchModel) or len(model.inputs) != 1 or model.keywords:
        model.close()
        raise ConversionError(
            f"the story of {request.source} cannot be told: it begins with a PyTorch model of one image",
            hint="torchvision:ARCH, timm:ARCH, or python:FILE:FACTORY",
        )
    published(model, request)
    return model


def published(model: TorchModel, request: Request) -> Preprocess:
    """How an image becomes the model's input.

    Raises:
        ConversionError: Nobody says.
    """
    if request.preprocess is not None:
        return decode(Preprocess, request.preprocess, path="preprocess")
    if model.preprocess is None:
        raise ConversionError(
            f"nobody says how an image becomes the input of {request.source}",
            hint='give --preprocess \'{"resize": 256, "crop": [224, 224], "mean": [...], "std": [...]}\'',
        )
    return model.preprocess


@contextmanager
def open_session(graph: Path, device: Device) -> Iterator[Session]:
    """A session as the product builds it by default: ONNX Runtime in fp32, all cores."""
    from graphkiln_backend.engines.cores import usable_cores
    from graphkiln_backend.engines.registry import load_engine, probe
    from graphkiln_backend.lowering.plan import Resources, plan
    from graphkiln_backend.lowering.settings import Settings

    (step,) = plan(Settings(), Resources(device=device, cores=usable_cores(), probe=probe)).candidates
    with load_engine(step.engine).build(graph, step) as session:
        yield session


def _batch(jpegs: Sequence[bytes], spec: Preprocess) -> AnyArray:
    if len(jpegs) == 1:
        return load_sample(jpegs[0], spec)[np.newaxis]
    return np.stack([load_sample(jpeg, spec) for jpeg in jpegs])


def _eager_gradients(step: TrainingStep, feeds: Mapping[str, AnyArray]) -> tuple[AnyArray, float]:
    """The gradients, and what they change when the image changes by as little as fp32 can tell."""
    from graphkiln_converters.gradient import perturb

    step.model.module.to("cpu")
    steady = _row(step.run(feeds)[1])
    generator = np.random.default_rng(0)
    other = _row(step.run({name: perturb(array, generator) for name, array in feeds.items()})[1])
    return steady, float(np.linalg.norm(np.subtract(other, steady)) / np.linalg.norm(steady))


def _row(gradients: Mapping[str, AnyArray]) -> AnyArray:
    return np.concatenate([gradients[name].ravel() for name in sorted(gradients)])


def _gradient_row(session: Session, samples: AnyArray) -> AnyArray:
    found = session.run({"INPUT_0": samples})
    ending = "_gradient"
    return _row({name.removesuffix(ending): array for name, array in found.items() if name.endswith(ending)})


def _session_answers(session: Session, jpegs: Sequence[bytes], spec: Preprocess, *, outputs: int) -> Answers:
    """One after the other, as they are measured."""
    rows: list[Any] = []
    for jpeg in jpegs:
        found = list(session.run({"INPUT_0": _batch([jpeg], spec)}).values())
        rows.append({f"OUTPUT_{number}": array for number, array in enumerate(found[:outputs])})
    return _joined(rows)


def _joined(rows: Sequence[Mapping[str, AnyArray]]) -> Answers:
    """The answers to all images by the names of the saved graph: scores, their indices, and the gradient."""
    arrays = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    return Answers(scores=arrays["OUTPUT_0"], indices=arrays.get("INDEX_0"), gradients=arrays.get("OUTPUT_1"))
