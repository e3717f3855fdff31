"""`graphkiln tune`: find the configuration that meets a latency target."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.cli.console import (
    Html,
    check_html,
    command_line,
    ending_in_order,
    print_json,
    progress_bar,
    say,
    write_html,
)
from graphkiln.cli.options import AsJson
from graphkiln.tuning.target import Objective, Target, parse_rate, parse_share
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.modules import require_packages

if TYPE_CHECKING:
    from graphkiln.tuning.candidate import Candidate
    from graphkiln.tuning.journal import Report
    from graphkiln.tuning.subject import Subject
    from graphkiln.tuning.tuner import Tuning
    from graphkiln_backend.cache.store import ArtifactCache


def tune(
    model: Annotated[str, typer.Argument(help="STORE/NAME (its newest version), or STORE/NAME/VERSION.")],
    p99: Annotated[str, typer.Option(help="99th percentile of latency to meet, such as 50ms.", metavar="TIME")],
    rate: Annotated[
        str | None,
        typer.Option(help="Requests per second, such as 200/s.", metavar="RATE", show_default="search for the maximum"),
    ] = None,
    objective: Annotated[
        Objective | None,
        typer.Option(help="Criterion for the best one.", show_default="throughput; latency with --rate"),
    ] = None,
    accuracy_floor: Annotated[
        str | None,
        typer.Option(help="Accepted loss of accuracy on labelled --samples, such as 0.5%.", metavar="SHARE"),
    ] = None,
    budget: Annotated[str, typer.Option(help="Time for measurements, such as 20m.", metavar="TIME")] = "20m",
    samples: Annotated[
        Path | None,
        typer.Option(
            help="Contents of requests: a folder of images (labelled if subfolders have the names of labels) or of "
            "serve --record, or an .npz with a row for each sample.",
            show_default="the golden samples, or generated",
            metavar="PATH",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Samples, other than --samples, to create an int8 graph with, which is tried as well.",
            show_default="no int8",
            metavar="PATH",
        ),
    ] = None,
    burst: Annotated[int | None, typer.Option(help="Send N requests at a time.", min=2, metavar="N")] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Recorded arrival times (see bench), stretched to each rate.", metavar="FILE"),
    ] = None,
    fix: Annotated[
        list[str] | None,
        typer.Option(help="Fix a key to a value; may be repeated.", metavar="KEY=VALUE"),
    ] = None,
    only: Annotated[
        str, typer.Option(help="Keys to vary; others keep their values.", show_default="all", metavar="KEY,...")
    ] = "",
    apply: Annotated[bool, typer.Option("--apply", help="Write the choice to the model's config.pbtxt.")] = False,
    html: Html = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the candidates and measure nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find the configuration that meets a target on this machine.

    Each candidate is served and measured under load, and its answers are
    compared. Measurements are recorded: after Ctrl-C, a crash or kill -9, the
    same command continues. The model's folder is changed only by --apply.

    Exit code 1 when nothing meets the target; the closest candidate is shown.
    """
    require_packages("tuning", ["jinja2", "psutil"], extra="tune")
    from graphkiln.tuning.apply import check_writable
    from graphkiln.tuning.candidate import parse_fixes
    from graphkiln.tuning.measure import Arriving
    from graphkiln.tuning.report import document_of, print_result, render_page
    from graphkiln.tuning.requests import check_floor, read_requests, samples_to_read
    from graphkiln.tuning.space import narrow, span_space
    from graphkiln.tuning.subject import vanishing_cache, with_int8
    from graphkiln.tuning.tuner import Tuning, search_folder
    from graphkiln_backend.graph.text import parse_duration

    check_html(html)
    target = _target(p99, rate, objective, accuracy_floor)
    budget_s = parse_duration(budget, "--budget")
    target.check_budget(budget_s)
    with ending_in_order("run the same command to continue"), search_folder() as folder, vanishing_cache() as cache:
        subject = _read_subject(model, cache)
        if calibration:
            subject = with_int8(subject, calibration, samples, folder / "int8")
        requests = read_requests(subject, samples, samples_to_read(target.accuracy_floor))
        check_floor(requests, target.accuracy_floor)
        space = span_space(subject, p99_s=target.p99_s)
        varying = [key.strip() for key in only.split(",") if key.strip()]
        tuning = Tuning(
            subject=subject,
            space=narrow(space, varying, parse_fixes(fix or [], space.default)),
            target=target,
            requests=requests,
            arriving=Arriving.of(burst, trace),
            budget_s=budget_s,
        )
        if apply:
            check_writable(subject)
        show_space(tuning, as_json=as_json, dry_run=dry_run)
        if dry_run:
            return
        if tuning.journal.exists():
            say(f"continuing from {tuning.journal}; delete it to measure everything again")
        with progress_report(tuning) as report:
            result = tuning.run(report)
        document = document_of(result, tuning, command_line())
        if as_json:
            print_json(document)
        else:
            print_result(document)
        if html:
            write_html(html, render_page(document))
        if apply:
            apply_choice(result.candidate, tuning, result.notes)
        raise typer.Exit(0 if result.chosen else 1)


