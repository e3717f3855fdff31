"""The `graphkiln` command: verbs are named here and implemented in their own modules.

A command imports its own verb alone: the others, and what typer makes of their options, take a server's start 0.1 s.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from graphkiln.cli.console import log_to_stderr, printable, say, take_any_name, written_out
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.modules import version_of

# Verb -> the module of `graphkiln.cli` that holds the function of its name, in the order of the help.
VERBS = {
    "serve": "serve",
    "convert": "convert",
    "verify": "verify",
    "inspect": "inspect",
    "sign": "sign",
    "keygen": "sign",
    "push": "push",
    "pull": "push",
    "explain": "explain",
    "lower": "lower",
    "classify": "classify",
    "detect": "detect",
    "segment": "segment",
    "embed": "embed",
    "infer": "infer",
    "models": "models",
    "load": "load",
    "unload": "load",
    "health": "health",
    "doctor": "doctor",
    "bench": "bench",
    "score": "score",
    "story": "story",
    "tune": "tune",
    "cache": "cache",
}
# Unknown flags are tritonserver's; its own list decides which of them exist.
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
_SETTINGS: dict[str, Any] = {"serve": {"context_settings": _PASSED_ON}, "doctor": {"context_settings": _PASSED_ON}}


class _VerbGroup(TyperGroup):
    """Group that lists the verbs in plain text: rich's help imports a Markdown parser, a third of the time of `--help`.

    The help of a verb stays rich: the options of `convert` are in panels.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "rich_markup_mode": None})


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"graphkiln {version_of('graphkiln')}")
        raise typer.Exit


def _graphkiln(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Callback for `--version`; the application's help is set where it is made."""


def application(verbs: Iterable[str]) -> typer.Typer:
    """The command with some of its `VERBS`."""
    made = typer.Typer(
        name="graphkiln",
        cls=_VerbGroup,
        help="Turn trained models into proven static graphs, serve them on NVIDIA Triton, and send them requests.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    made.callback()(_graphkiln)
    for verb in verbs:
        _add(made, verb, import_module(f"graphkiln.cli.{VERBS[verb]}"))
    return made


def _add(made: typer.Typer, verb: str, module: Any) -> None:
    if verb == "cache":
        made.add_typer(module.app, name=verb)
    elif verb == "convert":
        from graphkiln.cli.convert import RecipeCommand

        made.command(cls=RecipeCommand)(module.convert)
    else:
        made.command(**_SETTINGS.get(verb, {}))(getattr(module, verb))


def __getattr__(name: str) -> typer.Typer:
    """`app`: the command with all of its verbs, for what writes their manual."""
    if name == "app":
        return application(VERBS)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> None:
    """Run the command; a graphkiln error becomes one line on stderr and its exit code.

    So do errors of the machine: a full disk, a folder without permission, too little memory.
    """
    log_to_stderr()
    take_any_name()
    verbs = VERBS.keys() & sys.argv[1:2] or VERBS  # all for the help, and to suggest one for an unknown verb
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # it logs what it then raises
    warnings.filterwarnings("ignore", module=r"PIL\.")  # it speaks to programmers: of large images, of odd EXIF
    try:
        with written_out():
            application(verbs)(prog_name="graphkiln")
    except GraphkilnError as error:
        say(printable(str(error)), logging.ERROR)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # as click ends a command whose reader has ended
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
