"""Which steps to try for a graph, in order, and which were rejected and why. Pure: nothing is built here."""

from __future__ import annotations

from dataclasses import dataclass

from graphkiln.engines.base import Step


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweringPlan:
    """The steps to try, best first.

    Attributes:
        steps: What to try.
        rejected: One line per choice that was not taken, with the reason.
    """

    steps: tuple[Step, ...]
    rejected: tuple[str, ...] = ()

    def explain(self) -> str:
        """Every choice and every rejection, a line each."""
        chosen = [
            f"{number}. {step.engine} on {step.device}, {step.threads} threads, "
            f"idle threads {'spin' if step.spin else 'sleep'}: {step.reason}"
            for number, step in enumerate(self.steps, start=1)
        ]
        return "\n".join((*chosen, *(f"rejected: {line}" for line in self.rejected)))


def plan(*, cores: int, instances: int) -> LoweringPlan:
    """Plans a saved graph on the CPU.

    Args:
        cores: Cores that all instances of the model may use together.
        instances: How many instances share them.
    """
    threads = max(1, cores // instances)
    return LoweringPlan(
        steps=(
            Step(
                engine="onnxruntime",
                device="cpu",
                threads=threads,
                spin=False,
                reason=f"{cores} cores shared by {instances} instance{'s' if instances > 1 else ''}",
            ),
        )
    )
