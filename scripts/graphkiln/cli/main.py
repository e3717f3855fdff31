"""The `graphkiln` command: verbs are registered here and implemented in their own modules."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from graphkiln.cli import cache
from graphkiln.cli.bench import bench
from graphkiln.cli.classify import classify
from graphkiln.cli.console import log_to_stderr, printable, say, take_any_name, written_out
from graphkiln.cli.convert import convert
from graphkiln.cli.detect import detect
from graphkiln.cli.doctor import doctor
from graphkiln.cli.embed import embed
from graphkiln.cli.explain import explain
from graphkiln.cli.health import health
from graphkiln.cli.infer import infer
from graphkiln.cli.inspect import inspect
from graphkiln.cli.load import load, unload
from graphkiln.cli.lower import lower
from graphkiln.cli.models import models
from graphkiln.cli.pull import pull
from graphkiln.cli.push import push
from graphkiln.cli.recipe_options import RecipeCommand
from graphkiln.cli.score import score
from graphkiln.cli.segment import segment
from graphkiln.cli.serve import serve
from graphkiln.cli.sign import keygen, sign
from graphkiln.cli.similar import similar
from graphkiln.cli.story import story
from graphkiln.cli.tune import tune
from graphkiln.cli.verify import verify
from graphkiln_backend.graph.distributions import version_of
from graphkiln_backend.graph.errors import GraphkilnError


class _VerbGroup(TyperGroup):
    """Lists the verbs in plain text: rich's help imports a Markdown parser, a third of the time of `graphkiln --help`.

    The verbs' own help stays rich: the options of `convert` stand in panels.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "rich_markup_mode": None})


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"graphkiln {version_of('graphkiln')}")
        raise typer.Exit


app = typer.Typer(
    name="graphkiln",
    cls=_VerbGroup,
    help="Turn trained models into proven static graphs, serve them on NVIDIA Triton, and send them requests.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def _graphkiln(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Has no docstring of its own to show: the application's help stands above."""


# Unknown flags are tritonserver's; its own list decides which of them exist.
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve)
app.command(cls=RecipeCommand)(convert)
app.command()(verify)
app.command()(inspect)
app.command()(sign)
app.command()(keygen)
app.command()(push)
app.command()(pull)
app.command()(explain)
app.command()(lower)
app.add_typer(cache.app, name="cache")
app.command()(classify)
app.command()(detect)
app.command()(segment)
app.command()(embed)
app.command()(similar)
app.command()(infer)
app.command()(models)
app.command()(load)
app.command()(unload)
app.command()(health)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(doctor)
app.command()(bench)
app.command()(score)
app.command()(story)
app.command()(tune)


def main() -> None:
    """Runs the command; a graphkiln error becomes one line on stderr and its exit code.

    So do the machine's own: a full disk, a folder that may not be entered, too little memory.
    """
    log_to_stderr()
    take_any_name()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it logs what it then raises
    warnings.filterwarnings("ignore", module=r"PIL\.")  # it speaks to programmers: of large images, of odd EXIF
    try:
        with written_out():
            app(prog_name="graphkiln")
    except GraphkilnError as error:
        say(printable(str(error)), logging.ERROR)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # as click ends a command whose output nobody reads any more
        sys.exit(1)
    except OSError as error:
        say(printable(_in_words(error)), logging.ERROR)
        sys.exit(1)
    except MemoryError as error:
        say(printable(f"there is not enough memory: {error}".rstrip(": ")), logging.ERROR)
        sys.exit(1)


def _in_words(error: OSError) -> str:
    if error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, FileNotFoundError):  # of getcwd(2): everything else has a name
        return "the working folder is no longer there: go to another one (cd), or name whole paths"
    return str(error)


if __name__ == "__main__":
    main()