def _target(p99: str, rate: str | None, objective: Objective | None, floor: str | None) -> Target:
    from graphkiln_backend.graph.text import parse_duration

    return Target(
        p99_s=parse_duration(p99, "--p99"),
        rate=parse_rate(rate, "--rate") if rate else None,
        objective=objective or (Objective.LATENCY if rate else Objective.THROUGHPUT),
        accuracy_floor=parse_share(floor, "--accuracy-floor") if floor else None,
    )


def _read_subject(model: str, cache: ArtifactCache) -> Subject:
    from graphkiln.cli.options import version_folder
    from graphkiln.tuning.subject import check_tunable, read_subject
    from graphkiln_backend.storage.address import parse_store

    place = parse_store(model)
    if not isinstance(place, Path):
        raise InvalidInput(
            f"{model} is not on this machine, but trials load it many times", hint="copy it to a local folder first"
        )
    subject = read_subject(version_folder(place), cache)
    check_tunable(subject)
    return subject


def show_space(tuning: Tuning, *, as_json: bool, dry_run: bool) -> None:
    """Print the space (on stdout for a dry run, otherwise on stderr) and warnings."""
    from rich.console import Console

    from graphkiln.tuning.report import print_space, space_document

    document = space_document(tuning)
    if dry_run and as_json:
        print_json(document)
    elif dry_run or not as_json:
        print_space(document, Console() if dry_run else None)
    for line in doubts(tuning):
        say(line)


def doubts(tuning: Tuning) -> Iterator[str]:
    """Yield warnings before the search."""
    from graphkiln.tuning.requests import undecided
    from graphkiln.tuning.subject import served_versions

    if doubt := undecided(tuning.requests, tuning.target.accuracy_floor):
        yield doubt
    own, served = tuning.subject.version, served_versions(tuning.subject)
    if own not in served:
        others = ", ".join(map(str, served)) or "none"
        yield f"version {own} is not served (version_policy: {others}): the results are of this version only"


@contextmanager
def progress_report(tuning: Tuning) -> Iterator[Report]:
    """Show a progress bar on a terminal, otherwise print a line for each measurement."""
    from graphkiln.tuning.report import line_of

    today = tuning.space.today
    with progress_bar("starting", tuning.budget_s) as update:
        if update is None:
            yield lambda progress: say(line_of(progress, today, tuning.budget_s))
            return
        yield lambda progress: update(completed=progress.spent_s, description=line_of(progress, today, tuning.budget_s))


def apply_choice(candidate: Candidate | None, tuning: Tuning, notes: Sequence[str]) -> None:
    """Prove the choice once more, write it to config.pbtxt, and print the commands to undo it.

    Args:
        candidate: The choice; None if no configuration was confirmed.
        tuning: The search.
        notes: Its remarks, which say why without a choice.

    Raises:
        VerificationError: The proof failed.
        RepositoryError: The file is not writable.
    """
    from graphkiln.tuning import apply as application

    name = tuning.subject.name
    if candidate is None:
        say("; ".join((f"nothing is written: no configuration was confirmed to meet the target of '{name}'", *notes)))
        return
    if candidate == tuning.space.today:
        say(f"nothing is written: today's configuration of '{name}' is the best")
        return
    application.prove(candidate, tuning.subject, tuning.requests)
    applied = application.write(candidate, tuning.subject)
    lines = (
        f"wrote {' and '.join(str(path) for path in (applied.config, applied.version) if path)}",
        *applied.notes,
        "a server in poll mode loads it automatically, others at the next start;",
        f"to load it in explicit mode: {applied.load_command}",
        "to undo it (the second command is for explicit mode):",
        *(f"  {command}" for command in applied.commands_back),
    )
    for line in lines:
        say(line)
