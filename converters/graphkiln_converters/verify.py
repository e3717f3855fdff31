"""Proves a written version again, at any time: on another engine, in another build, on more samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from graphkiln_backend.engines.base import Placement, Session, SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.registry import load_engine
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.errors import EngineUnavailable, VerificationError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import Verification
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.ranking import Ranking
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.proof.comparison import prove
from graphkiln_backend.proof.policy import BY_PRECISION, EXPORT, OTHER_ENGINE, REPLAY, Limits
from graphkiln_backend.repository.version import ModelVersion
from graphkiln_converters.proving import Arrays, run_in_batches
from graphkiln_converters.samples import read_samples
from graphkiln_converters.sources.base import InputSpec

_BATCH_SIZES = (1, 2, 5)
_MOST_READ = 256
_USUAL_SIZE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """What was proven, and where it ran.

    Attributes:
        verdicts: One per reference.
        placement: What the engine says that it ran; None without golden samples.
    """

    verdicts: tuple[Verification, ...]
    placement: Placement | None


def verify(
    version: ModelVersion, *, engine: str, precision: Precision | None, samples: Path | None, threads: int
) -> Verified:
    """Runs a version on an engine and compares it with what is trusted.

    The golden samples are compared with the source model's answers (row of the precision) and with the saved graph's
    own (replay). A user's samples are compared with the reference engine, optimizations off.

    Args:
        version: What to prove.
        engine: Name in the registry.
        precision: Row of the policy; None for the one that the graph was saved in.
        samples: More samples, a folder of images or an .npz, or None.
        threads: For the engine.

    Raises:
        VerificationError: The answers changed, or there is nothing to compare with.
        EngineUnavailable: The engine is not installed or cannot run here.
    """
    loaded = load_engine(engine)
    support = loaded.probe(CPU)
    if not support.ok:
        raise EngineUnavailable(support.reason)
    saved = (
        version.manifest.conversion.precision if version.manifest and version.manifest.conversion else Precision.FP32
    )
    row = precision or saved
    what = f"{row} on {engine}"
    step = SessionConfig(engine=engine, device=CPU, threads=threads, spin=False, reason="asked for by verify")
    verdicts: list[Verification] = []
    placement = None
    with loaded.build(version.graph_path, step) as session:
        if golden := version.golden:
            placement = session.placement(golden.inputs)
            # Another engine than the one that wrote the golden answers rounds otherwise, also in fp32.
            from_source = OTHER_ENGINE if row is Precision.FP32 else BY_PRECISION[row]
            rows = (
                (golden.source_outputs, _named(from_source, f"{what}, source model")),
                (golden.graph_outputs, _named(REPLAY[row], f"{what}, saved graph")),
            )
            verdicts = [_replay(session, golden, trusted, limits, version.ranking) for trusted, limits in rows]
        if samples:
            feeds = _read(version, session.signature, samples)
            verdicts.append(_beside_reference(version, session, feeds, _named(REPLAY[row], f"{what}, your samples")))
    if not verdicts:
        raise VerificationError(
            f"{version.graph_path.parent} cannot be verified",
            report="it has no golden samples",
            hint="give samples (--samples DIR), or convert it: graphkiln convert FILE.onnx",
        )
    return Verified(verdicts=tuple(verdicts), placement=placement)


def _named(limits: Limits, name: str) -> Limits:
    return replace(limits, name=name)


def _replay(
    session: Session, golden: GoldenSamples, trusted: Arrays, limits: Limits, ranking: Ranking | None
) -> Verification:
    """The worst verdict of all batch sizes."""
    verdicts = [
        prove(trusted, found, limits, batch_sizes=_BATCH_SIZES, ranking=ranking)
        for found in (run_in_batches(session.run, golden.inputs, size) for size in _BATCH_SIZES)
    ]
    return max(verdicts, key=lambda verdict: verdict.relative_l2)


def _read(version: ModelVersion, signature: Signature, path: Path) -> Arrays:
    preprocess = version.manifest.preprocess if version.manifest else None
    return read_samples(path, _specs(signature), preprocess, _MOST_READ)


def _beside_reference(version: ModelVersion, session: Session, feeds: Arrays, limits: Limits) -> Verification:
    with OnnxRuntimeEngine().build_reference(version.graph_path) as reference:
        trusted = run_in_batches(reference.run, feeds, _BATCH_SIZES[-1])
    found = run_in_batches(session.run, feeds, _BATCH_SIZES[-1])
    scores = [array for array in trusted.values() if array.dtype.kind == "f" and array.size]
    noise = max((float(np.abs(array).max()) * EXPORT.relative_l2 for array in scores), default=0.0)
    return prove(trusted, found, limits, batch_sizes=(_BATCH_SIZES[-1],), noise=noise, ranking=version.ranking)


def _specs(signature: Signature) -> dict[str, InputSpec]:
    return {
        spec.name: InputSpec(
            name=spec.name,
            dtype=spec.dtype,
            shape=tuple(dim if isinstance(dim, int) else _USUAL_SIZE for dim in spec.shape[1:]),
        )
        for spec in signature.inputs
    }
