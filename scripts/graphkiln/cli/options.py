"""The options that several verbs share."""

from __future__ import annotations

from typing import Annotated

import typer

from graphkiln_backend.engines.compute_limit import DEFAULT_COMPUTE_LIMIT_S

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Cache = Annotated[
    str,
    typer.Option(
        help="Folder for lowered graphs and compiled artifacts, or 'off'.",
        envvar="GRAPHKILN_CACHE",
        show_default="~/.cache/graphkiln",
    ),
]
ComputeLimit = Annotated[
    float,
    typer.Option(
        "--compute-limit", help="How long one batch may take before the command gives up.", metavar="SECONDS", min=0.1
    ),
]
COMPUTE_LIMIT_S = DEFAULT_COMPUTE_LIMIT_S
