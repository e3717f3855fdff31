"""`graphkiln score`: answer each row of a data set exactly once, on this machine or on a Ray cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from graphkiln.cli.console import Html, check_html, command_line, facts, say, write_html
from graphkiln.cli.options import Cache, Set
from graphkiln.cli.score_display import ProgressMode, open_display
from graphkiln_backend.graph.errors import InvalidInput

if TYPE_CHECKING:
    from graphkiln_backend.scoring.messages import ScoreRequest


def score(
    source: Annotated[
        str,
        typer.Argument(
            help="Folder or pattern of images, .txt listing, .parquet, Delta table, .tar shards, postgresql:// query, "
            "or iceberg:CATALOG/NAMESPACE.TABLE; local, on s3:// or gs://.",
            show_default=False,
        ),
    ] = "",
    model: Annotated[
        str, typer.Option(help="STORE/NAME (newest version) or STORE/NAME:VERSION; also on s3:// and other stores.")
    ] = "",
    out: Annotated[
        str,
        typer.Option(
            "--out",
            "--destination",
            help="Folder, s3:// or gs:// for Parquet files, a table by postgresql://HOST/DB?table=T "
            "or iceberg:CATALOG/SPACE.TABLE.",
            metavar="DEST",
        ),
    ] = "",
    address: Annotated[
        str, typer.Option(help="Address of a Ray cluster, such as auto.", show_default="this machine alone")
    ] = "",
    workers: Annotated[int, typer.Option(help="Maximum number of workers.", show_default="as many as fit", min=0)] = 0,
    cores_per_worker: Annotated[
        int, typer.Option(help="Cores of each worker.", show_default="all of a node", min=0)
    ] = 0,
    settings: Set = None,
    top_k: Annotated[int | None, typer.Option(help="Classes per row.", min=1, show_default="5")] = None,
    scores: Annotated[bool, typer.Option("--scores", help="Write the scores of all classes instead.")] = False,
    outputs: Annotated[
        list[str] | None,
        typer.Option("--output", help="Write this output unchanged instead; may be repeated.", metavar="NAME"),
    ] = None,
    softmax: Annotated[bool, typer.Option("--softmax", help="Turn scores into probabilities.")] = False,
    keep_columns: Annotated[
        str, typer.Option(help="Input columns to copy to the output.", metavar="NAME,...", show_default="none")
    ] = "",
    image_column: Annotated[
        str, typer.Option(help="Column with the image or its path.", metavar="NAME", show_default="detected")
    ] = "",
    id_column: Annotated[
        str, typer.Option(help="Column with the row id.", metavar="NAME", show_default="detected, or a number")
    ] = "",
    query: Annotated[
        str, typer.Option(help="Table or SELECT of a postgresql:// source.", metavar="SQL", show_default="none")
    ] = "",
    rows_per_unit: Annotated[
        int, typer.Option(help="Approximate number of rows that are committed together.", min=1)
    ] = 1000,
    cache: Cache = "",
    ledger: Annotated[
        str,
        typer.Option(
            help="postgresql:// database that records commits, for a store without conditional writes.",
            metavar="URL",
            show_default="none",
        ),
    ] = "",
    format: Annotated[  # noqa: A002 - the name of the option
        str, typer.Option(help="parquet or delta.", metavar="FORMAT", show_default="by DEST")
    ] = "",
    replace: Annotated[bool, typer.Option("--replace", help="Remove results whose input has changed.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Write nothing; measure some rows on this machine and estimate the duration."),
    ] = False,
    progress: Annotated[
        ProgressMode, typer.Option(help="A live table or lines on stderr, JSON lines on stdout, or nothing.")
    ] = ProgressMode.AUTO,
    html: Html = None,
    verify: Annotated[
        str,
        typer.Option(
            help="Check the results in this destination instead of scoring.", metavar="DEST", show_default=False
        ),
    ] = "",
) -> None:
    """Score a whole data set, each row exactly once.

    The same command resumes an interrupted run: rows that have an answer are
    not computed again. The exit code is 0 only if every row has an answer or
    an error with a reason; with --verify, 1 if results are missing or damaged.
    """
    given = locals()
    from graphkiln.scoring import check_extra

    check_extra()
    check_html(html)
    if html and (verify or dry_run):
        raise InvalidInput("--html needs a run", hint="leave out --html, --verify or --dry-run")
    if verify:
        needless = {"source": source, "--model": model, "--out": out, "--dry-run": dry_run, "--replace": replace}
        for name, value in needless.items():
            if value:
                raise InvalidInput(f"--verify {verify} cannot be used with {name} {value}", hint="leave it out")
        _verify(verify, format, ledger, as_json=progress is ProgressMode.JSON)
        return
    for name, value, hint in (
        ("SOURCE", source, "graphkiln score PHOTOS --model STORE/NAME --out ANSWERS"),
        ("--model", model, "--model STORE/NAME"),
        ("--out", out, "--out ANSWERS"),
    ):
        if not value:
            raise InvalidInput(f"{name} is missing", hint=hint)
    from graphkiln_backend.scoring.worker_process import started_early

    with nullcontext() if address or dry_run else started_early():
        _score(given, html=html, mode=progress, dry_run=dry_run)


def _score(given: Mapping[str, Any], *, html: Path | None, mode: ProgressMode, dry_run: bool) -> None:
    from graphkiln.cli.cache import cache_settings
    from graphkiln.scoring.options import ScoreOptions, build_request

    # The parameters of the command have the names of the options of `graphkiln.scoring.score`.
    options = {name: given[name] for name in ScoreOptions.__annotations__ if given[name] is not None}
    options["cache"] = cache_settings(given["cache"], 0).folder
    request = build_request(given["source"], given["model"], given["out"], cast("ScoreOptions", options))
    if dry_run:
        _estimate(request, as_json=mode is ProgressMode.JSON)
    else:
        _run(request, mode, html)


def _run(request: ScoreRequest, mode: ProgressMode, html: Path | None) -> None:
    from graphkiln.cli.score_results import print_summary
    from graphkiln.scoring.running import run_request

    with open_display(mode) as display:
        record = run_request(request, display.show)
    if mode is not ProgressMode.JSON:
        print_summary(record)
    if html:
        from graphkiln.cli.score_results import score_report
        from graphkiln.reporting.report import render

        write_html(html, render(score_report(record, facts(), command_line())))


def _verify(destination: str, format_: str, ledger: str, *, as_json: bool) -> None:
    from graphkiln.cli.score_results import describe_verification, print_verification
    from graphkiln.scoring.running import verify

    verification = verify(destination, format=format_, ledger=ledger)
    if as_json:
        typer.echo(json.dumps(describe_verification(verification, destination), ensure_ascii=False))
    else:
        print_verification(verification, destination)
    raise typer.Exit(0 if verification.ok else 1)


def _estimate(request: ScoreRequest, *, as_json: bool) -> None:
    from graphkiln.cli.score_results import print_estimate
    from graphkiln.scoring.estimation import estimate_request
    from graphkiln_backend.graph.decoding import encode

    estimate = estimate_request(request, lambda text: None if as_json else say(text))
    if as_json:
        typer.echo(json.dumps(encode(estimate), ensure_ascii=False))
    else:
        print_estimate(estimate, request)
