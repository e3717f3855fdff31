"""How fast an int8 graph is beside the fp32 graph that it was made from, on the machine that converts.

A version that was saved in int8 has no fp32 graph beside it, so nobody can tell later. On CPUs it need not be faster:
of MobileNetV3-small, with its many small layers, int8 has 0.7 to 0.9 of the rate of fp32 even with AVX512-VNNI.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from graphkiln_backend.engines import hardware
from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.registry import load_engine
from graphkiln_backend.engines.timing import fastest_runs_s
from graphkiln_backend.graph.cores import usable_cores
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.precision import Precision

_ENGINES = ("onnxruntime", "openvino")
_BATCH = 4
_log = logging.getLogger("graphkiln.converters")


def compare_speed(fp32: Path, int8: Path, golden: GoldenSamples) -> str:
    """What int8 brings on this machine's CPU, in each engine that computes both graphs; empty where none does.

    A warning is logged where the fastest fp32 is faster than the fastest int8.

    Args:
        fp32: The graph that was quantized.
        int8: What came of it; its inputs are the same.
        golden: What both are fed with.
    """
    times: dict[str, Mapping[str, float]] = {}
    for engine in _ENGINES:
        try:
            times[engine] = _times_s(engine, fp32, int8, golden)
        except GraphkilnError as error:  # not installed, or it does not compute int8 exactly here
            _log.debug("the speed of int8 is not measured with %s: %s", engine, error)
    if not times:
        return ""
    ratios = " and ".join(
        f"{each[Precision.FP32] / each[Precision.INT8]:.2f}x with {engine}" for engine, each in times.items()
    )
    _, precision, engine = min((took, name, engine) for engine, each in times.items() for name, took in each.items())
    fastest = f"the fastest there is {precision} with {engine}"
    told = f"rate of int8 to that of fp32, on {hardware.cpu_name()}: {ratios}; {fastest}"
    if precision == Precision.FP32:
        _log.warning("%s", told)
    return told


def _times_s(engine: str, fp32: Path, int8: Path, golden: GoldenSamples) -> Mapping[str, float]:
    """Seconds of a batch of each, by precision.

    Raises:
        GraphkilnError: The engine does not compute one of them.
    """
    config = SessionConfig(
        engine=engine, device=CPU, threads=usable_cores(), spin=True, reason="to compare", largest_batch=_BATCH
    )
    feeds, graphs = golden.batch(_BATCH), {Precision.FP32: fp32, Precision.INT8: int8}
    with ExitStack() as opened:
        built = load_engine(engine)
        sessions = {name: opened.enter_context(built.build(graph, config)) for name, graph in graphs.items()}
        return fastest_runs_s({name: partial(session.run, feeds) for name, session in sessions.items()})
