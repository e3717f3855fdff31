"""A candidate: one value for each key that is tuned."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from graphkiln.tuning.subject import Subject
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_backend.lowering.settings import ACCELERATOR_ORIGIN
from graphkiln_backend.repository.config_changes import NO_BATCHER, ConfigChanges

# Value of a key; a tuple of batch sizes for `preferred_batch_sizes`.
Value = str | int | bool | tuple[int, ...]

ENGINE, PRECISION, THREADS, STREAMS, SPIN = "engine", "precision", "threads", "streams", "spin"
INSTANCES, MAX_BATCH_SIZE, PREFERRED = "instances", "max_batch_size", "preferred_batch_sizes"
# Queue delay of the dynamic batcher in microseconds; -1 (NO_BATCHER) for no dynamic batcher.
QUEUE_DELAY_US = "max_queue_delay_us"
LAYOUT, CONV_SEARCH = "layout", "conv_search"
# Name of the setting in ONNX Runtime's session options.
SPIN_ENTRY = "session.intra_op.allow_spinning"
# Value of `layout` and `conv_search` that leaves the choice to the engine.
ENGINES_CHOICE = "engine's"
# Text form of an empty list.
NOTHING = "none"
# Keys that a session without a server depends on; the others belong to the scheduler.
SESSION_KEYS = (ENGINE, PRECISION, THREADS, STREAMS, SPIN)


@dataclass(frozen=True)
class Candidate:
    """An immutable set of values by key.

    Attributes:
        items: (key, value) pairs in alphabetical order of the keys, so that equal values make equal candidates.
    """

    items: tuple[tuple[str, Value], ...]

    @classmethod
    def of(cls, values: Mapping[str, Value]) -> Self:
        """Create a candidate from values by key."""
        return cls(tuple(sorted(values.items())))

    @cached_property
    def values(self) -> dict[str, Value]:
        """The values by key."""
        return dict(self.items)

    @cached_property
    def id(self) -> str:
        """Ten hexadecimal digits of a digest of the values, stable across processes."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:10]

    def __getitem__(self, key: str) -> Value:
        return self.values[key]

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def number(self, key: str, default: int = 1) -> int:
        """Return the value of a numeric key, or the default if the key is not tuned."""
        value = self.values.get(key, default)
        return value if isinstance(value, int) else default

    def with_values(self, values: Mapping[str, Value]) -> Self:
        """Return a copy with some values replaced or added."""
        return type(self).of(self.values | dict(values))

    def restricted_to(self, keys: Iterable[str]) -> Self:
        """Return a copy with only these keys."""
        kept = set(keys)
        return type(self)(tuple(item for item in self.items if item[0] in kept))

    def as_json(self) -> dict[str, Value | list[int]]:
        """Return the values as JSON data."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in self.items}

    def __str__(self) -> str:
        return ", ".join(f"{key}={format_value(value)}" for key, value in self.items)


def format_value(value: Value | list[int]) -> str:
    """Format a value as `--fix` reads it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return "+".join(map(str, value)) or NOTHING if isinstance(value, tuple | list) else str(value)


# Translation between candidates and config.pbtxt.


def changes_of(candidate: Candidate, subject: Subject) -> ConfigChanges:
    """Return the changes to config.pbtxt that serve a candidate."""
    delay = candidate.values.get(QUEUE_DELAY_US)
    preferred = candidate.values.get(PREFERRED)
    return ConfigChanges(
        parameters=_parameters(candidate, subject),
        instances=_number(candidate, INSTANCES) if subject.single_group else None,
        max_batch_size=_number(candidate, MAX_BATCH_SIZE),
        queue_delay_us=delay if isinstance(delay, int) else None,
        preferred_batch_sizes=preferred if isinstance(preferred, tuple) and delay != NO_BATCHER else None,
        on_gpu=subject.config.device.is_gpu,
    )


def version_of(candidate: Candidate, subject: Subject) -> Path | None:
    """Return the version folder that a candidate is served from, or None for the subject's own."""
    return subject.int8 if candidate.values.get(PRECISION) == Precision.INT8 else None


