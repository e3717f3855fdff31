"""Golden samples on a session that serves: one sample at a time, so that a request waits for one at most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from graphkiln_backend.engines.base import PLAIN_RUNS, Session
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import Verification
from graphkiln_backend.graph.ranking import Ranking
from graphkiln_backend.lowering.output_subsets import SubsetSession
from graphkiln_backend.proof.comparison import prove
from graphkiln_backend.proof.policy import Limits

Outputs = Mapping[str, AnyArray]


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldenReplay:
    """What is needed to prove a session again while it serves, by the policy that it was proven by before.

    Attributes:
        session: The session. Not thread-safe: whoever runs a sample sees to it that nothing else runs.
        golden: Samples, and the outputs of the saved graph for them.
        limits: How far the outputs may be apart.
        ranking: Which outputs hold the best classes, of a graph that ranks them itself, or None.
    """

    session: Session
    golden: GoldenSamples
    limits: Limits
    ranking: Ranking | None = None

    @property
    def samples(self) -> int:
        """How many samples there are."""
        return len(next(iter(self.golden.inputs.values())))

    @property
    def output_subsets(self) -> tuple[tuple[str, ...], ...]:
        """The outputs of each graph that serves: of the whole one, and of the parts that were requested."""
        whole = tuple(self.golden.graph_outputs)
        parts = self.session.parts if isinstance(self.session, SubsetSession) else ()
        return (whole, *parts)

    def run(self, sample: int, outputs: Sequence[str]) -> Outputs:
        """Computes some outputs of one sample.

        Raises:
            GraphkilnError: The engine fails.
        """
        feeds = {name: array[sample : sample + 1] for name, array in self.golden.inputs.items()}
        token = PLAIN_RUNS.set(True)
        try:
            return self.session.run(feeds, outputs)
        finally:
            PLAIN_RUNS.reset(token)

    def judge(self, computed: Sequence[Outputs]) -> Verification:
        """Holds the outputs of all samples to the policy.

        Args:
            computed: What `run` returned for each sample in order, for the same outputs.

        Raises:
            VerificationError: They are not those of the saved graph; the report has the numbers.
        """
        alone = {name: np.concatenate([outputs[name] for outputs in computed]) for name in computed[0]}
        reference = self.golden.only(alone).graph_outputs
        return prove(reference, alone, self.limits, batch_sizes=(1,), ranking=self.ranking)
