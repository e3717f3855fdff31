"""Step 2: a session in the process, which does only what is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln.story.workloads.base import Predictions, Predictor, load_batch
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.preprocess import Preprocess

if TYPE_CHECKING:
    from graphkiln_backend.engines.base import Session


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionWorkload:
    """A saved graph; one image at a time.

    Attributes:
        graph: Scores, and the gradient with respect to the image where requested.
        preprocess: How an image becomes the input.
        device: Where it runs.
    """

    graph: Path
    preprocess: Preprocess
    device: Device

    @contextmanager
    def open(self) -> Iterator[Predictor]:
        """See `Workload`."""
        with open_session(self.graph, self.device) as session:
            yield Predictor(
                run_one=lambda jpeg: session.run({"INPUT_0": load_batch([jpeg], self.preprocess)}),
                predict=lambda jpegs: predict_one_by_one(session, jpegs, self.preprocess, outputs=2),
            )


@contextmanager
def open_session(graph: Path, device: Device) -> Iterator[Session]:
    """Builds a session with the default settings: ONNX Runtime in fp32, all cores."""
    from graphkiln_backend.engines.registry import load_engine, probe
    from graphkiln_backend.lowering.plan import Resources, plan
    from graphkiln_backend.lowering.settings import Settings
    from graphkiln_backend.system.resources import usable_cores

    (config,) = plan(Settings(), Resources(device=device, cores=usable_cores(), probe=probe)).candidates
    with load_engine(config.engine).build(graph, config) as session:
        yield session


def predict_one_by_one(
    session: Session, jpegs: Sequence[bytes], preprocess: Preprocess, *, outputs: int
) -> Predictions:
    """Predictions of a session, one image at a time, as it is measured.

    Args:
        session: Of a graph with the input `INPUT_0`.
        jpegs: The images.
        preprocess: How an image becomes the input.
        outputs: How many of the graph's outputs count, in their order: 1 for scores, 2 with the gradient.
    """
    rows = []
    for jpeg in jpegs:
        arrays = list(session.run({"INPUT_0": load_batch([jpeg], preprocess)}).values())
        rows.append({f"OUTPUT_{number}": array for number, array in enumerate(arrays[:outputs])})
    return Predictions.concatenate(rows)
