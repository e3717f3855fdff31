"""How many rows are computed together: measured once for a session on a machine, and remembered in the artifact cache.

More rows are faster only as long as what lies between two operators fits the processor's caches, and they need more
memory in any case: of sizes that are equally fast the smallest is taken.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from graphkiln_backend.engines.base import Session, SessionConfig
from graphkiln_backend.graph.errors import ExecutionError, SignatureError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.lowering.artifacts import Artifacts
from graphkiln_backend.lowering.measurement import Measurement, keep_measurement, read_measurement
from graphkiln_backend.lowering.plan import pick_fastest
from graphkiln_backend.lowering.synthetic import SyntheticInputs
from graphkiln_backend.lowering.warmup import feeds_of

_ROUNDS = 3


def choose_batch_size(
    artifacts: Artifacts,
    session: Session,
    config: SessionConfig,
    sizes: Sequence[int],
    samples: GoldenSamples | SyntheticInputs | None,
) -> int:
    """The fastest of some batch sizes, as it is remembered or measured now.

    Args:
        artifacts: Of the version; remembers.
        session: Ready and warm.
        config: What it was built by.
        sizes: Those that it was proven at, ascending.
        samples: Golden samples, or how to make some up; None where neither is known: the largest size is taken then.
    """
    if len(sizes) == 1 or samples is None:
        return sizes[-1]
    conditions = {"batch sizes": str(sizes), "threads": str(config.threads), "spin": str(config.spin)}
    with artifacts.reserve_choice([config], conditions) as reservation:
        measurement = read_measurement(reservation)
        if measurement is None:
            measurement = measure_sizes(session, sizes, samples)
            keep_measurement(reservation, measurement)
        return int(measurement.chosen)


def measure_sizes(session: Session, sizes: Sequence[int], samples: GoldenSamples | SyntheticInputs) -> Measurement:
    """Times a session at some batch sizes, which take turns.

    Args:
        session: Ready and warm.
        sizes: Ascending.
        samples: Golden samples, or how to make some up.

    Returns:
        The smallest size whose rows are computed as fast as those of any, within noise, and the rows per second of
        each; a session that fails at a size is not run at larger ones.
    """
    row_s: dict[int, float] = dict.fromkeys(sizes, math.inf)
    for _ in range(_ROUNDS):
        for size in sizes:
            try:
                row_s[size] = min(row_s[size], _time_s(session, samples, size) / size)
            except (ExecutionError, SignatureError):
                break
    timed = {size: seconds for size, seconds in row_s.items() if seconds < math.inf}
    if not timed:
        return Measurement(chosen=str(sizes[0]), rates={})
    chosen = list(timed)[pick_fastest(list(timed.values()))]
    return Measurement(
        chosen=str(chosen), rates={str(size): float(f"{1 / seconds:.4g}") for size, seconds in timed.items()}
    )


def _time_s(session: Session, samples: GoldenSamples | SyntheticInputs, size: int) -> float:
    feeds = feeds_of(samples, session.signature, size)
    begun = time.perf_counter()
    session.run(feeds)
    return time.perf_counter() - begun
