"""Warming up: the sizes that serving will form, with samples that make sense or made-up ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.lowering.warmup import repeated, synthetic_feeds, warm_up
from graphkiln_backend.repository.version import read_version

STEP = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="test")


def test_every_size_is_run(digits: Path) -> None:
    version = read_version(digits / "1")
    seen: list[int] = []
    with OnnxRuntimeEngine().build(version.graph_path, STEP) as session:
        run = session.run
        session.run = lambda feeds, outputs=None: (seen.append(len(feeds["INPUT_0"])), run(feeds, outputs))[1]  # type: ignore[method-assign]
        assert warm_up(session, (1, 4, 7), version.golden) == ""
    assert sorted(set(seen)) == [1, 4, 7]


def test_made_up_inputs_that_fail_are_reported_not_raised(digits: Path) -> None:
    class Failing:
        def __init__(self, session: Any) -> None:
            self.signature = session.signature

        def run(self, *_: Any) -> Any:
            raise ExecutionError("no such index")

    version = read_version(digits / "1")
    with OnnxRuntimeEngine().build(version.graph_path, STEP) as session:
        failing: Any = Failing(session)
        assert "no such index" in warm_up(failing, (1,), None)
        with pytest.raises(ExecutionError):
            warm_up(failing, (1,), version.golden)


def test_samples_are_repeated_in_order() -> None:
    np.testing.assert_array_equal(repeated({"x": np.arange(3)}, 7)["x"], [0, 1, 2, 0, 1, 2, 0])


def test_made_up_feeds_fit_the_signature(digits: Path) -> None:
    manifest = read_version(digits / "1").manifest
    assert manifest
    manifest.signature.check(synthetic_feeds(manifest.signature, 5))
