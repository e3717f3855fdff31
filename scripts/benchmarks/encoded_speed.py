"""JPEG to top-5: decoded by the server, by our client, by FastAPI with Pillow; and the decoders alone.

All servers run from the beginning to the end and take turns; the callers share the machine's cores with them, so every
way has the same cores in total. FastAPI serves the exported graph in ONNX Runtime, in int8 the one that our conversion
quantized; our server serves the same graph with its preprocessing inside, in ONNX Runtime, too.
"""

from __future__ import annotations

import io
import itertools
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from inputs import CACHE, exported_graph, synthetic_photograph
from measurement import SetUp, Summary, measure, ratio_of
from peers.protocols import PEERS
from peers_speed import environment, start_peer
from PIL import Image

from graphkiln.story.server import start_server
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import GraphkilnError, InvalidInput
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.encoded import Decoder
from graphkiln_backend.repository.version import CONFIG_FILE, GRAPH_FILE
from graphkiln_backend.system.resources import usable_cores
from graphkiln_client import Client, Model, Result
from graphkiln_converters.convert import convert
from graphkiln_converters.recipe import Recipe, SavedPrecision

CALLERS = (8, 32)
CLIENT, SERVER, FASTAPI = "client decodes", "server decodes", "FastAPI, Pillow"
PILLOW, DECODER = "Pillow", "our decoder"
_STORE = CACHE / "encoded"
_QUANTIZED = CACHE / "encoded-peer"
"""Store of the int8 graphs for FastAPI: tensors in, scores out."""
_WIDTH, _HEIGHT = 500, 375
_WIRE_REQUESTS = 5
_BATCH = 8
"""Images of one call to the decoders alone."""
_SPEC = Preprocess(resize=232, crop=(224, 224), layout="HWC", dtype=DType.UINT8)

