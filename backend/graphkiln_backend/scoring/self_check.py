"""Whether a session still computes what it was proven by: asked when it fails, to tell a bad row from a bad worker."""

from __future__ import annotations

from graphkiln_backend.lowering.replaying import Replay


def check_session(replay: Replay | None) -> None:
    """Computes the samples of a session's proof once more. Nothing else may run on it meanwhile.

    Args:
        replay: What to prove; None where nothing can be, which proves nothing.

    Raises:
        GraphkilnError: The session fails, or computes something else.
    """
    if replay is None:
        return
    outputs = replay.output_subsets[0]
    replay.judge([replay.run(sample, outputs) for sample in range(len(replay.samples))])
