"""Checks of a session before it serves (signature, placement, golden outputs) and while it serves (replays)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphkiln_backend.engines.base import PLAIN_RUNS, Computation, Placement, SessionConfig
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import GraphkilnError, LoweringError, SignatureError
from graphkiln_backend.graph.golden import GoldenSamples, joined, repeated
from graphkiln_backend.graph.manifest import Adoption, Verification
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.graph.task import Reading
from graphkiln_backend.proof.comparison import prove
from graphkiln_backend.proof.policy import BY_PRECISION, REPLAY, Limits, adopted_limits
from graphkiln_backend.repository.onnx_outline import read_outline
from graphkiln_backend.repository.version import ModelVersion, read_graph_signature

Arrays = Mapping[str, AnyArray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirements:
    """Requirements on every session of a version.

    Attributes:
        batch_sizes: Batch sizes to warm up.
        self_test: Whether to replay the golden samples.
    """

    batch_sizes: tuple[int, ...] = (1,)
    self_test: bool = True

    @property
    def largest_batch(self) -> int:
        """Largest batch that the session will run."""
        return max(self.batch_sizes)


def promised_signature(version: ModelVersion) -> Signature:
    """Return the signature of the manifest, or of the graph if there is no manifest.

    Raises:
        RepositoryError: The graph is damaged.
    """
    return version.manifest.signature if version.manifest else read_graph_signature(version.graph_path)


def check_signature(version: ModelVersion, found: Signature, outputs: Collection[str] | None = None) -> None:
    """Compare the signature of a session with the promised one, which the server publishes.

    Args:
        version: The version.
        found: Signature of the session.
        outputs: Names of the outputs that the session computes, or None for all.

    Raises:
        SignatureError: A name, dtype or rank differs.
    """
    owner = "manifest" if version.manifest else "saved graph"
    promised = promised_signature(version)
    wanted = tuple(spec for spec in promised.outputs if outputs is None or spec.name in outputs)
    for kind, expected, got in (("inputs", promised.inputs, found.inputs), ("outputs", wanted, found.outputs)):
        if len(expected) != len(got) or not all(map(TensorSpec.is_like, expected, got)):
            raise SignatureError(
                f"the {kind} of the session differ from those of the {owner}",
                expected=", ".join(map(str, expected)),
                got=", ".join(map(str, got)),
            )


def check_placement(config: SessionConfig, placement: Placement | None, saved: Precision) -> tuple[str, ...]:
    """Compare the kernels that ran with the requested configuration.

    Args:
        config: The requested configuration.
        placement: Kernels that ran, or None if they could not be read back.
        saved: Precision of the saved graph.

    Returns:
        Notes for the user.

    Raises:
        LoweringError: No product ran in the requested precision, or products fell back to another device.
    """
    if placement is None:
        if config.precision or config.providers:
            setting = "precision" if config.precision else "providers"
            raise LoweringError(
                f"{config}: cannot verify the {setting}",
                attempts=("the graph has no golden samples and fails on every synthetic request",),
                hint=f"convert it (graphkiln convert FILE.onnx), or leave `{setting}` out",
            )
        return ()
    if placement.elsewhere:
        named = ", ".join(placement.elsewhere[:3])
        raise LoweringError(
            f"{config}: {len(placement.elsewhere)} products ran on another device",
            attempts=(f"{placement}; the first: {named}",),
            hint="the engine does not support these nodes: choose another engine or precision",
        )
    computed = config.precision and config.precision.kernels
    if computed and not placement.products.get(computed):
        on_cpu = not config.device.is_gpu and computed is Precision.FP16
        hint = (
            "CPUs compute fp16 graphs in fp32; choose bf16, which is faster on CPUs that support it" if on_cpu else ""
        )
        raise LoweringError(f"{config}: no product ran in {computed}", attempts=(str(placement),), hint=hint)
    if not config.precision and saved.is_half and placement.products and saved not in placement.products:
        return (f"saved in {saved}, computed in {placement.precision} ({placement})",)
    return ()


def limits_of(saved: Precision, config: SessionConfig, adoption: Adoption | None = None) -> Limits:
    """Select the policy row for comparing a session with the golden outputs.

    A session that runs the graph as saved gets the tight replay row; a lowered one gets the row of its precision.

    Args:
        saved: Precision of the saved graph.
        config: Configuration of the session.
        adoption: Origin of golden outputs that are not the saved graph's own, or None.
    """
    limits = REPLAY[saved] if adoption is None else adopted_limits(adoption)
    if config.precision in BY_PRECISION and config.precision != saved:
        limits = BY_PRECISION[config.precision]
    return replace(limits, name=f"{config.precision or saved} on {config.runtime}")


def limits_behind_triton(version: ModelVersion) -> Limits:
    """Select the policy row for answers of another backend of Triton.

    A graph that graphkiln saved must compute its own outputs; an adopted one those of its reference.

    Raises:
        RepositoryError: The graph is damaged.
    """
    conversion = version.manifest.conversion if version.manifest else None
    if version.adoption:
        limits = adopted_limits(version.adoption)
    else:
        limits = REPLAY[conversion.precision if conversion else read_outline(version.graph_path).precision]
    return replace(limits, name=f"{limits.name} through the server")


def check_golden(
    session: Computation,
    golden: GoldenSamples,
    limits: Limits,
    largest_batch: int,
    reading: Reading | None = None,
    *,
    shuffle: bool = False,
) -> Verification:
    """Check the golden outputs sample by sample and in the largest batch, on the session that will serve.

    Args:
        session: The session.
        golden: Samples and the saved graph's outputs for them.
        limits: Policy row.
        largest_batch: Batch size to fill by repeating samples, if the first dimension is dynamic.
        reading: Interpretation of the outputs by users, or None.
        shuffle: Also run a batch in random order, which exposes batch parts joined in the wrong order.

    Raises:
        VerificationError: The outputs differ from those of the saved graph; the report has the numbers.
    """
    alone = joined([session.run(feeds) for feeds in golden.feeds])
    verification = prove(golden.graph_outputs, alone, limits, batch_sizes=(1,), reading=reading, samples=golden.count)
    if golden.whole:
        return verification
    dynamic = all(spec.batchable for spec in session.signature.inputs)
    if shuffle and dynamic and largest_batch > 1:
        shuffled = golden.shuffled(largest_batch)
        computed = session.run(shuffled.inputs)
        prove(shuffled.graph_outputs, computed, limits, batch_sizes=(largest_batch,), reading=reading)
    size = max(largest_batch, golden.count) if dynamic else golden.count
    together = session.run(golden.batch(size))
    return prove(repeated(golden.graph_outputs, size), together, limits, batch_sizes=(1, size), reading=reading)


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Samples that verify a session again while it serves.

    One sample is run at a time, so that a request waits for at most one. A session that computes parts of a batch in
    parallel also replays one batch, because a single sample does not expose parts joined in the wrong order.

    Attributes:
        session: The session. Not thread-safe: nothing else may run on it during a sample.
        samples: Feeds of each run.
        reference: Expected outputs of all runs, joined in order.
        limits: Policy row.
        reading: Interpretation of the outputs by users, or None.
        batch_sizes: Batch sizes of the runs, for the verdict.
    """

    session: Computation
    samples: tuple[Arrays, ...]
    reference: Arrays
    limits: Limits
    reading: Reading | None = None
    batch_sizes: tuple[int, ...] = (1,)

    @classmethod
    def of_golden(
        cls,
        session: Computation,
        golden: GoldenSamples,
        limits: Limits,
        reading: Reading | None = None,
        *,
        together: int = 1,
    ) -> Replay:
        """Replay golden samples.

        Args:
            session: The session.
            golden: Samples and the saved graph's outputs for them.
            limits: Policy row.
            reading: Interpretation of the outputs by users, or None.
            together: Size of a batch to replay as well, or 1 for none.
        """
        reference = golden.graph_outputs
        alone = cls(session=session, samples=golden.feeds, reference=reference, limits=limits, reading=reading)
        if together < 2:
            return alone
        shuffled = golden.shuffled(together)
        return replace(
            alone,
            samples=(*golden.feeds, shuffled.inputs),
            reference=joined((reference, shuffled.graph_outputs)),
            batch_sizes=(1, together),
        )

    @classmethod
    def recorded(
        cls, session: Computation, limits: Limits, feeds: Arrays, runs: int = 3, earlier: Arrays | None = None
    ) -> Replay | None:
        """Record the current outputs for a synthetic request, and use them as the reference of later replays.

        The outputs may be wrong, but they must not change. Returns None if the graph fails on the request or is not
        deterministic, to avoid false alarms.

        Args:
            session: The session, verified and warm.
            limits: Policy row.
            feeds: The request.
            runs: Number of runs that must give identical bits.
            earlier: Outputs of the first of these runs, if it was already made.
        """
        try:
            made = [earlier] if earlier else []
            first, *others = made + [session.run(feeds) for _ in range(runs - len(made))]
            replay = cls(session=session, samples=(feeds,), reference=first, limits=limits)
            replay.judge([first])
        except (GraphkilnError, TypeError, ValueError):
            return None
        same = all(_same_bits(first[name], other[name]) for other in others for name in first)
        return replay if same else None

    @property
    def output_subsets(self) -> tuple[tuple[str, ...], ...]:
        """Outputs of each graph that serves: the whole graph, and the graphs of a `SubsetSession`."""
        return (tuple(self.reference), *getattr(self.session, "parts", ()))

    def run(self, sample: int, outputs: Sequence[str]) -> Arrays:
        """Run one sample.

        Raises:
            GraphkilnError: The engine fails.
        """
        token = PLAIN_RUNS.set(True)
        try:
            return self.session.run(self.samples[sample], outputs)
        finally:
            PLAIN_RUNS.reset(token)

    def judge(self, computed: Sequence[Arrays]) -> Verification:
        """Compare the outputs of all runs with the reference.

        Args:
            computed: Results of `run` for each of `samples` in order, for the same outputs.

        Raises:
            VerificationError: The outputs differ; the report has the numbers.
        """
        found = joined(computed)
        reference = {name: array for name, array in self.reference.items() if name in found}
        sizes, samples = self.batch_sizes, len(self.samples)
        return prove(reference, found, self.limits, batch_sizes=sizes, reading=self.reading, samples=samples)


def _same_bits(first: AnyArray, second: AnyArray) -> bool:
    if first.dtype == DType.BYTES.numpy:
        return bool(np.array_equal(first, second))
    return first.shape == second.shape and first.tobytes() == second.tobytes()
