"""Which steps to try for a graph, in order, and which were rejected and why. Pure: nothing is built here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graphkiln.engines.base import Step
from graphkiln.lowering.settings import Settings


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


def plan(
    settings: Settings, *, device: str, cores: int, instances: int, shared_folder: Path | None = None
) -> LoweringPlan:
    """Plans a saved graph.

    Args:
        settings: What the configuration asks for.
        device: `"cpu"` or `"gpu:0"`.
        cores: Cores that all instances of the model may use together.
        instances: How many instances share them.
        shared_folder: Where instances can put what they share, or None.
    """
    shared = f"{cores} cores shared by {instances} instance{'s' if instances > 1 else ''}"
    step = Step(
        engine="onnxruntime" if settings.engine == "auto" else settings.engine,
        device=device,
        threads=settings.threads or max(1, cores // instances),
        # Threads that spin answer sooner (ResNet-50 +2%, MobileNetV3-small +37% at one request a time), but instances
        # that share cores would take them from each other.
        spin=instances == 1,
        reason=", ".join(filter(None, (settings.engine_from and f"asked for by {settings.engine_from}", shared))),
        tuning=settings.tuning,
        shared_folder=shared_folder if instances > 1 else None,
        accelerator=settings.accelerator,
    )
    return LoweringPlan(steps=(step,))
