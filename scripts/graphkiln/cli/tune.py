"""`graphkiln tune`: from a target to the configuration that was proven to meet it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.models import OptionInfo

from graphkiln.cli.connection import DEFAULT_CONNECTION, ConnectionOptions, with_connection
from graphkiln.cli.console import print_json, say
from graphkiln.cli.options import AsJson
from graphkiln.cli.report_file import Html, check_html, command_line, write_html
from graphkiln.cli.tune_together import apply_choice, ending_in_order, refuse_options, tune_models
from graphkiln_backend.graph.errors import EngineUnavailable, InvalidInput

# What `graphkiln tune` shows: the space before, each measurement meanwhile, what was found.

if TYPE_CHECKING:
    from graphkiln.tuning.served_before import Left
    from graphkiln.tuning.tuner import Report, Tuning


def show_space(tuning: Tuning, *, as_json: bool, dry_run: bool) -> None:
    """Shows the space before it is searched, and what is to be known before.

    Args:
        tuning: What was asked.
        as_json: Whether the result is printed as JSON.
        dry_run: Whether the space is the result, and not told beside it on stderr.
    """
    from rich.console import Console

    from graphkiln.tuning.tables import print_space

    space = tuning.spanned.space
    document = {
        "axes": {axis.key: axis.values for axis in space.axes},
        "points": space.points,
        "candidates": len(space.candidates),
        "reasons": space.reasons(),
        "left_out": tuning.spanned.left_out,
    }
    if dry_run and as_json:
        print_json(document)
    elif dry_run or not as_json:
        print_space(document, Console() if dry_run else None)
    for line in doubts(tuning):
        say(line)


def doubts(tuning: Tuning) -> Iterator[str]:
    """What is to be known before anything is measured, a line each.

    Args:
        tuning: What was asked.
    """
    from graphkiln.tuning.accuracy_floor import undecided
    from graphkiln.tuning.foreign_server import NOT_THERE

    yield from NOT_THERE if tuning.client else ()
    if doubt := undecided(tuning.questions, tuning.target.accuracy_floor):
        yield doubt
    yield from _left_behind(tuning)
    yield from _not_served(tuning)


def _left_behind(tuning: Tuning) -> Iterator[str]:
    from graphkiln.tuning.served_before import left_behind, one_name

    own = (one_name(tuning.server), tuning.subject.name) if tuning.client else None
    return (_way_back(left) for left in left_behind(tuning.kept) if (left.server, left.model) != own)


def _way_back(left: Left) -> str:
    killed = f"a search was killed that tuned '{left.model}' on {left.server}, and may have left a candidate there"
    return f"{killed}: graphkiln tune STORE/{left.model} --url {left.server} puts back what was there"


def _not_served(tuning: Tuning) -> Iterator[str]:
    from graphkiln.tuning.subject import served_versions

    own, served = tuning.subject.version, served_versions(tuning.subject)
    if own not in served:
        others = ", ".join(map(str, served)) or "none"
        yield f"version {own} is not among those that are served (version_policy: {others}): all this is of it alone"


@contextmanager
def progress_report(tuning: Tuning) -> Iterator[Report]:
    """A progress bar on a terminal, else a line for each measurement.

    Args:
        tuning: What was asked.
    """
    from graphkiln.tuning.progress import line_of

    today = tuning.spanned.space.today
    if not sys.stderr.isatty():
        yield lambda progress: say(line_of(progress, today, tuning.budget_s))
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=16), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=tuning.budget_s)
        yield lambda progress: bar.update(
            task, completed=progress.spent_s, description=line_of(progress, today, tuning.budget_s)
        )


def show_result(document: Mapping[str, Any], *, as_json: bool, html: Path | None) -> None:
    """Prints what was found, and writes its page.

    Args:
        document: As `document_of` makes it.
        as_json: Whether to print JSON, and no table.
        html: Where the page goes; None for no page.

    Raises:
        MeasurementError: The page cannot be written.
    """
    from graphkiln.tuning.page import render_page
    from graphkiln.tuning.tables import print_result

    if as_json:
        print_json(document)
    else:
        print_result(document)
    if html:
        write_html(html, render_page(document))


if TYPE_CHECKING:
    from graphkiln.tuning.result import Result
    from graphkiln.tuning.subject import Subject
    from graphkiln.tuning.target import Target
    from graphkiln.tuning.tuner import Tuning
    from graphkiln_backend.cache.store import ArtifactCache


class Objective(StrEnum):
    """What is best among the configurations that meet the target."""

    THROUGHPUT = "throughput"
    LATENCY = "latency"
    MEMORY = "memory"
    COST = "cost"


_URL: OptionInfo = typer.Option(
    help="A server in explicit mode to tune on: http://HOST:PORT or grpc://HOST:PORT; https and grpcs with TLS.",
    show_default="servers of its own",
)


@with_connection(timeout_s=None, admin=True, url=_URL)
def tune(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="STORE/NAME (its newest version), or STORE/NAME/VERSION; with --share STORE.")
    ],
    p99: Annotated[str, typer.Option(help="What 99 of 100 requests may take, such as 50ms.", metavar="TIME")],
    rate: Annotated[
        str | None,
        typer.Option(
            help="Requests per second that come, such as 200/s.", metavar="RATE", show_default="the most that it takes"
        ),
    ] = None,
    objective: Annotated[
        Objective | None,
        typer.Option(help="What is best among what meets p99.", show_default="throughput; latency with --rate"),
    ] = None,
    accuracy_floor: Annotated[
        str | None,
        typer.Option(help="Most accuracy on labelled --samples that may be lost, such as 0.5%.", metavar="SHARE"),
    ] = None,
    budget: Annotated[str, typer.Option(help="How long measurements may take, such as 20m.", metavar="TIME")] = "20m",
    samples: Annotated[
        Path | None,
        typer.Option(
            help="What requests hold: a folder of images (labelled where its folders are named after labels), or an "
            ".npz with a row for each sample.",
            show_default="the golden samples, or made up",
            metavar="PATH",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Samples, others than --samples, to make an int8 graph with, which is tried, too.",
            show_default="no int8",
            metavar="PATH",
        ),
    ] = None,
    burst: Annotated[int | None, typer.Option(help="Requests come so many at a time.", min=2, metavar="N")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Requests come as this file says (see bench), stretched to each rate.", metavar="FILE"),
    ] = None,
    fix: Annotated[
        list[str] | None,
        typer.Option(help="A key that has this value in every candidate; may be repeated.", metavar="KEY=VALUE"),
    ] = None,
    only: Annotated[
        str, typer.Option(help="Keys that vary; the others stay as they are.", show_default="all", metavar="KEY,...")
    ] = "",
    share: Annotated[
        str,
        typer.Option(
            help="Several models of a store on this machine, with the part of the requests that is each one's.",
            show_default="one model",
            metavar="NAME=SHARE,...",
        ),
    ] = "",
    apply: Annotated[bool, typer.Option("--apply", help="Write what is chosen into the model's config.pbtxt.")] = False,
    price: Annotated[
        float | None, typer.Option(help="Of an hour of this machine: what 1,000 requests cost is told.", min=0)
    ] = None,
    connection: ConnectionOptions = DEFAULT_CONNECTION,
    html: Html = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be tried, and measure nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find the configuration that meets a target on this machine.

    Candidates are served and loaded with requests that come as they do, and
    their answers are compared. What is measured is kept: the same command goes
    on after Ctrl-C, a crash or kill -9. The model's folder is never written to,
    but by --apply. Servers are started and stopped for it; with --url, a server
    in explicit mode is given each configuration, and its own one back at the end.

    Exit code 1 when nothing meets the target; what comes closest is told.
    """
    _check_libraries()
    from graphkiln.tuning.application import check_writable
    from graphkiln.tuning.quantities import check_price
    from graphkiln.tuning.search_folder import search_folder
    from graphkiln.tuning.subject import vanishing_cache

    check_html(html)
    check_price(price)
    target = _target(p99, rate, objective, accuracy_floor)
    server = _server(connection, target) if _is_given(context, "url") else None
    if server and calibration:
        raise InvalidInput("--calibration: a running server has no int8 graph of it", hint="leave --url out")
    if share:
        given = {
            "--rate": rate, "--samples": samples, "--accuracy-floor": accuracy_floor, "--html": html,
            "--dry-run": dry_run, "--price": price, "--calibration": calibration, "--url": server,
        }  # fmt: skip
        refuse_options(given, target)
    with ending_in_order(), search_folder() as folder, vanishing_cache() as cache:
        plan = partial(
            _plan, target=target, samples=_Samples(samples, calibration, folder / "int8"), arriving=(burst, trace),
            budget=budget, narrowed=(fix or [], only), server=server, cache=cache,
        )  # fmt: skip
        if share:
            raise typer.Exit(tune_models(model, share, plan, apply=apply, as_json=as_json))
        tuning = plan(model)
        if apply:
            check_writable(tuning.subject)
        show_space(tuning, as_json=as_json, dry_run=dry_run)
        if dry_run:
            return
        result = _search(tuning)
        document = _document(result, tuning, price)
        show_result(document, as_json=as_json, html=html)
        if apply:
            apply_choice(result.candidate, tuning)
        raise typer.Exit(0 if result.chosen else 1)


