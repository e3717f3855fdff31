"""Rows with images, and sessions that tests can inspect."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from graphkiln_backend.engines.base import Placement
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.scoring.messages import Row
from graphkiln_backend.system.closing import Closeable

SIDE = 4
SPEC = Preprocess(resize=(SIDE, SIDE), color="L", layout="HWC", dtype=DType.UINT8)


def gray(value: int, size: tuple[int, int] = (SIDE, SIDE)) -> bytes:
    file = io.BytesIO()
    Image.new("L", size, value).save(file, "PNG")
    return file.getvalue()


def row(name: str, content: bytes | Exception, **kept: Any) -> Row:
    def load() -> bytes:
        if isinstance(content, Exception):
            raise content
        return content

    return Row(id=name, load=load, kept=kept)


def grays(values: Iterable[int]) -> list[Row]:
    return [row(str(value), gray(value)) for value in values]


class FakeSession(Closeable):
    """Return the mean of each image, and its square.

    Args:
        fails_on: Images of this gray value fail, and the batch that holds one.
        batched: Whether there is a batch dimension.
    """

    def __init__(self, fails_on: int = -1, *, batched: bool = True) -> None:
        self.fails_on, self.batched = fails_on, batched
        self.batches: list[int] = []
        self.requested: list[Sequence[str] | None] = []
        self.running = threading.Lock()
        self.on_run: Callable[[], object] = lambda: None
        lead = ("batch",) if batched else ()
        self.signature = Signature(
            inputs=(TensorSpec(name="x", dtype=DType.UINT8, shape=(*lead, SIDE, SIDE, 1)),),
            outputs=(
                TensorSpec(name="mean", dtype=DType.FP32, shape=(*lead, 1)),
                TensorSpec(name="square", dtype=DType.FP32, shape=(*lead, 1)),
            ),
        )

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        assert self.running.acquire(blocking=False), "a session has one caller at a time"
        try:
            self.on_run()
            images = feeds["x"] if self.batched else feeds["x"][np.newaxis]
            means = images.reshape(len(images), -1).astype(np.float32).mean(axis=1, keepdims=True)
            self.batches.append(len(images))
            self.requested.append(outputs)
            if self.fails_on in means:
                raise ExecutionError(f"cannot compute {self.fails_on}")
            found = {"mean": means, "square": means**2}
            return {name: found[name] if self.batched else found[name][0] for name in outputs or found}
        finally:
            self.running.release()

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is held."""
