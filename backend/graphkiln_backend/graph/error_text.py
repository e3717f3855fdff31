"""Error texts on their way to a person: short enough for every protocol, and without what only a debugger needs."""

from __future__ import annotations

LIMIT_BYTES = 2048
"""Of a text that crosses a protocol. gRPC sends it in a header, where each byte that is not plain ASCII takes three,
and by default no headers of more than 8 KiB. Source: gRPC, "Status codes", `GRPC_ARG_MAX_METADATA_SIZE`."""
_TRACEBACK = "\n\nAt:\n"
"""What pybind11, and so Triton's Python backend, puts between an error and where it was raised."""
_WRAPPERS = ("Internal: ", "TritonModelException: ")


def bounded(text: str, limit_bytes: int = LIMIT_BYTES) -> str:
    """A text that takes at most so many bytes in UTF-8: what is cut off is said, and no character is cut in two.

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
    """Whether a line is `  /path/model.py(97): initialize`, or ends such a list."""
    return line.startswith("  ") or not line.strip(" ;\n")


def plain_reason(text: str) -> str:
    """Triton's reason why a version is not served, as a cell of a table: the cause alone, on one line."""
    cause = without_traceback(text)
    for prefix in _WRAPPERS:
        cause = cause.removeprefix(prefix)
    return " ".join(cause.split())
