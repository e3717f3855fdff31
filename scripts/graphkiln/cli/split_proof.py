"""What `verify` proves beside the whole graph: a version that is spread over devices, as it would be served."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphkiln_backend.graph.decoding import encode

if TYPE_CHECKING:
    from graphkiln_backend.engines.base import Placement
    from graphkiln_backend.graph.manifest import Verification
    from graphkiln_backend.graph.precision import Precision

_KEY = "parallel"


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitProof:
    """What was proven of a version that is spread over devices.

    Attributes:
        plan: What each device computes and holds, a line each.
        verdicts: One for each reference; none where every instance has the whole graph.
        placement: What the engines report that they ran.
    """

    plan: tuple[str, ...]
    verdicts: tuple[Verification, ...] = ()
    placement: Placement | None = None

    def document(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "plan": list(self.plan),
            "verdicts": [encode(verdict) for verdict in self.verdicts],
            "placement": encode(self.placement) if self.placement else None,
        }


def requested_split(version: Path) -> str:
    """The value of `parallel` in the configuration of a version's model; empty where there is none.

    Args:
        version: The version folder.

    Raises:
        RepositoryError: The configuration cannot be read.
    """
    from graphkiln_backend.repository.model_config import ModelConfig
    from graphkiln_backend.repository.version import CONFIG_FILE

    config = ModelConfig.read(version.absolute().parent / CONFIG_FILE, has_gpu=False)
    return config.parameters.get(_KEY, "")


def prove_split(version: Path, cache: str, *, precision: Precision | None, samples: Path | None) -> SplitProof:
    """Builds a version as the server would, stages and shards among them, and compares what it computes.

    Args:
        version: The version folder; its model's configuration says `parallel`.
        cache: Folder of the artifact cache, which keeps the parts.
        precision: Row of the policy; None for the one that the graph was saved in.
        samples: More samples, a folder of images or an .npz, or None.

    Raises:
        LoweringError: It cannot be spread on this machine as it says, or its golden samples refuse it.
        VerificationError: The outputs changed.
        ConversionError: The samples cannot be read.
    """
    from graphkiln.cli.deployed import open_artifact_cache, read_deployment
    from graphkiln_converters.verify import verify_session

    with open_artifact_cache(cache) as artifacts:
        deployment = read_deployment(version, None, artifacts)
        plan = tuple(deployment.plan.spread.splitlines())
        if not any(config.splits for config in deployment.plan.candidates):
            return SplitProof(plan=plan)
        proven = deployment.build(artifacts)
        with proven.session:
            name = f"{proven.config.engine} with {proven.config.parallel}"
            verdicts = verify_session(deployment.version, proven.session, name, precision=precision, samples=samples)
    return SplitProof(plan=plan, verdicts=verdicts, placement=proven.placement)
