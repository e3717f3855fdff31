"""What a classification call returns."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from graphkiln.graph.errors import ProtocolError


@dataclass(frozen=True, kw_only=True, slots=True)
class Classification:
    """One answer.

    Attributes:
        index: Class index, 0 is the first.
        label: The class's name, or empty when the model has no labels.
        score: The model's score, in the model's own unit (logit or probability).
    """

    index: int
    label: str
    score: float

    @classmethod
    def parse(cls, text: str) -> Classification:
        """Reads one element of a classification answer: `score:index` or `score:index:label`.

        Source: Triton's classification extension.

        Raises:
            ProtocolError: The text is something else.
        """
        score, _, rest = text.partition(":")
        index, _, label = rest.partition(":")
        try:
            return cls(index=int(index), label=label, score=float(score))
        except ValueError:
            raise ProtocolError(f"expected a classification 'score:index[:label]', got {text[:80]!r}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The answer for one picture.

    Attributes:
        source: The file's path, or a description of what was classified.
        model: The model that answered.
        version: The version that answered.
        request_id: The id that the request carried.
        latency_ms: Milliseconds from sending the tensor until the answer was there (preprocessing not included).
        classifications: Best first.
    """

    source: str
    model: str
    version: str
    request_id: str
    latency_ms: float
    classifications: tuple[Classification, ...]

    @property
    def top(self) -> Classification:
        """The best answer."""
        return self.classifications[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `json` can write; a score that is not finite becomes None."""
        document = asdict(self)
        for answer in document["classifications"]:
            answer["score"] = answer["score"] if math.isfinite(answer["score"]) else None
        return document


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
        """Whether it answers."""
        return self.state == "READY"

    @classmethod
    def parse(cls, row: dict[str, Any]) -> ServedModel:
        """Reads a row of the server's index.

        Source: Triton's model repository extension.

        Raises:
            ProtocolError: The row names no model.
        """
        if not isinstance(row.get("name"), str):
            raise ProtocolError(f"a row of the server's index names no model: {str(row)[:80]}")
        texts = {key: str(row.get(key, "")) for key in ("version", "state", "reason")}
        return cls(name=row["name"], **texts)
