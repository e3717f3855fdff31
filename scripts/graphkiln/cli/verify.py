"""`graphkiln verify`: prove a version again."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.cli.console import print_json
from graphkiln.cli.options import COMPUTE_LIMIT_S, Cache, ComputeLimit
from graphkiln.cli.remote_paths import local_path
from graphkiln.cli.signers import NOT_SIGNED, TrustedKeysOption, check_signers
from graphkiln.cli.split_proof import SplitProof, prove_split, requested_split
from graphkiln.cli.version_paths import version_folder
from graphkiln_backend.engines.compute_limit import limit_computing
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.text import did_you_mean

if TYPE_CHECKING:
    from graphkiln_backend.engines.base import Placement
    from graphkiln_backend.graph.manifest import Verification


def verify(
    path: Annotated[
        str, typer.Argument(help="Version folder, or model folder (its newest version); also s3:// and others.")
    ],
    engine: Annotated[str, typer.Option(help="onnxruntime or openvino.")] = "onnxruntime",
    precision: Annotated[
        str, typer.Option(help="Row of the policy to hold it to.", show_default="the one it was saved in")
    ] = "",
    samples: Annotated[Path | None, typer.Option(help="More samples: folder of images, or .npz.")] = None,
    trusted_keys: TrustedKeysOption = None,
    cache: Cache = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
    compute_limit: ComputeLimit = COMPUTE_LIMIT_S,
) -> None:
    """Prove a version again on an engine of this machine.

    Where its config.pbtxt says `parallel`, its stages and shards are then built as the server builds them, and proven,
    too. Exit code 1 when its outputs are no longer those of the source model, 2 when its files are not those that were
    signed, or that the manifest describes.
    """
    from graphkiln_backend.graph.decoding import encode
    from graphkiln_backend.graph.precision import SAVED, Precision
    from graphkiln_backend.repository.version import read_version
    from graphkiln_backend.system.resources import usable_cores
    from graphkiln_converters.verify import verify as run

    if precision and precision not in SAVED:
        raise RepositoryError(f"unknown precision '{precision}'", hint=did_you_mean(precision, SAVED))
    row, split = Precision(precision) if precision else None, None
    with local_path(path) as folder, limit_computing(compute_limit):
        version = version_folder(folder)
        signed = check_signers(version, trusted_keys)
        verified = run(read_version(version), engine=engine, precision=row, samples=samples, threads=usable_cores())
        if not as_json:
            _show(verified.verdicts, verified.placement)
        if requested_split(version):
            split = prove_split(version, cache, precision=row, samples=samples)
    if as_json:
        spread = {"parallel": split.document() if split else None}
        print_json({**encode(verified), **spread, "signed": signed})
        return
    if split:
        _show_split(split)
    if signed != NOT_SIGNED:
        typer.echo(f"signed: {signed}")


def _show(verdicts: Iterable[Verification], placement: Placement | None) -> None:
    for verdict in verdicts:
        typer.echo(verdict.verdict)
    if placement:
        nodes = ", ".join(f"{count} nodes on {name}" for name, count in placement.nodes.items())
        typer.echo(f"ran: {nodes}, mostly in {placement.precision}")


def _show_split(split: SplitProof) -> None:
    typer.echo("\n".join(split.plan))
    if not split.verdicts:
        typer.echo("each instance computes the whole graph, which is proven above")
    _show(split.verdicts, split.placement)
