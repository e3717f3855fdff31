"""Checks of a session before it may serve: its tensors, what it really ran, and the golden outputs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from graphkiln_backend.engines.base import Placement, Session, SessionConfig
from graphkiln_backend.graph.errors import LoweringError, SignatureError
from graphkiln_backend.graph.golden import GoldenSamples, joined, repeated
from graphkiln_backend.graph.manifest import Verification
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.graph.task import Reading
from graphkiln_backend.lowering.trial import SyntheticInputs
from graphkiln_backend.proof.comparison import prove
from graphkiln_backend.proof.policy import BY_PRECISION, REPLAY, Limits
from graphkiln_backend.repository.onnx_file import read_signature
from graphkiln_backend.repository.version import ModelVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirements:
    """Requirements on every session of a version, whichever configuration builds it.

    Attributes:
        batch_sizes: Batch sizes to warm up.
        self_test: Whether the golden samples are replayed.
    """

    batch_sizes: tuple[int, ...] = (1,)
    self_test: bool = True

    @property
    def largest_batch(self) -> int:
        """Largest batch that it will run."""
        return max(self.batch_sizes)


def promised_signature(version: ModelVersion) -> Signature:
    """Return the tensors that the manifest promises, or else the graph.

    Raises:
        RepositoryError: The graph is damaged.
    """
    return version.manifest.signature if version.manifest else read_signature(version.graph_path)


def check_signature(version: ModelVersion, found: Signature, outputs: Collection[str] | None = None) -> None:
    """Compare the tensors of a session with those that the manifest or the graph promises, and the server publishes.

    Args:
        version: The version.
        found: The session's.
        outputs: Names of those that the session was made for; None for all.

    Raises:
        SignatureError: They differ in name, dtype or rank.
    """
    owner = "manifest" if version.manifest else "saved graph"
    promised = promised_signature(version)
    wanted = tuple(spec for spec in promised.outputs if outputs is None or spec.name in outputs)
    for kind, expected, got in (("inputs", promised.inputs, found.inputs), ("outputs", wanted, found.outputs)):
        if len(expected) != len(got) or not all(map(TensorSpec.is_like, expected, got)):
            raise SignatureError(
                f"the {owner}'s {kind} are not those of the graph that would serve",
                expected=", ".join(map(str, expected)),
                got=", ".join(map(str, got)),
            )


def read_placement(
    session: Session, golden: GoldenSamples | None, synthetic: SyntheticInputs | None = None
) -> Placement | None:
    """Read what ran where; None without golden samples and a request that the graph computes."""
    if golden:
        return session.placement(golden.inputs)
    return session.placement(synthetic.feeds(session.signature)) if synthetic else None


def check_placement(config: SessionConfig, placement: Placement | None, saved: Precision) -> tuple[str, ...]:
    """Compare what ran with what was requested.

    Args:
        config: The requested configuration.
        placement: Kernels that ran, or None where they cannot be read back.
        saved: Precision that the graph was saved in.

    Returns:
        Notes for a person, a line each.

    Raises:
        LoweringError: Nothing ran in the requested precision, or products fell back to another device.
    """
    if placement is None:
        if config.precision:
            raise LoweringError(
                f"{config}: what it runs in cannot be read back",
                attempts=("the graph has no golden samples and runs no request that was made up",),
                hint="convert it (graphkiln convert FILE.onnx), or leave `precision` out",
            )
        return ()
    if placement.elsewhere:
        named = ", ".join(placement.elsewhere[:3])
        raise LoweringError(
            f"{config}: {len(placement.elsewhere)} products ran elsewhere",
            attempts=(f"{placement}; the first: {named}",),
            hint="the engine does not take these nodes: choose another engine or precision",
        )
    computed = config.precision and config.precision.kernels
    if computed and not placement.products.get(computed):
        on_cpu = not config.device.is_gpu and computed is Precision.FP16
        hint = "a CPU computes fp16 in fp32; bf16 is the precision that pays there" if on_cpu else ""
        raise LoweringError(f"{config}: no product ran in {computed}", attempts=(str(placement),), hint=hint)
    if not config.precision and saved.is_half and placement.products and saved not in placement.products:
        return (f"saved in {saved}, computed in {placement.precision} ({placement})",)
    return ()


def limits_of(saved: Precision, config: SessionConfig) -> Limits:
    """Return limits beside the saved graph's outputs: tight for a session as saved, else the precision's row."""
    limits = REPLAY[saved]
    if config.precision in BY_PRECISION and config.precision != saved:
        limits = BY_PRECISION[config.precision]
    return replace(limits, name=f"{config.precision or saved} on {config.engine}")


def check_golden(
    session: Session, golden: GoldenSamples, limits: Limits, largest_batch: int, reading: Reading | None = None
) -> Verification:
    """Check the golden outputs one by one and in the largest batch, on the session that will serve.

    Args:
        session: The session.
        golden: Samples, and the outputs of the saved graph for them.
        limits: Largest differences of the outputs.
        largest_batch: Samples are repeated to fill it, where the first dimension varies.
        reading: Interpretation of the outputs by users, or None.

    Raises:
        VerificationError: The outputs are not those of the saved graph; the report has the numbers.
    """
    alone = joined([session.run(feeds) for feeds in golden.feeds])
    verification = prove(golden.graph_outputs, alone, limits, batch_sizes=(1,), reading=reading, samples=golden.count)
    if golden.whole:
        return verification
    varies = all(spec.batchable for spec in session.signature.inputs)
    size = max(largest_batch, golden.count) if varies else golden.count
    together = session.run(golden.batch(size))
    return prove(repeated(golden.graph_outputs, size), together, limits, batch_sizes=(1, size), reading=reading)


def check_golden_shuffled(
    session: Session, golden: GoldenSamples, limits: Limits, largest_batch: int, reading: Reading | None = None
) -> None:
    """Check the golden outputs in a batch whose samples come in a drawn order.

    Args:
        session: Session of a graph whose batches may be computed in parts.
        golden: Samples, and the outputs of the saved graph for them.
        limits: Largest differences of the outputs.
        largest_batch: Samples of the batch.
        reading: Interpretation of the outputs by users, or None.

    Raises:
        VerificationError: The outputs are not those of the saved graph, or not in the order of the inputs.
    """
    if golden.whole or largest_batch < 2 or not all(spec.batchable for spec in session.signature.inputs):
        return
    shuffled = golden.shuffled(largest_batch)
    found = session.run(shuffled.inputs)
    prove(shuffled.graph_outputs, found, limits, batch_sizes=(largest_batch,), reading=reading)