@dataclass(frozen=True, slots=True)
class _Samples:
    """What requests hold, what an int8 graph is calibrated on, and where that graph may lie."""

    asked: Path | None
    calibration: Path | None
    folder: Path

    def calibrated(self, subject: Subject) -> Subject:
        from graphkiln.tuning.calibration import with_int8

        return with_int8(subject, self.calibration, self.asked, self.folder) if self.calibration else subject


def _check_libraries() -> None:
    try:
        import jinja2  # noqa: F401
        import psutil  # noqa: F401
    except ImportError as error:
        raise EngineUnavailable(f"tuning needs libraries that are not installed: {error}", extra="tune") from error


def _target(p99: str, rate: str | None, objective: Objective | None, floor: str | None) -> Target:
    from graphkiln.tuning import target as types
    from graphkiln.tuning.quantities import parse_rate, parse_share
    from graphkiln_backend.graph.text import parse_duration

    chosen = objective or (Objective.LATENCY if rate else Objective.THROUGHPUT)
    return types.Target(
        p99_s=parse_duration(p99, "--p99"),
        rate=parse_rate(rate, "--rate") if rate else None,
        objective=types.Objective(chosen),
        accuracy_floor=parse_share(floor, "--accuracy-floor") if floor else None,
    )


def _plan(
    model: str,
    target: Target,
    *,
    samples: _Samples,
    arriving: tuple[int | None, Path | None],
    budget: str,
    narrowed: tuple[list[str], str],
    server: tuple[Mapping[str, Any], tuple[str, ...]] | None,
    cache: ArtifactCache,
) -> Tuning:
    from graphkiln.tuning.accuracy_floor import check_floor, samples_to_read
    from graphkiln.tuning.model_space import ModelSpace, narrow, span_space
    from graphkiln.tuning.offered_load import Arriving
    from graphkiln.tuning.quantities import parse_fixes
    from graphkiln.tuning.questions import read_questions
    from graphkiln.tuning.tuner import Tuning
    from graphkiln_backend.graph.text import parse_duration

    budget_s = parse_duration(budget, "--budget")
    target.check_budget(budget_s)
    subject = samples.calibrated(_read_subject(model, cache))
    questions = read_questions(subject, samples.asked, samples_to_read(target.accuracy_floor))
    check_floor(questions, target.accuracy_floor)
    spanned = span_space(subject, p99_s=target.p99_s)
    client, reach = server or (None, ())
    fixes, only = narrowed
    fixed = parse_fixes(fixes, spanned.space.default)
    space = narrow(spanned.space, [key.strip() for key in only.split(",") if key.strip()], fixed)
    return Tuning(
        subject=subject,
        spanned=ModelSpace(space=space, left_out=spanned.left_out),
        target=target,
        questions=questions,
        arriving=Arriving.of(*arriving),
        budget_s=budget_s,
        client=client,
        reach=reach,
    )


