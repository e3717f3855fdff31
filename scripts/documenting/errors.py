"""docs/reference/errors.md: the tree of errors, with the codes that commands and the server make of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from documenting.text import attributes_of, code, summary_of, table
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.scoring.errors import RunInterrupted

# Where errors are defined, in the order of the page.
MODULES = (
    "graphkiln_backend.graph.errors",
    "graphkiln_backend.graph.contract",
    "graphkiln_backend.repository.overlay",
    "graphkiln_backend.storage.address",
    "graphkiln_backend.storage.objects",
    "graphkiln_backend.scoring.errors",
    "graphkiln_backend.triton.executor",
    "graphkiln_backend.triton.sequences",
    "graphkiln.story.server",
)

_INTRODUCTION = """# Errors and exit codes

Written by `scripts/docs` from the classes themselves. Every error says what happened, what was expected,
and in parentheses what to do. `from graphkiln import GraphkilnError, ClientError` catches all of them, or all of a
client's; `error.message` and `error.hint` are its two parts.

| exit code | means |
| --- | --- |
| 0 | done; of `serve`: it was asked to stop |
| 1 | it could not be done, or what was asked about is not so: a request, a proof, a target, a finding of `doctor` |
| 2 | the command, a file or a configuration is wrong; one line says what to change |
| 129, 130, 143 | a closed terminal (SIGHUP), Ctrl-C, SIGTERM; `serve` ends with 0 |

What the machine refuses (a full disk, a file that may not be read, too little memory) is reported in the system's
words, with code 1.

An instance reports an error to Triton with the code below; over HTTP that is the status beside it, over gRPC the status
of the same name.

"""
# What an instance says, and no class.
_OTHER_CODES: Mapping[type[GraphkilnError], str] = {RunInterrupted: "128 and the number of the signal"}
_STATUS = {
    "INVALID_ARG": "400, INVALID_ARGUMENT",
    "NOT_FOUND": "404, NOT_FOUND",
    "UNAVAILABLE": "503, UNAVAILABLE",
    "CANCELLED": "499, CANCELLED",
    "INTERNAL": "500, INTERNAL",
}


def render() -> str:
    """The page."""
    for name in MODULES:
        import_module(name)
    rows = [(code(each.__name__), code(_parent(each)), _exit(each), _triton(each), _text(each)) for each in tree()]
    return _INTRODUCTION + table(["error", "is a", "exit code", "to Triton: HTTP, gRPC", "when"], rows)


def tree(root: type[GraphkilnError] = GraphkilnError) -> Iterator[type[GraphkilnError]]:
    """The base and all that derive from it in these modules, each before those below it."""
    found = [each for each in root.__subclasses__() if each.__module__ in MODULES]
    yield root
    for each in sorted(found, key=lambda each: MODULES.index(each.__module__)):
        yield from tree(each)


def _exit(error: type[GraphkilnError]) -> str:
    return _OTHER_CODES.get(error, str(error.exit_code))


def _parent(error: type[Any]) -> str:
    return "" if error is GraphkilnError else str(error.__bases__[0].__name__)


def _triton(error: type[GraphkilnError]) -> str:
    return f"{error.triton_code}: {_STATUS[error.triton_code]}"


def _text(error: type[GraphkilnError]) -> str:
    more = [
        f"`{name}`: {text}" for name, text in attributes_of(error, "Args").items() if name not in ("message", "hint")
    ]
    return " ".join([summary_of(error), *more])
