"""How fast the client is: beside raw tritonclient, beside a loop, beside torchvision."""

from __future__ import annotations

import importlib
import io
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
import torch
from measuring import Segment, measure, photograph
from onnx import TensorProto, helper
from PIL import Image
from served import DIGITS, add_model

from graphkiln.story.server import serving
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import load_sample
from graphkiln_client import Client
from graphkiln_converters.torch_libraries import import_torchvision

SIZES = {"1 kB": 256, "600 kB": 150_528}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IMAGES = 1000


def _mean_graph(path: Path, elements: int) -> None:
    """A graph that costs next to nothing: the mean of a row."""
    node = helper.make_node("ReduceMean", ["X"], ["Y"], axes=[1], keepdims=1)
    declared = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])
        for name, size in (("X", elements), ("Y", 1))
    ]
    graph = helper.make_graph([node], "mean", declared[:1], declared[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)


def _raw(protocol: str, address: str, model: str, sample: Any) -> Callable[[], object]:
    """What a careful user of tritonclient writes: a client for each thread where it is not thread-safe (HTTP)."""
    library: Any = importlib.import_module(f"tritonclient.{protocol}")
    clients = threading.local()
    shared = library.InferenceServerClient(address) if protocol == "grpc" else None

    def ask() -> object:
        client = shared or getattr(clients, "client", None)
        if client is None:
            client = clients.client = library.InferenceServerClient(address)
        tensor = library.InferInput("X", list(sample.shape), "FP32")
        tensor.set_data_from_numpy(sample)
        return client.infer(model, [tensor]).as_numpy("Y")

    return ask


def benchmark_client(rounds: int, seconds: float) -> list[dict[str, object]]:
    """`infer` beside raw tritonclient, and through shared memory: both protocols, 1 and 8 callers, small and large."""
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for elements in SIZES.values():
            _mean_graph(folder / f"{elements}.onnx", elements)
            add_model(folder / "store", f"mean{elements}", folder / f"{elements}.onnx")
        urls = stack.enter_context(serving(folder / "store")).urls
        clients = {url: stack.enter_context(Client(url)) for url in urls}
        shared = {url: stack.enter_context(clients[url].shared_memory()) for url in urls}
        for name, elements in SIZES.items():
            sample = np.random.default_rng(0).normal(size=(1, elements)).astype(np.float32)
            model = f"mean{elements}"
            for url in urls:
                protocol, _, address = url.partition("://")
                asks: dict[str, Callable[[], object]] = {
                    "tritonclient": _raw(protocol, address, model, sample),
                    "graphkiln": _infer(clients[url].model(model), sample),
                    "shared memory": _infer(shared[url].model(model), sample),
                }
                for concurrency in (1, 8):
                    rows += _compared(f"{name} {protocol}, {concurrency}", asks, concurrency, rounds, seconds)
    return rows


def _infer(model: Any, sample: Any) -> Callable[[], object]:
    return lambda: model.infer({"X": sample})


def _compared(
    label: str, asks: dict[str, Callable[[], object]], concurrency: int, rounds: int, seconds: float
) -> list[dict[str, object]]:
    segments = [Segment(name=name, concurrency=concurrency, ask=ask) for name, ask in asks.items()]
    figures = measure(segments, rounds, seconds)
    base = figures["tritonclient"]
    return [
        {
            "model": label,
            "set-up": name,
            "requests/s": round(figure.per_second, 1),
            "ratio": round(figure.per_second / base.per_second, 3),
            "p99 ms": round(figure.p99_ms, 2),
            "p99 ratio": round(figure.p99_ms / base.p99_ms, 2),
        }
        for name, figure in figures.items()
    ]


def benchmark_images(rounds: int, _: float) -> list[dict[str, object]]:
    """Many JPEGs through `classify_many` beside a loop, one JPEG beside torchvision, and the import."""
    return [*_many_images(rounds), *_preprocessing(rounds), _import()]


def _many_images(rounds: int) -> list[dict[str, object]]:
    images = [photograph(500, 375)] * IMAGES
    with serving(DIGITS.parent) as server, Client(server.http_url) as client:
        model = client.model("digits")
        ways: dict[str, Callable[[], object]] = {
            "a loop over classify": lambda: [model.classify(image) for image in images],
            "classify_many": lambda: list(model.classify_many(images)),
            "classify_many, one by one": lambda: list(model.classify_many(images, batch_size=1)),
        }
        return _times(f"{IMAGES} JPEGs", ways, rounds)


def _preprocessing(rounds: int) -> list[dict[str, object]]:
    transforms = import_torchvision().transforms
    torch.set_num_threads(1)
    steps = [transforms.Resize(256), transforms.CenterCrop(224), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    reference = transforms.Compose(steps)
    spec = Preprocess(resize=256, crop=(224, 224), mean=MEAN, std=STD)
    data = photograph(500, 375)
    ways: dict[str, Callable[[], object]] = {
        "torchvision, one thread": lambda: [reference(Image.open(io.BytesIO(data)).convert("RGB")) for _ in range(50)],
        "graphkiln": lambda: [load_sample(data, spec) for _ in range(50)],
    }
    return _times("50 JPEGs to tensors", ways, rounds)


def _times(label: str, ways: dict[str, Callable[[], object]], rounds: int) -> list[dict[str, object]]:
    """Interleaved; the first way is the reference."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, work in ways.items():
            begun = time.perf_counter()
            work()
            if number:
                seconds[name].append(time.perf_counter() - begun)
    medians = {name: median(values) for name, values in seconds.items()}
    base = next(iter(medians.values()))
    return [
        {"model": label, "set-up": name, "s": round(value, 3), "ratio": round(base / value, 2)}
        for name, value in medians.items()
    ]


def _import() -> dict[str, object]:
    """The import of the client beside a start of Python, the fastest of some: files are cached then."""
    seconds = [min(_start(code) for _ in range(5)) for code in ("pass", "import graphkiln_client")]
    return {"model": "import", "set-up": "graphkiln_client", "s": round(seconds[1] - seconds[0], 3), "ratio": ""}


def _start(code: str) -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - begun
