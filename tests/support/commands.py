"""Results of commands, and a fake client for tests of the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from graphkiln.cli.connection import ConnectionOptions
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_client import Classification, Health, Result, ServedModel


@dataclass(frozen=True)
class Finished:
    """Result of a command: exit code, standard output, standard error."""

    code: int
    out: str
    err: str


RunVerb = Callable[..., Finished]
BreakOutputs = Callable[[Callable[[int, bool], bool]], None]


def table_rows(out: str) -> list[list[str]]:
    """Cells of the rows of all printed tables, without titles."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]


def words(out: str) -> str:
    """Printed text without table frames and line breaks."""
    return " ".join(out.replace("│", " ").split())


@dataclass
class FakeModel:
    """Model with given responses."""

    name: str = "digits"
    inputs: list[dict[str, Any]] = field(
        default_factory=lambda: [{"name": "X", "datatype": "FP32", "shape": [-1, 2, 2]}]
    )
    outputs: dict[str, AnyArray] = field(default_factory=lambda: {"Y": np.array([[1.5, -2.0]], np.float32)})
    preprocess: Preprocess = field(default_factory=lambda: Preprocess(resize=2, crop=(2, 2)))
    error: Exception | None = None
    fed: list[dict[str, AnyArray]] = field(default_factory=list)
    requested: list[tuple[str, ...]] = field(default_factory=list)
    counted: int = 0
    versions: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    answers: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    # File names that end in `error`; all of them if None.
    failing: tuple[str, ...] | None = None
    result_outputs: dict[str, tuple[Classification, ...]] | None = None

    @property
    def metadata(self) -> dict[str, Any]:
        outputs = [
            {"name": name, "datatype": "FP32", "shape": list(array.shape)} for name, array in self.outputs.items()
        ]
        return {"inputs": self.inputs, "outputs": outputs, "versions": self.versions}

    def infer(self, feeds: dict[str, AnyArray], outputs: Any = ()) -> dict[str, AnyArray]:
        self.fed.append(dict(feeds))
        self.requested.append(tuple(outputs))
        if self.error:
            raise self.error
        return self.outputs

    def classify_many(self, images: list[Path], **options: Any) -> Iterator[Result | Exception]:
        for number, image in enumerate(images):
            if self.error and (self.failing is None or image.name in self.failing):
                yield self.error
            else:
                yield self.result(image, options["top_k"])
            if options["progress"]:
                options["progress"](number + 1)

    def answer_many(self, images: list[Path], **options: Any) -> Iterator[Any]:
        """Return the entry of `answers` for each file name, or the error."""
        self.options = options
        for image in images:
            yield self.error if self.error and image.name not in self.answers else self.answers[image.name]

    detect_many = segment_many = embed_many = answer_many

    def result(self, image: Path, top_k: int) -> Result:
        ranked = tuple(Classification(index=i, label=f"class {i}", score=0.9 / (i + 1)) for i in range(top_k))
        return Result(
            source=str(image), model=self.name, version="1", request_id="r", latency_ms=1.25,
            outputs=self.result_outputs or {"OUTPUT_0": ranked},
        )  # fmt: skip

    def statistics(self) -> dict[str, Any]:
        """Return statistics of ten more requests at each call, in two executions."""
        self.counted += 10
        times_us = {"queue": 10, "compute_input": 20, "compute_infer": 300, "compute_output": 40}
        stages = {name: {"count": self.counted, "ns": us * 1000 * self.counted} for name, us in times_us.items()}
        return {
            "inference_stats": {"success": {"count": self.counted, "ns": 1}, **stages},
            "execution_count": self.counted // 5,
            "inference_count": self.counted,
        }


@dataclass
class FakeClient:
    """Client with given responses.

    Attributes:
        connected: Options of opened connections.
        changed: Loaded and unloaded models.
        healths: States that `health` returns or raises in turn; the last one is repeated.
    """

    url: str = "http://nowhere.test:8000"
    fake_model: FakeModel = field(default_factory=FakeModel)
    served: tuple[ServedModel, ...] = ()
    healths: list[Health | Exception] = field(default_factory=lambda: [Health(live=True, ready=True, server="triton")])
    connected: list[ConnectionOptions] = field(default_factory=list)
    changed: list[tuple[str, str]] = field(default_factory=list)
    models_opened: list[tuple[str, str]] = field(default_factory=list)
    open: int = 0
    image_form: str = ""

    def __enter__(self) -> Self:
        self.open += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.open -= 1

    def model(self, name: str, version: str = "", *, images: str = "auto") -> FakeModel:
        self.models_opened.append((name, version))
        self.image_form = images
        return self.fake_model

    def load(self, name: str) -> None:
        self.changed.append(("load", name))

    def unload(self, name: str) -> None:
        self.changed.append(("unload", name))

    def models(self) -> tuple[ServedModel, ...]:
        return self.served

    def health(self) -> Health:
        state = self.healths.pop(0) if len(self.healths) > 1 else self.healths[0]
        if isinstance(state, Exception):
            raise state
        return state
