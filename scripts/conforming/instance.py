"""Cases as an instance computes them, in this process: from a version's folder to an answer, without a server."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from conforming.cases import Case
from conforming.models import write_model
from conforming.outcome import PASSED, Outcome, Verdict
from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.registry import probe
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.lowering.deployment import Deployment
from graphkiln_backend.lowering.plan import Resources
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.version import CONFIG_FILE


def ask_openvino(cases: Sequence[Case]) -> Iterator[tuple[Case, Outcome]]:
    """What becomes of cases whose configuration says `engine: openvino`.

    Yields:
        An outcome for each case.
    """
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="conforming-") as folder:
            yield case, _ask_engine(case, Path(folder), "openvino")


def ask_instance(case: Case, version: Path) -> Outcome:
    """What a version computes of a case, once it is proven as it is before it serves.

    Args:
        case: The case.
        version: Folder of the version, in a model's folder with a complete configuration.
    """
    config = ModelConfig.read(version.parent / CONFIG_FILE, has_gpu=False)
    with (
        tempfile.TemporaryDirectory(prefix="conforming-") as folder,
        ArtifactCache(Path(folder), lasting=False) as cache,
    ):
        try:
            deployment = Deployment.read(version, config, Resources(device=CPU, cores=1, probe=probe))
            session = deployment.build(cache).session
        except GraphkilnError as error:
            return Outcome.of(Verdict.REFUSED, error)
        with session:
            for sample in range(len(case.samples)):
                try:
                    outputs = session.run(case.feeds(sample))
                except GraphkilnError as error:
                    return Outcome.of(Verdict.FAILS, error)
                if difference := case.difference(sample, outputs):
                    return Outcome.of(Verdict.DIFFERS, difference)
    return PASSED


def _ask_engine(case: Case, store: Path, engine: str) -> Outcome:
    try:
        model = write_model(case, store, engine)
    except GraphkilnError as error:
        return Outcome.of(Verdict.REFUSED, error)
    return ask_instance(case, model / "1")
