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
        text: The duration.
        option: Name of the option, for error messages.
        example: Typical values of the option, for error messages.

    Raises:
        InvalidInput: The text is not a duration, or not above 0.
    """
    match = _DURATION.fullmatch(text.strip())
    unit = match[2].lower() if match else ""
    if match is None or unit not in _SECONDS:
        raise InvalidInput(f"{option} {text[:40]}: expected a time such as {example}")
    seconds = float(match[1]) * _SECONDS[unit]
    if not 0 < seconds < math.inf:
        raise InvalidInput(f"{option} {text[:40]}: expected a time above 0, such as {example}")
    return seconds


# Secrets in texts that are shown: logs, errors, records, reports, manifests.

# Name and password before a host; the secret of an access key may contain slashes. Source: RFC 3986, 3.2.1.
_CREDENTIALS = re.compile(r"(?<=://)(?:A[KS]IA[0-9A-Z]{16}:[^@\s]*|[^/?#\s]*)@")
# Secret settings of connections, and signatures of addresses. Source: libpq, "Connection Strings"; signed addresses of
# S3, GCS and Azure.
_SECRET = re.compile(
    r"(?:^|(?<=[?&\s]))"
    r"((?:sas|sig|[\w-]*(?:password|token|secret|signature|credential|access_?key)[\w-]*)=)"
    r"(?:'(?:[^'\\]|\\.)*'|[^&\s]*)",
    re.IGNORECASE,
)
_HEADER = "--header"


def redact(text: str) -> str:
    """Remove users, passwords and keys from the addresses in a text."""
    return _SECRET.sub(r"\1...", _CREDENTIALS.sub("", text))


def redact_command(words: Sequence[str]) -> list[str]:
    """Remove secrets in addresses and headers from the words of a command."""
    return [*_without_headers(map(redact, words))]


def _without_headers(words: Iterator[str]) -> Iterator[str]:
    before = ""
    for word in words:
        option, equals, header = word.partition("=") if word.startswith(f"{_HEADER}=") else (before, "", word)
        named = f"{header.partition(':')[0]}: ..."
        yield (f"{option}={named}" if equals else named) if option == _HEADER else word
        before = word


# Error texts: short enough for every protocol, without tracebacks.

# gRPC sends error texts in a header, in which a byte that is not ASCII takes three, and allows 8 KiB of headers by
# default. Source: gRPC, "Status codes", `GRPC_ARG_MAX_METADATA_SIZE`.
LIMIT_BYTES = 2048
# Separator of an error and its traceback in pybind11, and so in Triton's Python backend.
_TRACEBACK = "\n\nAt:\n"
_WRAPPERS = ("Internal: ", "TritonModelException: ")


def bounded(text: str, limit_bytes: int = LIMIT_BYTES) -> str:
    """Shorten a text to a number of bytes in UTF-8 without cutting a character; the result gives the full size.

    Args:
        text: The text.
        limit_bytes: Maximum number of bytes.
    """
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= limit_bytes:
        return encoded.decode()
    end = f" ... ({len(encoded)} bytes in all)"
    return encoded[: limit_bytes - len(end)].decode("utf-8", "ignore") + end


def without_traceback(text: str) -> str:
    """Remove the tracebacks of Python backends from an error text of Triton."""
    kept, *rest = text.split(_TRACEBACK)
    for part in rest:  # a traceback, followed by the error of the next version
        others = [line for line in part.splitlines() if not _is_frame(line)]
        kept = "\n".join([kept.rstrip("; \n"), *others])
    return kept.strip().rstrip(";").strip()


def _is_frame(line: str) -> bool:
    """Match a line such as `  /path/model.py(97): initialize`, or the end of such a list."""
    return line.startswith("  ") or not line.strip(" ;\n")


def plain_reason(text: str) -> str:
    """Reduce Triton's reason why a version is not served to its cause, on one line."""
    cause = without_traceback(text)
    for prefix in _WRAPPERS:
        cause = cause.removeprefix(prefix)
    return " ".join(cause.split())


# Names of models, which must be valid in folders, URLs, Triton, and the shell that starts its Python stub.

# Triton names shared-memory regions and instances after the model, and file names are limited to 255 bytes.
MAX_LENGTH = 128

# Files that describe an instance are named after its model and its process, and `NAME.images` after `NAME`.
_LONGEST_SERVED = 200

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
# More characters than for new models, because other programs write stores, too. Triton (24.10) passes the path of a
# model to a shell without quotes: a space breaks it, and other characters would be executed.
_SERVABLE = re.compile(r"[A-Za-z0-9_@%+=:,.-]+")
# Not escaped in paths: Triton (24.10) compares paths with names of models and undoes no escapes.
_LITERAL = "@%+=:,"


def fault_in_name(name: str) -> str:
    """Explain why a name is not valid for a new model; empty for a valid one."""
    if len(name) > MAX_LENGTH:
        return f"'{name[:20]}...' has {len(name)} characters, at most {MAX_LENGTH} are allowed"
    if not _NAME.fullmatch(name):
        return (
            f"{name!r} is not a model name: expected letters, digits, '_', '.' and '-', "
            "with a letter, a digit or '_' at the beginning"
        )
    return ""


def fault_in_served_name(name: str) -> str:
    """Explain why a folder of this name cannot be served; empty for a valid one."""
    if not _SERVABLE.fullmatch(name):
        return f"{name!r} is not a model name that Triton's Python stub supports"
    if len(name) > _LONGEST_SERVED:
        return f"'{name[:20]}...' has {len(name)} characters, at most {_LONGEST_SERVED} can be served"
    return ""


def in_path(name: str) -> str:
    """Escape a model's name for the path of a request (RFC 3986), except characters of served names."""
    return quote(name, safe=_LITERAL)


_MOST = 40  # names in one hint


def did_you_mean(name: str, known: Iterable[str], *, prefix: str = "", otherwise: str = "") -> str:
    """Hint for a name that does not exist.

    Args:
        name: The unknown name.
        known: Known names.
        prefix: Prefix of the suggested name, for example `--`.
        otherwise: Hint if no name is similar; the known names if empty.
    """
    names = list(known)
    if near := nearest(name, names):
        return f"did you mean '{prefix}{near}'?"
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return otherwise or f"known: {', '.join(names[:_MOST]) or 'none'}{more}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the most similar known name, or an empty string."""
    import difflib  # only for errors

    near = difflib.get_close_matches(name, known, n=1)
    return near[0] if near else ""


def request_prefix(request_id: str) -> str:
    """Prefix of a log message about a request, as Triton's own messages have it; empty without an id.

    The id is written as a JSON string, so that no id can end the prefix.
    """
    return f"[request id: {json.dumps(request_id)}] " if request_id else ""
