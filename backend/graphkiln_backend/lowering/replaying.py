"""Replay samples on a session that serves: one at a time, so that a request waits for one at most.

A session that computes parts of a batch side by side also gets one batch: a single sample would not show parts that are
mixed up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from graphkiln_backend.engines.base import PLAIN_RUNS, Session
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.golden import GoldenSamples, joined
from graphkiln_backend.graph.manifest import Verification
from graphkiln_backend.graph.task import Reading
from graphkiln_backend.lowering.output_subsets import SubsetSession
from graphkiln_backend.proof.comparison import prove
from graphkiln_backend.proof.policy import Limits

Arrays = Mapping[str, AnyArray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """Samples that prove a session again while it serves, by the policy that it was proven by before.

    Attributes:
        session: The session. Not thread-safe: nothing else may run while a sample does.
        samples: Feeds of each run: one sample, or the batch.
        reference: Right outputs of all runs, joined in order.
        limits: Largest differences of the outputs.
        reading: Interpretation of the outputs by users, or None.
        batch_sizes: Rows of the runs, for the verdict.
    """

    session: Session
    samples: tuple[Arrays, ...]
    reference: Arrays
    limits: Limits
    reading: Reading | None = None
    batch_sizes: tuple[int, ...] = (1,)

    @classmethod
    def of_golden(
        cls,
        session: Session,
        golden: GoldenSamples,
        limits: Limits,
        reading: Reading | None = None,
        *,
        together: int = 1,
    ) -> Replay:
        """Replay a version's golden samples.

        Args:
            session: The session.
            golden: Samples, and the outputs of the saved graph for them.
            limits: Largest differences of the outputs.
            reading: Interpretation of the outputs by users, or None.
            together: Rows of the batch whose parts are computed side by side; 1 for no batch.
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
        cls, session: Session, limits: Limits, feeds: Arrays, runs: int = 3, earlier: Arrays | None = None
    ) -> Replay | None:
        """Record what the session computes now for a request that was made up, without golden samples.

        It may be wrong, but later it must be the same. None where the graph does not run on it, or does not compute the
        same twice, so that no fault is reported by mistake.

        Args:
            session: The session, proven and warm.
            limits: Largest differences of the outputs.
            feeds: The request.
            runs: Number of runs that must give the same bits.
            earlier: Outputs of the first of them, where it was made before.
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
        """Outputs of each graph that serves: of the whole one, and of the parts that were requested."""
        whole = tuple(self.reference)
        parts = self.session.parts if isinstance(self.session, SubsetSession) else ()
        return (whole, *parts)

    def run(self, sample: int, outputs: Sequence[str]) -> Arrays:
        """Compute some outputs of one run.

        Raises:
            GraphkilnError: The engine fails.
        """
        token = PLAIN_RUNS.set(True)
        try:
            return self.session.run(self.samples[sample], outputs)
        finally:
            PLAIN_RUNS.reset(token)

    def judge(self, computed: Sequence[Arrays]) -> Verification:
        """Judge the outputs of all runs by the policy.

        Args:
            computed: What `run` returned for each of `samples` in order, for the same outputs.

        Raises:
            VerificationError: They are not the right ones; the report has the numbers.
        """
        found = joined(computed)
        reference = {name: array for name, array in self.reference.items() if name in found}
        sizes, samples = self.batch_sizes, len(self.samples)
        return prove(reference, found, self.limits, batch_sizes=sizes, reading=self.reading, samples=samples)


def _same_bits(first: AnyArray, second: AnyArray) -> bool:
    if first.dtype == DType.BYTES.numpy:
        return bool(np.array_equal(first, second))
    return first.shape == second.shape and first.tobytes() == second.tobytes()
