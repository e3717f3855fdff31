"""What was found out about a session when it was proven for the first time on this machine, for later starts.

The golden samples are replayed, or a request is made, at every start. What follows from the graph, the engine's
release and the processor alone is found once: which kernels run, which takes a second session to see; whether rows may
share a batch; which batch sizes pay for being run ahead. An entry is named by all that it depends on.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from graphkiln_backend.engines.base import Engine, KernelType, Placement, SessionConfig
from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.graph.errors import CacheError, ManifestError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.artifacts import Artifacts

_log = logging.getLogger("graphkiln.lowering")

_FILE = "observations.json"
_NO_PRECISION: dict[str, KernelType] = {"fp64": "fp64", "integer": "integer", "unknown": "unknown"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadPlacement:
    """A `Placement`, as the file holds it."""

    nodes: dict[str, int]
    precision: KernelType
    products: dict[str, int] = field(default_factory=dict)
    elsewhere: tuple[str, ...] = ()

    @classmethod
    def of(cls, placement: Placement) -> ReadPlacement:
        """To keep it."""
        products = {str(name): count for name, count in placement.products.items()}
        return cls(
            nodes=dict(placement.nodes),
            precision=placement.precision,
            products=products,
            elsewhere=placement.elsewhere,
        )

    @property
    def placement(self) -> Placement:
        """As it was read back from the engine."""
        return Placement(
            nodes=self.nodes,
            precision=self.precision,
            products={_kernel_type(name): count for name, count in self.products.items()},
            elsewhere=self.elsewhere,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Observations:
    """What holds for every session that is built alike; `observations.json` keeps it under these names.

    Attributes:
        complete: Whether anything was found out yet.
        placed: What ran where; None where it could not be read.
        mixed: Why the rows of several requests must not be computed together; empty where they may.
        repeats: Whether the same request gave the same bits again and again.
        warmed: The batch sizes that paid for being run before the first request, in the order of the runs; None where
            that failed.
    """

    complete: bool = False
    placed: ReadPlacement | None = None
    mixed: str = ""
    repeats: bool = False
    warmed: tuple[int, ...] | None = None


def read_observations(
    artifacts: Artifacts, engine: Engine, config: SessionConfig, conditions: Mapping[str, str]
) -> Observations:
    """What is known of sessions that are built alike; nothing where the cache does not last.

    Args:
        artifacts: Of the version.
        engine: Builds them.
        config: How.
        conditions: What else it depends on.
    """
    with artifacts.reserve_observations(engine, config, conditions) as reservation:
        path = reservation.path if reservation else None
        if path is None:
            return Observations()
        try:
            return decode(Observations, json.loads((path / _FILE).read_bytes()))
        except (OSError, ValueError, ManifestError) as error:
            _log.warning("what was found out about %s cannot be read: %s", config, error)
            return Observations()


def keep_observations(
    artifacts: Artifacts,
    engine: Engine,
    config: SessionConfig,
    conditions: Mapping[str, str],
    observations: Observations,
) -> None:
    """Keeps what was found out for later starts; where it cannot be written, that is logged, and is no fault.

    Args:
        artifacts: Of the version.
        engine: As for `read_observations`.
        config: The same.
        conditions: The same.
        observations: What to keep.
    """
    with artifacts.reserve_observations(engine, config, conditions) as reservation:
        if reservation is None or reservation.path:  # another instance was faster
            return
        try:
            with reservation.write() as folder:
                (folder / _FILE).write_text(json.dumps(encode(observations)))
        except CacheError as error:
            _log.warning("what was found out about %s is not remembered: %s", config, error)


def _kernel_type(name: str) -> KernelType:
    return _NO_PRECISION.get(name) or Precision(name)
