"""`engine: auto` beside each engine and precision chosen by hand, on ten architectures with random weights.

Each architecture is saved when it is measured, and an interrupted benchmark continues with the next one. Random weights
cost as much as trained ones; their errors mean little: `graphkiln convert --precision int8` proves a trained model on
its samples.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from inputs import CACHE
from measurement import ratio_of, show_progress, take_turns
from reporting import Parts
from torch import nn

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.onnxruntime.quantization import Quantization, quantize
from graphkiln_backend.engines.registry import open_reference, probe
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError, LoweringError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.lowering.acceptance import Requirements
from graphkiln_backend.lowering.artifacts import Artifacts, saved_precision
from graphkiln_backend.lowering.deployment import select_session
from graphkiln_backend.lowering.plan import Resources, plan
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.lowering.settings import Settings
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.graph_file import save
from graphkiln_backend.passes.pipeline import OPTIMIZATIONS
from graphkiln_backend.proof.comparison import compare
from graphkiln_backend.repository.onnx_file import read_signature
from graphkiln_backend.repository.version import ModelVersion
from graphkiln_backend.system.resources import usable_cores
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.sources.base import open_source

# The architectures, exported and quantized once.

_HERE = Path(__file__).resolve()
_TOKENS = 128
_CALIBRATION_SAMPLES = 16
_DETAIL = 8  # distance in pixels of the random values that are interpolated: a photograph is not white noise

# Sources of `graphkiln convert` by name.
ARCHITECTURES = {
    "resnet50": "torchvision:resnet50",
    "mobilenet_v3_small": "torchvision:mobilenet_v3_small",
    "efficientnet_b0": "torchvision:efficientnet_b0",
    "convnext_tiny": "torchvision:convnext_tiny",
    "vit_b_16": "timm:vit_base_patch16_224",
    "deit_small": "timm:deit_small_patch16_224",
    "swin_t": "torchvision:swin_t",
    "regnet_y_800mf": "torchvision:regnet_y_800mf",
    "bert_base": f"python:{_HERE}:make_bert",
    "ssdlite320": f"python:{_HERE}:make_detector",
}


class Bert(nn.Module):
    """BERT-base without its pooler: token numbers `[batch, 128]` to hidden states."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        self.encoder = BertModel(BertConfig(), add_pooling_layer=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """`[batch, 128]` -> `[batch, 128, 768]`."""
        states: torch.Tensor = self.encoder(input_ids=input_ids).last_hidden_state
        return states


class Detector(nn.Module):
    """SSDlite on MobileNetV3-large up to its heads; boxes are decoded and suppressed by the client."""

    def __init__(self) -> None:
        from torchvision.models import detection  # the source has prepared the library

        super().__init__()
        whole = detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
        self.backbone, self.head = whole.backbone, whole.head

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[batch, 3, 320, 320]` -> boxes `[batch, places, 4]`, classes `[batch, places, 91]`."""
        found = self.head(list(self.backbone(image).values()))
        return found["bbox_regression"], found["cls_logits"]


def make_bert() -> tuple[nn.Module, torch.Tensor]:
    """Make the module and an example input."""
    return Bert(), torch.zeros((2, _TOKENS), dtype=torch.int64)


def make_detector() -> tuple[nn.Module, torch.Tensor]:
    """Make the module and an example input."""
    return Detector(), torch.zeros((2, 3, 320, 320))


@dataclass(frozen=True, kw_only=True, slots=True)
class Graphs:
    """Saved graphs of an architecture in fp32 and int8; None if it cannot be quantized."""

    fp32: Path
    int8: Path | None

    def feeds(self, batch: int, seed: int) -> dict[str, AnyArray]:
        """Random photographs or texts, `[batch, ...]`."""
        return synthetic_feeds(read_signature(self.fp32), batch, np.random.default_rng(seed))


def prepare(name: str) -> Graphs:
    """Export and quantize an architecture, once."""
    fp32, int8 = CACHE / f"{name}.precision.onnx", CACHE / f"{name}.precision-int8.onnx"
    graphs = Graphs(fp32=fp32, int8=int8)

    def export(target: Path) -> None:
        torch.manual_seed(0)
        model = open_source(Recipe(source=ARCHITECTURES[name])).export()
        run_passes(model, OPTIMIZATIONS)
        save(model, target)

    _make_once(fp32, export)
    samples, settings = graphs.feeds(_CALIBRATION_SAMPLES, seed=0), Quantization(batch_size=4)
    try:
        _make_once(int8, lambda target: quantize(fp32, samples, settings, target))
    except LoweringError as error:
        print(f"{name} in int8: {error}", file=sys.stderr)
        return replace(graphs, int8=None)
    return graphs


