"""The `graphkiln` command: its verbs, which are implemented in separate modules, and its errors.

A command imports only its own verb; importing all of them would take another 0.1 s.
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

from graphkiln.cli.console import escape_undecodable, flush_at_end, log_to_stderr, printable, say
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.modules import version_of

# Verb -> module of `graphkiln.cli` with a function of that name, in the order of the help.
VERBS = {
    "serve": "serve",
    "convert": "convert",
    "adopt": "adopt",
    "verify": "verify",
    "inspect": "inspect",
    "sign": "sign",
    "keygen": "sign",
    "push": "push",
    "pull": "push",
    "explain": "lower",
    "lower": "lower",
    "classify": "images",
    "detect": "images",
    "segment": "images",
    "embed": "embed",
    "infer": "infer",
    "models": "models",
    "load": "models",
    "unload": "models",
    "health": "models",
    "doctor": "doctor",
    "bench": "bench",
    "score": "score",
    "replay": "replay",
    "story": "story",
    "tune": "tune",
    "rollout": "rollout",
    "cache": "cache",
}
_GROUPS = {"cache", "rollout"}  # verbs with verbs of their own
# Unknown options are flags of tritonserver, which are checked against its list.
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
# Verbs whose options are fields of a recipe: the class of their command, in the verb's module.
_COMMANDS = {"convert": "RecipeCommand", "adopt": "AdoptCommand"}
_SETTINGS: dict[str, Any] = {"serve": {"context_settings": _PASSED_ON}, "doctor": {"context_settings": _PASSED_ON}}


class _VerbGroup(TyperGroup):
    """Group that lists the verbs in plain text, because rich's help imports a slow Markdown parser.

    The help of single verbs uses rich, for the panels of `convert`.
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
    """Handle options without a verb."""


def application(verbs: Iterable[str]) -> typer.Typer:
    """Create the command with some of the `VERBS`."""
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
    if verb in _GROUPS:
        made.add_typer(module.app, name=verb)
    elif verb in _COMMANDS:
        made.command(cls=getattr(module, _COMMANDS[verb]))(getattr(module, verb))
    else:
        made.command(**_SETTINGS.get(verb, {}))(getattr(module, verb))


def __getattr__(name: str) -> typer.Typer:
    """Create `app`, the command with all verbs, for the generated reference."""
    if name == "app":
        return application(VERBS)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> None:
    """Run the command; print expected errors as one line on stderr and exit with their code.

    Expected errors are `GraphkilnError`, `OSError` and `MemoryError`.
    """
    log_to_stderr()
    escape_undecodable()
    verbs = VERBS.keys() & sys.argv[1:2] or VERBS  # all verbs for the help and for suggestions
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC logs errors that it also raises
    warnings.filterwarnings("ignore", module=r"PIL\.")  # about large images and invalid EXIF
    try:
        with flush_at_end():
            application(verbs)(prog_name="graphkiln")
    except GraphkilnError as error:
        say(printable(str(error)), logging.ERROR)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # same exit code as click
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
    if isinstance(error, FileNotFoundError):  # from getcwd(2); other errors have a file name
        return "the working folder was deleted: change to another one (cd), or use absolute paths"
    return str(error)


if __name__ == "__main__":
    main()
