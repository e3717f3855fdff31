"""Stories without measurements: requests, observations and documents for unit tests."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from graphkiln.story.results import Judgment, Observation, Record, Round, build_document
from graphkiln.story.variants import Platform, StoryRequest, Variant
from graphkiln.story.workloads import Predictions, Predictor
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError, MeasurementError

ON_CPU = Platform(device=CPU, batch=8)
ON_GPU = Platform(device=Device.gpu(), batch=64)
JPEGS = (b"one", b"two", b"three")


def story_request(**facts: Any) -> StoryRequest:
    return StoryRequest(
        **{
            "source": "torchvision:resnet18",
            "image_size": 64,
            "weights": None,
            "gradient": False,
            "samples": None,
            **facts,
        }
    )


def make_judgment(*, passed: bool = True, **facts: Any) -> Judgment:
    return Judgment(
        **{"verdict": "fp32: PASS", "error": 1e-6, "limit": 1e-4, "difference": 1e-6, "samples": 200, "same": 200,
           "interval": (0.98, 1.0), "passed": passed, **facts}
    )  # fmt: skip


def make_observation(*rates: float, passed: bool = True) -> Observation:
    found = tuple(
        Round(number=number, per_second=rate, latencies_ms=(1e3 / rate,) * 3, cores=1.5, memory_mb=100.0)
        for number, rate in enumerate(rates)
    )
    return Observation(judgment=make_judgment(passed=passed), rounds=found)


CHAIN = (
    Variant(key="eager", step=0, title="eager", kind="eager"),
    Variant(key="static", step=1, title="static", kind="static", baseline="eager", reported="1.25"),
    Variant(key="reduced", step=2, title="reduced", kind="session", baseline="static", reported="2.33"),
    Variant(key="int8", step=4, title="int8", kind="tensors", baseline="reduced", switch=True),
)


def story_document(**observations: Observation) -> dict[str, Any]:
    record = Record(
        facts={"model": "m", "image size": 64, "machine": "here", "date": "today", "weights": "w"}, seen=observations
    )
    return build_document(CHAIN, record, {variant.key: ("graphkiln bench",) for variant in CHAIN})


class OpeningFailed(Exception):
    """An exception of a third-party library."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeWorkload:
    """Workload that another process can open: the score of a JPEG is its length.

    Attributes:
        fault: When it fails, and how.
        callers: Concurrent callers.
        pause_s: How long one image takes.
    """

    fault: str = ""
    callers: int = 1
    pause_s: float = 0.001

    @contextmanager
    def __call__(self) -> Iterator[Predictor]:
        match self.fault:
            case "open":
                raise OpeningFailed("no such library")
            case "open, ours":
                raise ConversionError("no such model", hint="name another")
            case "dies":
                os._exit(3)
        yield Predictor(
            run_one=self._run_one,
            predict=self._predict,
            callers=self.callers,
            parameter_gradients=lambda jpeg: (np.arange(float(len(jpeg))), 0.25),
        )

    def _run_one(self, jpeg: bytes) -> None:
        time.sleep(self.pause_s)
        if self.fault == "run_one":
            raise MeasurementError(f"cannot run {jpeg!r}")

    def _predict(self, jpegs: Sequence[bytes]) -> Predictions:
        if self.fault == "predict":
            raise ZeroDivisionError("a bug")
        if self.fault == "dies later":
            os._exit(4)
        return Predictions(scores=np.array([[float(len(jpeg)), 0.0] for jpeg in jpegs]))


@dataclass
class FakeSession:
    """Session with given outputs; it keeps every feed of `INPUT_0`."""

    outputs: dict[str, AnyArray]
    fed: list[AnyArray] = field(default_factory=list)
    closed: bool = False

    def run(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        self.fed.append(feeds["INPUT_0"])
        return self.outputs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True
