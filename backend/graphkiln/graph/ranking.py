"""What a graph that answers its best classes itself tells clients: in which outputs, and what the classes are called.

Triton attaches labels to scores by their place in the output; in a top-k output the place is the rank.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from graphkiln.graph.decoding import decode, encode
from graphkiln.graph.errors import ManifestError

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
        """Parses what is published.

        Raises:
            ManifestError: Not JSON, or something else; the message names the bad key.
        """
        try:
            document = json.loads(text)
        except json.JSONDecodeError as error:
            raise ManifestError(f"the ranking is not JSON: {error}") from error
        return decode(cls, document, path=PARAMETER)

    def to_json(self) -> str:
        """As one line of JSON."""
        return json.dumps(encode(self), separators=(",", ":"), ensure_ascii=False)