Classify = Callable[[bytes], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A model of torchvision with random weights.

    Attributes:
        title: What tables call it.
        architecture: torchvision's name.
        precision: What it is served in.
        largest_batch: Of our server. Larger ones pay where an image of a batch costs less than one alone.
    """

    title: str
    architecture: str
    precision: SavedPrecision
    largest_batch: int

    @property
    def name(self) -> str:
        """What the server calls it."""
        return f"{self.architecture}_{self.precision}"


SUBJECTS = (
    Subject(title="ResNet-50 fp32", architecture="resnet50", precision=Precision.FP32, largest_batch=2),
    Subject(title="ResNet-50 int8", architecture="resnet50", precision=Precision.INT8, largest_batch=2),
    Subject(title="MobileNetV3 fp32", architecture="mobilenet_v3_large", precision=Precision.FP32, largest_batch=8),
    Subject(title="MobileNetV3 int8", architecture="mobilenet_v3_large", precision=Precision.INT8, largest_batch=8),
)


def benchmark_encoded(rounds: int, seconds: float) -> list[dict[str, object]]:
    """Every way to classify a JPEG, for each model that can be made, and the decoders alone."""
    jpegs = [synthetic_photograph(_WIDTH, _HEIGHT, seed) for seed in range(8)]
    subjects = [subject for subject in SUBJECTS if _make(subject)]
    rows: list[dict[str, object]] = []
    with ExitStack() as stack:
        for subject, ways in _start(stack, subjects, jpegs).items():
            wire_kb = {name: _wire_kb(classify, jpegs) for name, classify in ways.items()}
            for callers in CALLERS:
                requests = {name: _in_turn(classify, jpegs) for name, classify in ways.items()}
                set_ups = [SetUp(name=name, concurrency=callers, request=each) for name, each in requests.items()]
                rows += rows_of(f"{subject.title}, {callers} callers", measure(set_ups, rounds, seconds), wire_kb)
    return [*rows, *_decoders(jpegs, rounds, seconds)]


def rows_of(title: str, measured: Mapping[str, Summary], wire_kb: Mapping[str, float]) -> list[dict[str, object]]:
    """A row for each way, with its ratios to the client's way and to FastAPI, round by round.

    Args:
        title: Model and callers.
        measured: By way; the client's and FastAPI's are among them.
        wire_kb: Kilobytes that one image takes, there and back, by way.
    """
    base, fastapi = measured[CLIENT], measured[FASTAPI]
    return [
        {
            "model": title,
            "set-up": name,
            "images/s": round(one.per_second, 1),
            "ratio": ratio_of(one.rates, base.rates).median,
            "spread": one.spread_beside(base),
            "to FastAPI": str(ratio_of(one.rates, fastapi.rates).median),
            "p50 ms": round(one.p50_ms, 1),
            "p99 ms": round(one.p99_ms, 1),
            "kB an image": str(round(wire_kb[name], 1)),
        }
        for name, one in measured.items()
    ]


def _start(stack: ExitStack, subjects: Sequence[Subject], jpegs: list[bytes]) -> dict[Subject, dict[str, Classify]]:
    """Starts our server with all models, and FastAPI with each graph that it can serve; all answers are checked."""
    flags = [f"--set={subject.name}.engine=onnxruntime" for subject in subjects]
    log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
    server = stack.enter_context(start_server(_STORE, flags=(*flags, "--cache", str(CACHE / "lowered")), log=log))
    client = stack.enter_context(Client(server.grpc_url))
    ways: dict[Subject, dict[str, Classify]] = {}
    for subject in subjects:
        ways[subject] = {
            CLIENT: partial(_classify, client.model(subject.name, images="tensor")),
            SERVER: partial(_classify, client.model(subject.name, images="encoded")),
        }
        _check_same(ways[subject], jpegs)
        peer = start_peer(PEERS["fastapi"], environment("fastapi"), _peer_graph(subject), jpegs[:2])
        ways[subject][FASTAPI] = stack.enter_context(peer)
    return ways


def _classify(model: Model, jpeg: bytes) -> Result:
    return model.classify(jpeg, top_k=5)


def _check_same(ways: Mapping[str, Classify], jpegs: Sequence[bytes]) -> None:
    """Ends the benchmark where the two ways do not give the same."""
    for jpeg in jpegs:
        first, second = (classify(jpeg).outputs for classify in ways.values())
        if first != second:
            sys.exit(f"the server's way gives {second}, the client's {first}")


def _in_turn(classify: Classify, jpegs: Sequence[bytes]) -> Callable[[], object]:
    numbers = itertools.count()
    return lambda: classify(jpegs[next(numbers) % len(jpegs)])


def _wire_kb(classify: Classify, jpegs: Sequence[bytes]) -> float:
    """Of one image, in a thread of its own: a peer may have closed the connection of this one, which stood idle."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_wire_bytes, classify, jpegs).result() / 1e3


def _wire_bytes(classify: Classify, jpegs: Sequence[bytes]) -> float:
    """Bytes on the loopback interface for one image: the least of several, because others may use it, too."""
    seen = []
    for jpeg in itertools.islice(itertools.cycle(jpegs), _WIRE_REQUESTS):
        before = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
        classify(jpeg)
        seen.append(psutil.net_io_counters(pernic=True)["lo"].bytes_sent - before)
    return min(seen)


def _decoders(jpegs: Sequence[bytes], rounds: int, seconds: float) -> list[dict[str, object]]:
    """JPEG to pixels of the input, in as many threads as there are cores, without any server."""
    threads, batch = usable_cores(), [*itertools.islice(itertools.cycle(jpegs), _BATCH)]
    with ThreadPoolExecutor(threads) as pool, Decoder(_SPEC, threads=threads) as decoder:
        plain, ours = np.stack([*pool.map(decode_plainly, batch)]), decoder.decode([batch])[0]
        if isinstance(ours, InvalidInput) or not np.array_equal(plain, ours):
            sys.exit("our decoder gives other pixels than Pillow")
        set_ups = [
            SetUp(name=PILLOW, concurrency=1, request=lambda: [*pool.map(decode_plainly, batch)]),
            SetUp(name=DECODER, concurrency=1, request=lambda: decoder.decode([[jpeg] for jpeg in batch])),
        ]
        measured = measure(set_ups, rounds, seconds)
    base = measured[PILLOW]
    return [
        {
            "model": f"decoding alone, {threads} threads, batches of {_BATCH}",
            "set-up": name,
            "images/s": round(one.per_second * _BATCH, 1),
            "ratio": ratio_of(one.rates, base.rates).median,
            "spread": one.spread_beside(base),
            "to FastAPI": "-",
            "p50 ms": round(one.p50_ms, 1),
            "p99 ms": round(one.p99_ms, 1),
            "kB an image": "-",
        }
        for name, one in measured.items()
    ]


def decode_plainly(jpeg: bytes) -> AnyArray:
    """What anyone writes with Pillow: uint8 `[224, 224, 3]`."""
    image = Image.open(io.BytesIO(jpeg)).convert("RGB")
    scale = 232 / min(image.size)
    image = image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.BILINEAR)
    left, top = round((image.width - 224) / 2), round((image.height - 224) / 2)
    return np.asarray(image.crop((left, top, left + 224, top + 224)))


def _make(subject: Subject) -> bool:
    """Converts a model once; False, and a line that says why, where that is refused."""
    folder = _STORE / subject.name
    if folder.exists():
        return True
    try:
        _peer_graph(subject)
        _convert(subject, _STORE, input="encoded", top_k=5, max_batch_size=subject.largest_batch)
    except GraphkilnError as error:
        print(f"{subject.title} is left out: {error}", file=sys.stderr)
        return False
    with (folder / CONFIG_FILE).open("a") as config:
        config.write("\ninstance_group { count: 2 kind: KIND_CPU }\n")
    return True


def _peer_graph(subject: Subject) -> Path:
    """What FastAPI serves: fp32 `[n, 3, 224, 224]`, normalized, to scores `[n, 1000]`."""
    if subject.precision == Precision.FP32:
        return exported_graph(subject.architecture)
    folder = _QUANTIZED / subject.name
    if not folder.exists():
        _convert(subject, _QUANTIZED)
    return folder / "1" / GRAPH_FILE


def _convert(subject: Subject, store: Path, **options: Any) -> None:
    print(f"converting {subject.title} (once)", file=sys.stderr)
    if subject.precision == Precision.INT8:
        options["calibration"] = _photographs("calibration", range(200, 232))
    recipe = Recipe(
        source=f"torchvision:{subject.architecture}",
        name=subject.name,
        model_store=store,
        precision=subject.precision,
        samples=_photographs("samples", range(100, 108)),
        **options,
    )
    convert(recipe, command="scripts/benchmark encoded")


def _photographs(name: str, seeds: range) -> Path:
    folder = CACHE / "encoded-images" / name
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        (folder / f"{seed}.jpg").write_bytes(synthetic_photograph(_WIDTH, _HEIGHT, seed))
    return folder
