"""Lines of a service's log as JSON objects: the supervisor's, Triton's, and those of its instances, which Triton logs.

Triton (24.10) writes a header before each message, in one of two forms (`--log-format`), and the message as a JSON
string, unless `TRITON_SERVER_ESCAPE_LOG_MESSAGES=FALSE` is in its environment. The core names the request that a
message is about at its beginning; so do the instances (`triton.failures`), whose ids are JSON strings: what a client
chose as its id cannot end it.

Source: Triton common, `src/logging.cc`; Triton core, `InferenceRequest::LogRequest`.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from datetime import UTC, datetime

_LEVELS = {"I": "info", "W": "warning", "E": "error", "F": "critical", "V": "debug"}
"""Triton's letters -> the names of Python's levels, in lower case."""
_HEADER = re.compile(
    r"(?:(?P<short>[IWEFV])\d{4} \d\d:\d\d:\d\d\.\d+|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ (?P<iso>[IWEFV]))"
    r" \d+ (?P<location>[^\s\]]+:\d+)\] ?(?P<text>.*)",
    re.DOTALL,
)
_OURS = "graphkiln: "
_INSTANCE = re.compile(
    r'graphkiln: (?P<model>[^\s:]+): (?:\[request id: (?P<request_id>"(?:[^"\\]|\\.)*")\] )?(?P<text>.*)', re.DOTALL
)
_TRITONS_REQUEST = re.compile(r"\[request id: (?P<request_id>.*?)\] (?P<text>.*)", re.DOTALL)
_UNKNOWN_ID = "<id_unknown>"
"""What Triton writes for a request without an id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogRecord:
    """One event of the log.

    Attributes:
        message: Its first line.
        level: `debug`, `info`, `warning`, `error` or `critical`.
        source: `graphkiln`, `triton`, or `other` for what neither of them formatted.
        model: The model that it is about, where that is known.
        request_id: The `id` of the request that it is about, as its client gave it.
        location: Where in Triton's code it was logged.
        details: Its further lines, such as a traceback.
    """

    message: str
    level: str = "info"
    source: str = "graphkiln"
    model: str = ""
    request_id: str = ""
    location: str = ""
    details: str = ""

    def to_json(self, now: datetime | None = None) -> str:
        """The event as one line, ASCII, without what is empty.

        Args:
            now: When it was logged; by default at this moment.
        """
        at = (now or datetime.now(UTC)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        fields = {name: value for name in _FIELDS if (value := getattr(self, name))}
        return json.dumps({"time": at, "level": self.level, "source": self.source, "message": self.message, **fields})


_FIELDS = ("model", "request_id", "location", "details")


def of_event(record: logging.LogRecord) -> LogRecord:
    """What a logger of this process logged; its `extra` may name a `model` and a `request_id`."""
    message, details = _split(record.getMessage())
    if record.exc_info:
        details = "\n".join(filter(None, (details, logging.Formatter().formatException(record.exc_info))))
    return LogRecord(
        message=message,
        level=record.levelname.lower(),
        model=getattr(record, "model", ""),
        request_id=getattr(record, "request_id", ""),
        details=details,
    )


def of_line(line: str) -> LogRecord:
    """A line of what the service's processes wrote.

    Args:
        line: Without its end.
    """
    if header := _HEADER.fullmatch(line):
        level = _LEVELS[header["short"] or header["iso"]]
        return _of_triton(_unquote(header["text"]), level, header["location"])
    if line.startswith(_OURS):
        return LogRecord(message=line.removeprefix(_OURS))
    return LogRecord(message=line, level="warning", source="other")


def _of_triton(text: str, level: str, location: str) -> LogRecord:
    """What Triton logged: for an instance, or of its own."""
    if ours := _INSTANCE.fullmatch(text):
        message, details = _split(ours["text"])
        request_id = json.loads(ours["request_id"] or '""')
        return LogRecord(level=level, message=message, details=details, model=ours["model"], request_id=request_id)
    request_id = ""
    if named := _TRITONS_REQUEST.match(text):
        request_id, text = named["request_id"].replace(_UNKNOWN_ID, ""), named["text"]
    message, details = _split(text)
    return LogRecord(
        source="triton", level=level, message=message, details=details, request_id=request_id, location=location
    )


def _unquote(text: str) -> str:
    """A message of Triton's, which is a JSON string or, where its environment says so, plain."""
    try:
        read = json.loads(text)
    except ValueError:
        return text
    return read if isinstance(read, str) else text


def _split(text: str) -> tuple[str, str]:
    """A message's first line, and the others."""
    message, _, details = text.strip("\n").partition("\n")
    return message, details
