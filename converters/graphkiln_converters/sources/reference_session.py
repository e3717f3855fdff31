"""Runs a graph with ONNX's own implementation of its operators, in numpy: slow, and of every type."""

from __future__ import annotations

import _thread
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from graphkiln_backend.engines.base import Placement
from graphkiln_backend.engines.compute_limit import ComputeLimitExceeded, current_limit
from graphkiln_backend.graph.closing import Closeable
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ExecutionError, LoweringError
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.repository.onnx_file import read_signature


@dataclass(frozen=True, slots=True)
class ReferenceSession(Closeable):
    """A graph that ONNX's reference implementation runs; see `engines.base.Session`."""

    signature: Signature
    _evaluator: ReferenceEvaluator

    @classmethod
    def open(cls, graph: Path) -> ReferenceSession:
        """Loads a graph.

        Raises:
            LoweringError: It has an operator that the implementation does not know.
        """
        try:
            return cls(read_signature(graph), ReferenceEvaluator(onnx.load(graph)))
        except (NotImplementedError, RuntimeError, ValueError, TypeError) as error:
            raise LoweringError(f"{graph} cannot be computed in its own type", attempts=(str(error),)) from error

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        """Computes outputs; see `engines.base.Session.run`.

        Raises:
            ExecutionError: An operator failed.
        """
        names = [spec.name for spec in self.signature.outputs] if outputs is None else list(outputs)
        limit = current_limit()
        try:
            with limit.computation(_thread.interrupt_main) if limit else nullcontext():
                found = self._evaluator.run(names, dict(feeds))
        except ComputeLimitExceeded:
            raise
        except Exception as error:  # whatever an operator raises, in numpy
            raise ExecutionError(f"ONNX's reference implementation failed: {type(error).__name__}: {error}") from error
        return dict(zip(names, map(np.asarray, found), strict=True))

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:  # noqa: ARG002
        """Nothing of it is a kernel."""
        return Placement(nodes={}, precision="unknown")

    def close(self) -> None:
        """Nothing to free."""
