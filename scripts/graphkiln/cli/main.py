"""The `graphkiln` command: its verbs, which are implemented in separate modules, and its errors.

A command imports only its own verb, and the help none; importing all of them would take another 0.1 s.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Collection
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from graphkiln.cli.console import escape_undecodable, flush_at_end, log_to_stderr, printable, say
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.modules import version_of

# Verb -> module of `graphkiln.cli` with a function of that name, and the first line of that function's docstring: the
# list of verbs is shown without their imports, which take as long as everything else together.
VERBS = {
    "serve": ("serve", "Serve model stores on NVIDIA Triton until SIGTERM or Ctrl-C."),
    "convert": ("convert", "Convert a trained model into a proven version."),
    "adopt": ("adopt", "Add golden samples to a version that another tool wrote."),
    "verify": ("verify", "Prove a version again on an engine of this machine."),
    "inspect": ("inspect", "Describe a version."),
    "openapi": ("openapi", "Print an OpenAPI 3.1 document of a model's HTTP API."),
    "sign": ("sign", "Sign the files of versions (OpenSSF Model Signing)."),
    "keygen": ("sign", "Create a pair of keys of the curve P-256 for signing versions."),
    "push": ("push", "Push a model store to a container registry (CNCF ModelPack)."),
    "pull": ("push", "Pull models from a registry or object store into a folder."),
    "explain": ("lower", "Explain how a model is lowered on this machine."),
    "lower": ("lower", "Lower a model as the server will, into the artifact cache."),
    "classify": ("images", "Classify images with a served model: labeled top-k, best first."),
    "detect": ("images", "Detect objects in images: boxes in pixels, labels, scores."),
    "segment": ("images", "Segment images: the class of every pixel."),
    "embed": ("embed", "Compute embeddings of images."),
    "infer": ("infer", "Send tensors to a model, and print or write its outputs."),
    "models": ("models", "List the model versions of a server and their states."),
    "load": ("models", "Load or reload a model of a server."),
    "unload": ("models", "Unload a model of a server after its requests in flight."),
    "health": ("models", "Check that a server and all its models are ready."),
    "doctor": ("doctor", "Examine this machine for problems with serving."),
    "bench": ("bench", "Measure a served model under load."),
    "score": ("score", "Score a whole data set, each row exactly once."),
    "replay": ("replay", "Answer recorded requests again with a version."),
    "story": ("story", "Measure the steps from eager PyTorch to a served graph."),
    "tune": ("tune", "Find the configuration that meets a target on this machine."),
    "rollout": ("rollout", "Try a new version on live requests, then promote or abort it."),
    "cache": ("cache", "List, prune and verify the cache of lowered graphs."),
}
_COMPLETION = "_GRAPHKILN_COMPLETE"  # set by the shell's completion, which names options of all verbs
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


def application(verbs: Collection[str]) -> typer.Typer:
    """Create the command with some of the `VERBS`; with none, a list of all of them, which cannot be run."""
    made = typer.Typer(
        name="graphkiln",
        cls=_VerbGroup,
        help="Turn trained models into proven static graphs, serve them on NVIDIA Triton, and send them requests.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    made.callback()(_graphkiln)
    for verb in verbs:
        _add(made, verb, import_module(f"graphkiln.cli.{VERBS[verb][0]}"))
    if not verbs:
        for verb, (_, summary) in VERBS.items():
            made.command(verb, help=summary)(_graphkiln)
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
    verbs = VERBS if _COMPLETION in os.environ else VERBS.keys() & sys.argv[1:2]
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
