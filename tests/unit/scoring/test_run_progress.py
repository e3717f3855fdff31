"""A line of `--progress json` can be read back."""

from __future__ import annotations

import json

from score_events import RUN, Clock

from graphkiln.scoring.run_state import Progress, RunState
from graphkiln_backend.graph.decoding import decode, encode


def test_every_line_is_a_progress() -> None:
    state = RunState(Clock())
    for event in RUN:
        progress = state.observe(event)
        assert decode(Progress, json.loads(json.dumps(encode(progress)))) == progress
