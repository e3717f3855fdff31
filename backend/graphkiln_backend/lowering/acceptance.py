"""What a session must show before it may answer: its tensors, what it really ran, and the golden answers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graphkiln_backend.engines.base import Placement, Session, SessionConfig
from graphkiln_backend.graph.errors import ExecutionError, LoweringError, SignatureError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import Verification
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.ranking import Ranking
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.lowering.warmup import repeated, synthetic_feeds
from graphkiln_backend.proof.comparison import prove
from graphkiln_backend.proof.policy import BY_PRECISION, REPLAY, Limits
from graphkiln_backend.repository.version import ModelVersion


def check_signature(version: ModelVersion, found: Signature) -> None:
    """A manifest that speaks of other tensors than the graph has would make the server publish lies.

    Raises:
        SignatureError: It does.
    """
    promised = version.manifest.signature if version.manifest else found
    for kind, ours, theirs in (
        ("inputs", promised.inputs, found.inputs),
        ("outputs", promised.outputs, found.outputs),
    ):
        if [(s.name, s.dtype, len(s.shape)) for s in ours] != [(s.name, s.dtype, len(s.shape)) for s in theirs]:
            raise SignatureError(
                f"the manifest's {kind} are not the graph's",
                expected=", ".join(map(str, ours)),
                got=", ".join(map(str, theirs)),
            )


def read_placement(session: Session, golden: GoldenSamples | None) -> Placement | None:
    """What ran where; None where the graph does not run on made-up inputs and there are no others."""
    if golden:
        return session.placement(golden.inputs)
    try:
        return session.placement(synthetic_feeds(session.signature))
    except (ExecutionError, SignatureError):
        # Without golden samples nobody knows which sizes of the varying dimensions make sense.
        return None


def check_placement(step: SessionConfig, placement: Placement | None, saved: Precision) -> tuple[str, ...]:
    """Holds what ran to what was asked for; returns what a person should know.

    Raises:
        LoweringError: Nothing ran in the precision that was asked for, or products fell back to another device.
    """
    if placement is None:
        if step.precision:
            raise LoweringError(
                f"{step}: what it runs in cannot be read back",
                attempts=("the graph has no golden samples and does not run on zeros",),
                hint="convert it (graphkiln convert FILE.onnx), or leave `precision` out",
            )
        return ()
    if placement.elsewhere:
        named = ", ".join(placement.elsewhere[:3])
        raise LoweringError(
            f"{step}: {len(placement.elsewhere)} products ran elsewhere",
            attempts=(f"{placement}; the first: {named}",),
            hint="the engine does not take these nodes: choose another engine or precision",
        )
    computed = step.precision and step.precision.kernels
    if computed and not placement.products.get(computed):
        on_cpu = not step.device.is_gpu and computed is Precision.FP16
        hint = "a CPU computes fp16 in fp32; bf16 is the precision that pays there" if on_cpu else ""
        raise LoweringError(f"{step}: no product ran in {computed}", attempts=(str(placement),), hint=hint)
    if not step.precision and saved.is_half and placement.products and saved not in placement.products:
        return (f"saved in {saved}, computed in {placement.precision} ({placement})",)
    return ()


def limits_of(saved: Precision, step: SessionConfig) -> Limits:
    """Against the saved graph's own answers: tight for an as-saved session, the precision's row for a lowered one."""
    limits = REPLAY[saved]
    if step.precision in BY_PRECISION and step.precision != saved:
        limits = BY_PRECISION[step.precision]
    return replace(limits, name=f"{step.precision or saved} on {step.engine}")


def replay(
    session: Session, golden: GoldenSamples, limits: Limits, largest_batch: int, ranking: Ranking | None = None
) -> Verification:
    """Replays the golden samples one by one and in the largest batch, on the session that will answer.

    Raises:
        VerificationError: The answers are not those of the saved graph; the report has the numbers.
    """
    samples = len(next(iter(golden.inputs.values())))
    singles = [session.run({name: array[i : i + 1] for name, array in golden.inputs.items()}) for i in range(samples)]
    alone = {name: np.concatenate([single[name] for single in singles]) for name in golden.graph_outputs}
    prove(golden.graph_outputs, alone, limits, batch_sizes=(1,), ranking=ranking)
    size = max(largest_batch, samples) if all(spec.batchable for spec in session.signature.inputs) else samples
    together = session.run(repeated(golden.inputs, size))
    return prove(repeated(golden.graph_outputs, size), together, limits, batch_sizes=(1, size), ranking=ranking)
