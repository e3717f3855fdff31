"""What the driver of a run knows of its model, read once, before the destination is touched; workers read it again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.graph.cores import usable_cores
from graphkiln_backend.scoring.model import read_model
from graphkiln_backend.scoring.model_fetch import with_local_model
from graphkiln_backend.scoring.request import ScoreRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class RunModel:
    """The model of a run.

    Attributes:
        request: The run, with the number of its version.
        configuration: Digest of all that changes an answer.
        on_gpu: Whether it runs on a GPU where there is one.
    """

    request: ScoreRequest
    configuration: str
    on_gpu: bool


def read_run_model(request: ScoreRequest, folder: Path) -> RunModel:
    """Fetches and reads the model of a run.

    A graph of another framework is converted into the run's own cache, where workers of this machine find it.

    Args:
        request: The run.
        folder: For what is fetched, and for a cache that vanishes.

    Raises:
        GraphkilnError: There is no such version, it does not say how an image becomes its input, or it has no output of
            a name that is given.
    """
    with CacheSettings(folder=request.cache).checked().open(folder / "cache") as cache:
        local = with_local_model(request, folder)
        model = read_model(local, cache, usable_cores())
        model.encoder(local)
        return RunModel(
            request=replace(request, version=local.version),
            configuration=model.configuration(request),
            on_gpu=model.wants_gpu,
        )
