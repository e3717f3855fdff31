"""`graphkiln verify`: repeat the proof of a version, with its stages and shards if it is spread over devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphkiln.cli.console import print_json
from graphkiln.cli.options import (
    COMPUTE_LIMIT_S,
    AsJson,
    Cache,
    ComputeLimit,
    local_path,
    read_any_version,
    version_folder,
)
from graphkiln.cli.sign import NOT_SIGNED, TrustedKeysOption, check_signers
from graphkiln_backend.engines.compute_limit import limit_computing
from graphkiln_backend.graph.decoding import encode
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.text import did_you_mean

if TYPE_CHECKING:
    from graphkiln_backend.engines.base import Placement, SessionTuning
    from graphkiln_backend.graph.manifest import Verification
    from graphkiln_backend.graph.precision import Precision


def verify(
    path: Annotated[
        str, typer.Argument(help="Version folder, or model folder (its newest version); also s3:// and others.")
    ],
    engine: Annotated[
        str,
        typer.Option(help="onnxruntime or openvino.", show_default="onnxruntime; openvino for its own format"),
    ] = "",
    precision: Annotated[
        str, typer.Option(help="Row of the policy that applies.", show_default="the one it was saved in")
    ] = "",
    samples: Annotated[Path | None, typer.Option(help="More samples: folder of images, or .npz.")] = None,
    trusted_keys: TrustedKeysOption = None,
    cache: Cache = "",
    as_json: AsJson = False,
    compute_limit: ComputeLimit = COMPUTE_LIMIT_S,
) -> None:
    """Prove a version again on an engine of this machine.

    With `parallel` in config.pbtxt, its stages and shards are built as the server builds them, and proven, too.
    Exit code 1 if its outputs differ from those of the source model, 2 if its files differ from the signature or the
    manifest.
    """
    from graphkiln_backend.graph.precision import SAVED, Precision
    from graphkiln_backend.system.resources import usable_cores
    from graphkiln_converters.verify import verify as run

    if precision and precision not in SAVED:
        raise RepositoryError(f"unknown precision '{precision}'", hint=did_you_mean(precision, SAVED))
    row, split = Precision(precision) if precision else None, None
    with local_path(path) as folder, limit_computing(compute_limit):
        version = version_folder(folder)
        signed = check_signers(version, trusted_keys)
        tuning, libraries = read_session_settings(version)
        verified = run(
            read_any_version(version),
            engine=engine,
            precision=row,
            samples=samples,
            threads=usable_cores(),
            tuning=tuning,
            op_libraries=libraries,
        )
        if not as_json:
            _show(verified.verdicts, verified.placement)
        if requested_split(version):
            split = prove_split(version, cache, precision=row, samples=samples)
    if as_json:
        print_json({**encode(verified), "parallel": split and split.document(), "signed": signed})
        return
    if split:
        typer.echo("\n".join(split.plan))
        if not split.verdicts:
            typer.echo("each instance computes the whole graph, which is proven above")
        _show(split.verdicts, split.placement)
    if signed != NOT_SIGNED:
        typer.echo(f"signed: {signed}")


def _show(verdicts: Iterable[Verification], placement: Placement | None) -> None:
    for verdict in verdicts:
        typer.echo(verdict.verdict)
    if placement:
        nodes = ", ".join(f"{count} nodes on {name}" for name, count in placement.nodes.items())
        typer.echo(f"ran: {nodes}, mostly in {placement.precision}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitProof:
    """Proof of a version that is spread over devices.

    Attributes:
        plan: Work and contents of each device, a line each.
        verdicts: Verdict for each reference; empty if every instance has the whole graph.
        placement: Nodes that ran, as reported by the engines.
    """

    plan: tuple[str, ...]
    verdicts: tuple[Verification, ...] = ()
    placement: Placement | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "plan": list(self.plan),
            "verdicts": [encode(verdict) for verdict in self.verdicts],
            "placement": encode(self.placement) if self.placement else None,
        }


def read_session_settings(version: Path) -> tuple[SessionTuning, tuple[str, ...]]:
    """Return what a server would give the session of a version: tuning, and libraries of custom operators.

    Raises:
        RepositoryError: The configuration cannot be read, or names an unknown setting or a missing library.
    """
    from graphkiln_backend.lowering.deployment import find_library
    from graphkiln_backend.lowering.settings import Settings
    from graphkiln_backend.repository.model_config import ModelConfig
    from graphkiln_backend.repository.version import CONFIG_FILE

    model = version.absolute().parent
    config = ModelConfig.read(model / CONFIG_FILE, has_gpu=False)
    libraries = tuple(find_library(name, model) for name in config.op_libraries)
    return Settings.from_config(config, config.device).tuning, libraries


def requested_split(version: Path) -> str:
    """Return the value of `parallel` in the configuration of a version's model, or "".

    Raises:
        RepositoryError: The configuration cannot be read.
    """
    from graphkiln_backend.repository.model_config import ModelConfig
    from graphkiln_backend.repository.version import CONFIG_FILE

    config = ModelConfig.read(version.absolute().parent / CONFIG_FILE, has_gpu=False)
    return config.parameters.get("parallel", "")


def prove_split(version: Path, cache: str, *, precision: Precision | None, samples: Path | None) -> SplitProof:
    """Build a version as the server would, with stages and shards, and compare its outputs.

    Raises:
        LoweringError: It cannot be spread on this machine as configured, or fails its golden samples.
        VerificationError: The outputs changed.
        ConversionError: The samples cannot be read.
    """
    from graphkiln.cli.lower import open_artifact_cache, read_deployment
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
