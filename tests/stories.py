"""Stories that nobody measured: requests, observations and documents for the unit tests."""

from __future__ import annotations

from typing import Any

from graphkiln.story.judgment import Judgment
from graphkiln.story.request import Platform, StoryRequest
from graphkiln.story.results import Observation, Record, Round, build_document
from graphkiln.story.variants import Variant
from graphkiln_backend.graph.device import CPU, Device

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
