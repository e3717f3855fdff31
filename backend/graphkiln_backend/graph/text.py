"""Hints for unknown names, and sizes and durations as users write them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import quote

from graphkiln_backend.graph.errors import InvalidInput

# Sizes in bytes.

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([KMGT]?)i?B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def read_size(text: str) -> int | None:
    """Read a size such as `500M`, `20G` or `1.5GiB` (powers of 1024); None for any other text."""
    found = _SIZE.fullmatch(text.strip())
    return int(float(found[1]) * 2 ** _POWERS[found[2].upper()]) if found else None


# Durations.

_DURATION = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([a-z]+)", re.IGNORECASE)
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str, option: str, example: str = "50ms, 2.5s or 20m") -> float:
    """Read `50ms`, `2.5s`, `20m`, `6h` or `2d` as seconds.

    Args:
        text: As written.
        option: Name of the option, for error messages.
        example: Of what this option usually holds.

    Raises:
        InvalidInput: It is no time, or not above 0.
    """
    match = _DURATION.fullmatch(text.strip())
    unit = match[2].lower() if match else ""
    if match is None or unit not in _SECONDS:
        raise InvalidInput(f"{option} {text[:40]}: expected a time such as {example}")
    seconds = float(match[1]) * _SECONDS[unit]
    if not 0 < seconds < math.inf:
        raise InvalidInput(f"{option} {text[:40]}: expected a time above 0, such as {example}")
    return seconds


# What is secret, taken out of texts that are shown to others: logs, errors, records, reports, manifests.

# Name and password before a host, also where an access key's secret holds slashes. Source: RFC 3986, 3.2.1.
_CREDENTIALS = re.compile(r"(?<=://)(?:A[KS]IA[0-9A-Z]{16}:[^@\s]*|[^/?#\s]*)@")
# Settings of a connection that are secret, and what signs an address. Source: libpq, "Connection Strings"; signed
# addresses of S3, GCS and Azure.
_SECRET = re.compile(
    r"(?:^|(?<=[?&\s]))"
    r"((?:sas|sig|[\w-]*(?:password|token|secret|signature|credential|access_?key)[\w-]*)=)"
    r"(?:'(?:[^'\\]|\\.)*'|[^&\s]*)",
    re.IGNORECASE,
)
_HEADER = "--header"


def redact(text: str) -> str:
    """A text with addresses in it, without user, password and keys."""
    return _SECRET.sub(r"\1...", _CREDENTIALS.sub("", text))


def redact_command(words: Sequence[str]) -> list[str]:
    """The words of a command as the program was given them, without what is secret in addresses and headers."""
    return [*_without_headers(map(redact, words))]


def _without_headers(words: Iterator[str]) -> Iterator[str]:
    before = ""
    for word in words:
        option, equals, header = word.partition("=") if word.startswith(f"{_HEADER}=") else (before, "", word)
        named = f"{header.partition(':')[0]}: ..."
        yield (f"{option}={named}" if equals else named) if option == _HEADER else word
        before = word


# Error texts on their way to a person: short enough for every protocol, and without what only a debugger needs.

# Of a text that crosses a protocol. gRPC sends it in a header, where each byte that is not plain ASCII takes three,
# and by default no headers of more than 8 KiB. Source: gRPC, "Status codes", `GRPC_ARG_MAX_METADATA_SIZE`.
LIMIT_BYTES = 2048
# What pybind11, and so Triton's Python backend, puts between an error and where it was raised.
_TRACEBACK = "\n\nAt:\n"
_WRAPPERS = ("Internal: ", "TritonModelException: ")


def bounded(text: str, limit_bytes: int = LIMIT_BYTES) -> str:
    """Shorten a text to a number of bytes in UTF-8 without cutting a character; the result gives the full size.

    Args:
        text: The text.
        limit_bytes: Most bytes.
    """
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= limit_bytes:
        return encoded.decode()
    end = f" ... ({len(encoded)} bytes in all)"
    return encoded[: limit_bytes - len(end)].decode("utf-8", "ignore") + end


def without_traceback(text: str) -> str:
    """A text of Triton without the lines of the stack that follow an error of a Python backend."""
    kept, *rest = text.split(_TRACEBACK)
    for part in rest:  # of one version; that of the next one follows its last line
        others = [line for line in part.splitlines() if not _is_frame(line)]
        kept = "\n".join([kept.rstrip("; \n"), *others])
    return kept.strip().rstrip(";").strip()


def _is_frame(line: str) -> bool:
    """Match a line such as `  /path/model.py(97): initialize`, or the end of such a list."""
    return line.startswith("  ") or not line.strip(" ;\n")


def plain_reason(text: str) -> str:
    """Triton's reason why a version is not served, as a cell of a table: the cause alone, on one line."""
    cause = without_traceback(text)
    for prefix in _WRAPPERS:
        cause = cause.removeprefix(prefix)
    return " ".join(cause.split())


# Names of models: what a folder, a URL, Triton and the shell that starts its Python stub can all take.

# Triton names shared-memory regions and instances after the model, and a file name has 255 bytes at most.
MAX_LENGTH = 128

# Files that describe an instance are named after its model and its process, and `NAME.images` after `NAME`.
_LONGEST_SERVED = 200

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# More than for new models: others write stores, too. Triton (24.10) hands the path of a model to a shell without
# quotes: a space breaks it, and other characters would be executed.
_SERVABLE = re.compile(r"[A-Za-z0-9_@%+=:,.-]+")
# What Triton (24.10) expects in a path as it is: it compares the path with names of models and undoes no escapes.
_LITERAL = "@%+=:,"


def fault_in_name(name: str) -> str:
    """Explain why a name is not valid for a new model; empty for a valid one."""
    if len(name) > MAX_LENGTH:
        return f"'{name[:20]}...' has {len(name)} characters, at most {MAX_LENGTH} are allowed"
    if not _NAME.fullmatch(name):
        return (
            f"{name!r} is no model name: expected letters, digits, '_', '.' and '-', "
            "with a letter, a digit or '_' at the beginning"
        )
    return ""


def fault_in_served_name(name: str) -> str:
    """Explain why a folder of this name cannot be served; empty for a valid one."""
    if not _SERVABLE.fullmatch(name):
        return f"{name!r} is no name of a model that Triton's Python stub can take"
    if len(name) > _LONGEST_SERVED:
        return f"'{name[:20]}...' has {len(name)} characters, at most {_LONGEST_SERVED} can be served"
    return ""


def in_path(name: str) -> str:
    """A model's name as one part of the path of a request; what no served name holds is escaped (RFC 3986)."""
    return quote(name, safe=_LITERAL)


# Names in one hint.
_MOST = 40


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "", otherwise: str = "") -> str:
    """Hint for a name that does not exist.

    Args:
        name: What was written.
        known: What could have been meant.
        prefix: Put before the name that is shown, for example `--`.
        otherwise: What to say when nothing is near; the known names when empty.
    """
    names = list(known)
    if near := nearest(name, names):
        return f"did you mean '{prefix}{near}'?"
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return otherwise or f"known: {', '.join(names[:_MOST]) or 'none'}{more}"


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is most like another one; empty where none is."""
    import difflib  # for who misspells

    near = difflib.get_close_matches(name, known, n=1)
    return near[0] if near else ""


def request_prefix(request_id: str) -> str:
    """Prefix of a log message about a request, as Triton's own messages have it; empty without an id.

    The id is written as a JSON string, so that no id can end the prefix.
    """
    return f"[request id: {json.dumps(request_id)}] " if request_id else ""
