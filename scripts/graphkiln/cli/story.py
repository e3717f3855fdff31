"""`graphkiln story`: speed up a model step by step, with each step proven and measured on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphkiln.cli.console import Html, check_html, print_json, progress_bar, say, write_html
from graphkiln.cli.options import AsJson
from graphkiln_backend.graph.errors import ConversionError, InvalidInput, MeasurementError
from graphkiln_backend.graph.modules import require_packages

if TYPE_CHECKING:
    from graphkiln.story.runner import Progress, ProgressReport

_INTERRUPTED = 130


def story(
    model: Annotated[str, typer.Option(help="torchvision:ARCH, timm:ARCH or python:FILE:FACTORY.")],
    image_size: Annotated[int, typer.Option(help="Width and height of images in pixels.", min=16)] = 224,
    seconds: Annotated[float, typer.Option(help="Duration of the measurement of each step.", min=1)] = 20.0,
    gradient: Annotated[
        bool, typer.Option("--gradient", help="Keep the gradient with respect to the image in all graphs.")
    ] = False,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="State dict: .pth, .pt or .safetensors.",
            show_default="from scripts/train-story, otherwise random",
            metavar="FILE",
        ),
    ] = None,
    samples: Annotated[
        Path | None,
        typer.Option(
            help="Folder of JPEGs for proofs and measurements.", show_default="held-out digits", metavar="DIR"
        ),
    ] = None,
    preprocess: Annotated[
        str | None,
        typer.Option(help="Preprocessing of images.", show_default="the source's own", metavar="JSON"),
    ] = None,
    only: Annotated[
        str,
        typer.Option(help="Measure only these steps (keys of --json).", metavar="KEY,...", show_default="all"),
    ] = "",
    as_json: AsJson = False,
    html: Html = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted story.")] = False,
) -> None:
    """Measure the steps from eager PyTorch to a served graph.

    Each step is proven, and all are measured in turn repeatedly, so that noise affects them equally.
    Ctrl-C keeps the measurements.

    Exit code 1 when the outputs of a step changed more than the numeric policy allows.
    """
    require_packages("a story", ["torch", "torchvision", "onnxruntime", "sklearn", "jinja2"], extra="story")
    from graphkiln.story.runner import StoryRunner
    from graphkiln.story.variants import StoryRequest, find_trained_weights, this_platform

    if weights is not None and not weights.is_file():
        raise ConversionError(f"there is no file {weights}", hint="give a .pth, .pt or .safetensors file")
    weights = weights or find_trained_weights(model, image_size)
    if weights is None:
        say("random weights: agreement of top-1 answers cannot be judged (scripts/train-story trains usable weights)")
    request = StoryRequest(
        source=model,
        image_size=image_size,
        weights=weights,
        gradient=gradient,
        samples=samples,
        preprocess=_parse_preprocess(preprocess),
    )
    check_html(html)
    interrupted = False
    with _progress_report() as report:
        try:
            runner = StoryRunner(request, this_platform(), resume=resume, report=report)
            try:
                runner.run(seconds, [key for key in only.split(",") if key])
            except KeyboardInterrupt:
                interrupted = True
        except OSError as error:
            hint = "free disk space, or set XDG_CACHE_HOME to another folder"
            reason = error.strerror or error
            raise MeasurementError(f"cannot write to {request.folder}: {reason}", hint=hint) from error
    document = runner.document()
    if html:
        from graphkiln.story.report import render_page

        write_html(html, render_page(document))
    if as_json:
        print_json(document)
    else:
        from graphkiln.story.report import print_tables

        print_tables(document)
    if interrupted:
        say("interrupted; run the same command with --resume to continue")
        raise typer.Exit(_INTERRUPTED)
    raise typer.Exit(0 if runner.proven else 1)


def _parse_preprocess(preprocess: str | None) -> dict[str, Any] | None:
    if preprocess is None:
        return None
    try:
        spec = json.loads(preprocess)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"--preprocess is not JSON: {error}") from error
    if not isinstance(spec, dict):
        raise InvalidInput(f"--preprocess must be an object, got {preprocess}")
    return spec


@contextmanager
def _progress_report() -> Iterator[ProgressReport]:
    """Show a progress bar on a terminal, otherwise print a line for each activity and figure."""
    with progress_bar("", total=None) as update:
        if update is None:
            yield _print_line
            return
        figure = ""

        def show(progress: Progress) -> None:
            nonlocal figure
            figure = progress.figure or figure
            description = " ".join(filter(None, (progress.activity, figure)))
            update(description=description, total=progress.total_s or None, completed=progress.done_s)

        yield show


def _print_line(progress: Progress) -> None:
    if progress.figure or not progress.total_s:
        say(progress.figure or progress.activity)
