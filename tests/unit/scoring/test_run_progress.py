"""A line of `--progress json` can be read back."""

from __future__ import annotations

import json

import pytest
from score_events import RUN, Clock

from graphkiln.scoring.run_state import Progress, RunState
from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.graph.errors import ManifestError


def test_every_line_is_a_progress() -> None:
    state = RunState(Clock())
    for event in RUN:
        progress = state.observe(event)
        assert decode(Progress, json.loads(json.dumps(encode(progress)))) == progress


def test_a_line_with_another_key_is_none() -> None:
    with pytest.raises(ManifestError):
        decode(Progress, {"event": "unit", "row": 1})
