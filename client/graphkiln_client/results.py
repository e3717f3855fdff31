"""Results of the clients: classifications, and the state of a server and its models."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ProtocolError
from graphkiln_backend.graph.text import plain_reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Classification:
    """One class of a ranking.

    Attributes:
        index: Class index, 0 is the first.
        label: The class's name, or empty when the model has no labels.
        score: The model's score, in the model's own unit (logit or probability), or a probability of the softmax.
        position: The row of a per-position output that this ranks, for example `(y, x)`; empty for a plain output.
    """

    index: int
    label: str
    score: float
    position: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Classification:
        """Parse one element of a classification output: `score:index` or `score:index:label`.

        Source: Triton's classification extension.

        Raises:
            ProtocolError: The text is something else.
        """
        score, _, rest = text.partition(":")
        index, _, label = rest.partition(":")
        try:
            return cls(index=int(index), label=_plain(label), score=float(score))
        except ValueError:
            raise ProtocolError(f"expected a classification 'score:index[:label]', got {text[:80]!r}") from None


def _plain(label: str) -> str:
    """Without what a labels file from Windows leaves: Triton ends lines at line feeds alone."""
    return label.removesuffix("\r").removeprefix("\ufeff")


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The classification of one image.

    Attributes:
        source: The file's path, or a description of what was classified.
        model: The model that ran.
        version: Its version.
        request_id: The id that the request carried.
        latency_ms: Milliseconds from sending the request until its response was there, with retries and waits before
            them. Preprocessing counts for images that are sent encoded, where the server does it; not otherwise.
        outputs: Classes by output name, best first; position after position where an output has several.
    """

    source: str
    model: str
    version: str
    request_id: str
    latency_ms: float
    outputs: Mapping[str, tuple[Classification, ...]]

    @property
    def classifications(self) -> tuple[Classification, ...]:
        """The classes of the first output; most models have only one."""
        return next(iter(self.outputs.values()))

    @property
    def top(self) -> Classification:
        """The best class."""
        return self.classifications[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `json` can write.

        `classifications` is one list. An entry names its `output` where the model has several, and its `position` where
        the output has some; a score that is not finite is None.
        """
        several = len(self.outputs) > 1
        rows = [
            {**({"output": name} if several else {}), **_to_dict(entry)}
            for name, entries in self.outputs.items()
            for entry in entries
        ]
        fields = {name: getattr(self, name) for name in ("source", "model", "version", "request_id", "latency_ms")}
        return {**fields, "classifications": rows}


def _to_dict(entry: Classification) -> dict[str, Any]:
    score = entry.score if math.isfinite(entry.score) else None
    row: dict[str, Any] = {"index": entry.index, "label": entry.label, "score": score}
    return {**row, "position": list(entry.position)} if entry.position else row


def classifications(
    indices: npt.NDArray[np.int64], scores: AnyArray, labels: Sequence[str]
) -> tuple[Classification, ...]:
    """The best classes of one sample.

    Args:
        indices: `[*positions, k]`, best first.
        scores: Their scores, `[*positions, k]`.
        labels: By class index; may be shorter than there are classes.
    """
    entries = []
    for position in np.ndindex(indices.shape):
        index = int(indices[position])
        label = labels[index] if index < len(labels) else ""
        entries.append(Classification(index=index, label=label, score=float(scores[position]), position=position[:-1]))
    return tuple(entries)


@dataclass(frozen=True, kw_only=True, slots=True)
class Health:
    """The state of a server.

    Attributes:
        live: True if it responds.
        ready: True if every model is ready.
        server: The server's name and version, for example `triton 2.51.0`; empty while it is not live.
        not_ready: The model versions that are not ready, with their reasons.
    """

    live: bool
    ready: bool
    server: str = ""
    not_ready: tuple[ServedModel, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A model version that a server knows.

    Attributes:
        name: Model name.
        version: Its version; empty where no version was ever loaded.
        state: `READY`, `LOADING`, `UNLOADING` or `UNAVAILABLE`; empty where no version was ever loaded.
        reason: Why it is not ready, or empty.
    """

    name: str
    version: str
    state: str
    reason: str

    @property
    def ready(self) -> bool:
        """True if it can serve requests."""
        return self.state == "READY"

    @classmethod
    def parse(cls, row: dict[str, Any]) -> ServedModel:
        """Parse a row of the server's repository index.

        Source: Triton's model repository extension.

        Raises:
            ProtocolError: The row names no model.
        """
        if not isinstance(row.get("name"), str):
            raise ProtocolError(f"a row of the repository index names no model: {str(row)[:80]}")
        version, state, reason = (str(row.get(key, "")) for key in ("version", "state", "reason"))
        return cls(name=row["name"], version=version, state=state, reason=plain_reason(reason))
