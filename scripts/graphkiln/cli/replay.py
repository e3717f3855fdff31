"""`graphkiln replay`: answer recorded requests again with a version, and compare the answers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from graphkiln.cli.console import Html, check_html, command_line, facts, print_json, progress_bar, write_html
from graphkiln.cli.options import COMPUTE_LIMIT_S, AsJson, Cache, Set, local_path, version_folder
from graphkiln_backend.engines.compute_limit import limit_computing
from graphkiln_backend.graph.text import parse_duration
from graphkiln_backend.repository.version_folders import is_version


def replay(
    record: Annotated[Path, typer.Argument(help="Folder of serve --record, or of one model in it.", metavar="DIR")],
    model: Annotated[
        str, typer.Option(help="STORE/NAME (newest version) or STORE/NAME:VERSION; also s3:// and others.")
    ],
    since: Annotated[
        str, typer.Option(help="Only requests of this last time, such as 2h.", metavar="TIME", show_default="all")
    ] = "",
    limit: Annotated[
        int | None, typer.Option(help="Only the newest N requests.", min=1, metavar="N", show_default="all")
    ] = None,
    set_: Set = None,
    cache: Cache = "",
    html: Html = None,
    as_json: AsJson = False,
) -> None:
    """Answer recorded requests again with a version.

    The version is built as the server builds it. Its answers are compared with
    the recorded ones by what they decide (top-1 class, boxes, class map, cosine
    of vectors) and by the numeric policy.

    Exit code 1 if a decision changed, or a request could not be answered.
    """
    from graphkiln.cli.lower import open_artifact_cache, read_deployment
    from graphkiln.cli.replay_report import document_of, print_replay, render_page
    from graphkiln.cli.replaying import replay_record
    from graphkiln_backend.repository.records import Record

    check_html(html)
    since_ns = time.time_ns() - int(parse_duration(since, "--since", "2h") * 1e9) if since else 0
    name, colon, number = model.rpartition(":")
    path = f"{name}/{number}" if colon and is_version(number) else model
    with local_path(path) as folder, limit_computing(COMPUTE_LIMIT_S), open_artifact_cache(cache) as artifacts:
        version = version_folder(folder).absolute()
        found = Record.find(record, version.parent.name)
        deployment = read_deployment(version, set_, artifacts)
        with progress_bar("replaying", None) as update:
            replayed = replay_record(
                found, deployment, deployment.build(artifacts), since_ns=since_ns, limit=limit, update=update
            )
    document = document_of(replayed, record, version)
    if as_json:
        print_json(document)
    else:
        print_replay(document)
    if html:
        write_html(html, render_page(document, replayed, facts(), command_line()))
    raise typer.Exit(0 if replayed.same == replayed.count else 1)