def _make_once(path: Path, make: Callable[[Path], object]) -> None:
    """Make a file that does not exist, completely or not at all."""
    if path.exists():
        return
    print(f"making {path.name} (once)", file=sys.stderr)
    CACHE.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"partial-{path.name}")
    make(partial)
    partial.rename(path)


def synthetic_feeds(signature: Signature, batch: int, random: np.random.Generator) -> dict[str, AnyArray]:
    """Inputs for a signature: smoothed noise for images, numbers below 30,000 for tokens."""
    feeds: dict[str, AnyArray] = {}
    for spec in signature.inputs:
        shape = (batch, *(int(size) for size in spec.shape[1:]))
        if np.issubdtype(spec.dtype.numpy, np.integer):
            feeds[spec.name] = random.integers(0, 30_000, shape).astype(spec.dtype.numpy)
        else:
            feeds[spec.name] = _smooth(random, shape).astype(spec.dtype.numpy)
    return feeds


def _smooth(random: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
    """Smoothed noise `[batch, channels, height, width]`, normalized like a photograph."""
    height, width = shape[-2:]
    coarse = random.normal(size=(*shape[:-2], -(-height // _DETAIL), -(-width // _DETAIL)))
    smooth = nn.functional.interpolate(torch.tensor(coarse), (height, width), mode="bicubic")
    return np.asarray(smooth)


# Sessions of each set-up, measured in turn.

PARTS = CACHE / "precision"  # saved architectures
_BATCH = 8
_CLOSE = 0.97  # share of the best rate from which a rate counts as equal

ORT_FP32, OV_FP32, OV_BF16 = "onnxruntime fp32", "openvino fp32", "openvino bf16"
ORT_INT8, OV_INT8 = "onnxruntime int8", "openvino int8"
AUTO_FP32, AUTO_BF16, AUTO_INT8 = "auto, fp32", "auto, bf16 requested", "auto, int8 saved"


# Settings, and the saved graph.
_SET_UPS = {
    ORT_FP32: (Settings(engine="onnxruntime"), "fp32"),
    OV_FP32: (Settings(engine="openvino"), "fp32"),
    OV_BF16: (Settings(engine="openvino", precision=Precision.BF16), "fp32"),
    ORT_INT8: (Settings(engine="onnxruntime"), "int8"),
    OV_INT8: (Settings(engine="openvino"), "int8"),
    AUTO_FP32: (Settings(engine="auto"), "fp32"),
    AUTO_BF16: (Settings(engine="auto", precision=Precision.BF16), "fp32"),
    AUTO_INT8: (Settings(engine="auto"), "int8"),
}
# The candidates of `engine: auto`.
_BY_HAND = {
    AUTO_FP32: (ORT_FP32, OV_FP32),
    AUTO_BF16: (ORT_FP32, OV_FP32, OV_BF16),
    AUTO_INT8: (ORT_INT8, OV_INT8),
}


@dataclass(slots=True)
class Rounds:
    """Rates and CPU times of a set-up, round by round.

    Attributes:
        rates: Runs per second.
        cpu_s: Processor seconds of a run, of all threads.
    """

    rates: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def benchmark_precision(rounds: int, seconds: float, only: str = "") -> list[dict[str, object]]:
    """Measure all architectures that are not saved, or `only` one again; return the rows of all saved ones."""
    if only and only not in ARCHITECTURES:
        sys.exit(f"precision has no part {only}; there are {', '.join(ARCHITECTURES)}")
    parts = Parts(PARTS, rounds, seconds)
    for name in [only] if only else ARCHITECTURES:
        parts.measure(name, partial(_measure_architecture, name, rounds, seconds), again=bool(only))
    return [row for name in ARCHITECTURES for row in parts.read(name) or ()]


def _measure_architecture(name: str, rounds: int, seconds: float) -> list[dict[str, object]]:
    graphs = prepare(name)
    feeds = graphs.feeds(_BATCH, seed=1)
    sessions, failures = dict[str, ProvenSession](), dict[str, str]()
    with tempfile.TemporaryDirectory() as folder, ArtifactCache(Path(folder)) as cache, ExitStack() as opened:
        for set_up, (settings, saved) in _SET_UPS.items():
            show_progress(f"{name}: building {set_up}")
            try:
                sessions[set_up] = _build(graphs.int8 if saved == "int8" else graphs.fp32, settings, cache)
            except GraphkilnError as error:
                failures[set_up] = str(error).partition("\n")[0]
                continue
            opened.enter_context(sessions[set_up].session)
        with open_reference(graphs.fp32) as reference:
            expected = reference.run(feeds)
        errors = {
            set_up: max(each.relative_l2 for each in compare(expected, proven.session.run(feeds)))
            for set_up, proven in sessions.items()
        }
        runs = {set_up: partial(_time, partial(proven.session.run, feeds)) for set_up, proven in sessions.items()}
        found = take_turns(f"{name}, ", runs, rounds, seconds)
    measured = {
        set_up: Rounds(rates=[rate for rate, _ in each], cpu_s=[cpu_s for _, cpu_s in each])
        for set_up, each in found.items()
    }
    made = {set_up: (proven.config.engine, _products(proven)) for set_up, proven in sessions.items()}
    verdicts = {auto: judge(auto, by_hand, measured, made) for auto, by_hand in _BY_HAND.items() if auto in measured}
    for set_up, failure in failures.items():
        print(f"{name}, {set_up}: {failure}", file=sys.stderr)
    rows: list[dict[str, object]] = []
    for set_up, proven in sessions.items():
        own = measured[set_up]
        ratios = {other: round(ratio_of(own.rates, measured[other].rates).median, 2) for other in measured}
        rivals = _BY_HAND.get(set_up) or next(hand for hand in reversed(_BY_HAND.values()) if set_up in hand)
        rows.append(
            {
                "model": name,
                "set-up": set_up,
                "engine": proven.config.engine,
                "products": _products(proven),
                "samples/s": round(statistics.median(own.rates) * _BATCH, 1),
                "to onnxruntime fp32": ratios[ORT_FP32],
                "to best by hand": min(ratios[rival] for rival in rivals if rival in ratios),
                "CPU ms": round(statistics.median(own.cpu_s) / _BATCH * 1e3, 2),
                "error": f"{errors[set_up]:.1e}",
                "auto": verdicts.get(set_up, ""),
            }
        )
    return rows


def _build(graph: Path | None, settings: Settings, cache: ArtifactCache) -> ProvenSession:
    if graph is None:
        raise LoweringError("there is no int8 graph", attempts=())
    version = ModelVersion(graph_path=graph, manifest=None, golden=None)
    saved = saved_precision(version)
    resources = Resources(device=CPU, cores=usable_cores(), probe=probe)
    planned = plan(settings, resources, saved=saved, largest_batch=_BATCH)
    return select_session(Artifacts(version, saved, cache), planned, Requirements(batch_sizes=(1, _BATCH)))


def _time(run: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Runs per second, and processor seconds of a run; a first run lets the threads of other sessions go to sleep."""
    run()
    begun, cpu, count = time.perf_counter(), time.process_time(), 0
    while (passed := time.perf_counter() - begun) < seconds or not count:
        run()
        count += 1
    return count / passed, (time.process_time() - cpu) / count


def judge(auto: str, by_hand: Sequence[str], measured: Mapping[str, Rounds], made: Mapping[str, object]) -> str:
    """Describe `engine: auto` beside the best by hand, by the median of the rounds' ratios.

    Args:
        auto: Set-up with `engine: auto`.
        by_hand: Its candidates.
        measured: Equally many rounds of each set-up that could be built.
        made: Engine and products of each. Where they are the same, differences are noise: of the set-ups that compute
            like `auto`, the fastest one of each round counts.
    """
    alike = [name for name in (auto, *by_hand) if name in measured and made[name] == made[auto]]
    rates = {name: measured[name].rates for name in by_hand if name in measured}
    faster = [max(each) for each in zip(*(measured[name].rates for name in alike), strict=True)]
    rates |= dict.fromkeys(alike, faster)
    best = max((name for name in by_hand if name in measured), key=lambda name: statistics.median(rates[name]))
    if best in alike:
        return f"is {best}"
    ratio = ratio_of(rates[auto], rates[best]).median
    return f"within 3% of {best}" if ratio >= _CLOSE else f"{1 - ratio:.0%} behind {best}"


def _products(proven: ProvenSession) -> str:
    products = proven.placement.products if proven.placement else {}
    return ", ".join(f"{count} {precision}" for precision, count in products.items())
