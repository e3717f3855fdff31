"""What a graph with an embedded top-k tells clients: which outputs hold it, and the names of the classes.

Triton attaches labels to scores by their position in the output; in a top-k output the position is the rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphkiln_backend.graph.decoding import decode_json, encode_json

PARAMETER = "ranking"
"""The key of config.pbtxt's `parameters` under which it is published, as JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """The outputs of an embedded top-k.

    Attributes:
        scores: Name of the output of scores, `[batch, k]`, best first.
        indices: Name of the output of their classes, integers of the same shape.
        labels: Class names by index; empty for none.
    """

    scores: str
    indices: str
    labels: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, text: str) -> Ranking:
        """Parses a published ranking.

        Raises:
            ManifestError: Not JSON, or not a ranking; the message names the bad key.
        """
        return decode_json(cls, text, what="the ranking", path=PARAMETER)

    def to_json(self) -> str:
        """The ranking as one line of JSON."""
        return encode_json(self)