def default_values(subject: Subject) -> dict[str, Value]:
    """Return the values of the current deployment."""
    serving = subject.deployment.plan.configs[0]
    settings = subject.deployment.settings
    return {
        ENGINE: settings.engine or serving.engine,
        PRECISION: str(settings.precision or subject.deployment.saved),
        THREADS: serving.threads,
        STREAMS: serving.streams,
        # spinning needs a second thread to wait for
        SPIN: serving.spin and serving.engine == "onnxruntime" and serving.threads > 1,
        LAYOUT: serving.layout or ENGINES_CHOICE,
        CONV_SEARCH: serving.conv_search or ENGINES_CHOICE,
        INSTANCES: subject.config.instances,
        MAX_BATCH_SIZE: subject.config.max_batch_size,
        QUEUE_DELAY_US: subject.queue_delay_us,
        PREFERRED: subject.config.preferred_batch_sizes or (),
    }


def _parameters(candidate: Candidate, subject: Subject) -> dict[str, str]:
    """Return the parameters of config.pbtxt; empty text removes one."""
    values, settings = candidate.values, subject.deployment.settings
    found = {key: str(values[key]) for key in (ENGINE, THREADS) if key in values}
    if STREAMS in values:
        # one stream is the default, unless the accelerator in config.pbtxt sets more
        streams, origin = candidate.number(STREAMS), settings.origins.get(STREAMS, "")
        overrides = origin.startswith(ACCELERATOR_ORIGIN) and values.get(ENGINE) == "openvino"
        found[STREAMS] = str(streams) if streams > 1 or overrides else ""
    if PRECISION in values:
        # the precision of the saved graph is the default, unless the configuration sets one
        precision = Precision(str(values[PRECISION]))
        saved = Precision.INT8 if subject.int8 and precision is Precision.INT8 else subject.deployment.saved
        found[PRECISION] = "" if precision is saved and settings.precision is None else str(precision)
    if SPIN in values:
        found[SPIN_ENTRY] = str(int(bool(values[SPIN]))) if values.get(ENGINE) == "onnxruntime" else ""
    chosen = {key: str(values[key]) for key in (LAYOUT, CONV_SEARCH) if key in values}
    return found | {key: "" if value == ENGINES_CHOICE else value for key, value in chosen.items()}


def _number(candidate: Candidate, key: str) -> int | None:
    return candidate.number(key) if key in candidate else None


# Values of `--fix`.

# Minimum of each numeric key.
_LEAST = {THREADS: 1, STREAMS: 1, INSTANCES: 1, MAX_BATCH_SIZE: 0, QUEUE_DELAY_US: -1}
_SWITCHES = {"on": True, "off": False, "true": True, "false": False}


def parse_fixes(texts: Sequence[str], default: Candidate) -> dict[str, Value]:
    """Parse all values of `--fix`.

    Raises:
        InvalidInput: A value cannot be parsed, or a key is given two values.
    """
    fixed: dict[str, Value] = {}
    for text in texts:
        key, value = parse_fixed(text, default)
        if fixed.setdefault(key, value) != value:
            raise InvalidInput(f"--fix {text}: '{key}' is already fixed to another value", hint="give each key once")
    return fixed


def parse_fixed(text: str, default: Candidate) -> tuple[str, Value]:
    """Parse one `KEY=VALUE` of `--fix`.

    Raises:
        InvalidInput: The key is not tuned, or the value has the wrong type.
    """
    key, equals, value = text.partition("=")
    if not equals or not value:
        raise InvalidInput(f"--fix {text}: expected KEY=VALUE")
    if key not in default:
        raise InvalidInput(
            f"--fix {text}: '{key}' is not tuned for this model", hint=did_you_mean(key, list(default.values))
        )
    return key, _parse_value(text, key, value, default[key])


def _parse_value(text: str, key: str, value: str, example: Value) -> Value:
    if key == SPIN:
        if value not in _SWITCHES:
            raise InvalidInput(f"--fix {text}: expected on or off")
        return _SWITCHES[value]
    try:
        if key == PREFERRED:
            return tuple(int(part) for part in value.split("+")) if value != NOTHING else ()
        number = int(value) if isinstance(example, int) else None
    except ValueError:
        raise InvalidInput(f"--fix {text}: expected a whole number", hint=f"such as {key}={example}") from None
    if number is not None and number < _LEAST.get(key, 0):
        raise InvalidInput(f"--fix {text}: expected at least {_LEAST.get(key, 0)}")
    return value if number is None else number
