"""What `graphkiln tune` shows: the space before, each measurement meanwhile, what was found."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphkiln.cli.console import print_json, say
from graphkiln.cli.report_file import write_html

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
