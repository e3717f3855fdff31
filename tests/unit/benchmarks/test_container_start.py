"""The rows of a container's cold start."""

from __future__ import annotations

from container_start import Start, rows_of


def start(ready: float) -> Start:
    return Start(created=0.5, listens=ready / 2, ready=ready)


def test_rows_are_medians_with_the_worst_and_ratios_to_the_start_without_a_cache() -> None:
    cold = [start(seconds) for seconds in (4.0, 2.0, 9.0)]
    kept = [start(seconds) for seconds in (1.0, 2.0, 3.0)]
    first, second = rows_of({("m", "cold"): cold, ("m", "cache kept"): kept})
    assert (first["ready s"], first["listens s"], first["worst s"], first["ratio"]) == (4.0, 2.0, 9.0, 1.0)
    assert (second["set-up"], second["ready s"], second["ratio"]) == ("cache kept", 2.0, 0.5)