def _read_subject(model: str, cache: ArtifactCache) -> Subject:
    from graphkiln.cli.version_paths import version_folder
    from graphkiln.tuning.subject import check_tunable, read_subject
    from graphkiln_backend.repository.remote_address import parse_store

    place = parse_store(model)
    if not isinstance(place, Path):
        raise InvalidInput(
            f"{model} is not on this machine, where trials would read it again and again", hint="copy it here first"
        )
    subject = read_subject(version_folder(place), cache)
    check_tunable(subject)
    return subject


def _is_given(context: typer.Context, option: str) -> bool:
    """Whether an option stands on the command line: a server named by the environment is not meant to be changed."""
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def _server(connection: ConnectionOptions, target: Target) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Arguments of the client, and options of a command that lead there.

    The admin key is found now, as it may lie where temporary files are made until now.
    """
    from graphkiln.tuning.foreign_server import check_knowable
    from graphkiln_backend.system.admin_key import find_key
    from graphkiln_client.transports.endpoint import Endpoint

    check_knowable(target.objective)
    given = connection.arguments()
    endpoint = Endpoint.parse(given["url"])
    key = given["admin_key"] or find_key(endpoint.host, endpoint.port)
    arguments = {name: value for name, value in given.items() if name != "timeout_s"}
    return arguments | {"max_retries": 0, "admin_key": key}, connection.words()


def _search(tuning: Tuning) -> Result:
    if tuning.journal.exists():
        say(f"going on with {tuning.journal}; delete it to measure anew")
    with progress_report(tuning) as report:
        return tuning.run(report)


def _document(result: Result, tuning: Tuning, price: float | None) -> dict[str, Any]:
    from graphkiln.tuning.document import Costs, document_of

    return document_of(result, tuning, command_line(), Costs(price_per_hour=price))
