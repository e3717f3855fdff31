"""Model stores for benchmarks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from graphkiln_backend.engines.hardware import missing_instructions
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.repository.config import BACKEND, config_text

REPOSITORY = Path(__file__).resolve().parents[2]
DIGITS = REPOSITORY / "model_repository" / "digits"
LARGEST_BATCH = 8  # of what `add_model` adds


def add_model(store: Path, name: str, graph: Path, extra: str = "", backend: str = BACKEND) -> None:
    """Adds a graph to a model store, with a complete configuration; `extra` is appended to it."""
    folder = store / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.onnx").symlink_to(graph)
    with _reference_signature(graph) as signature:
        text = config_text(name, signature, max_batch_size=LARGEST_BATCH, labels_file=None)
    text = text.replace(f'backend: "{BACKEND}"', f'backend: "{backend}"')
    (store / name / "config.pbtxt").write_text(text + extra)


def parameters(settings: Mapping[str, str]) -> str:
    """Settings as config.pbtxt spells them."""
    return "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in settings.items()
    )


def openvino_settings() -> dict[str, str]:
    """OpenVINO in bf16 where the processor multiplies in it, elsewhere in fp32: else it is refused."""
    precision = Precision.FP32 if missing_instructions(Precision.BF16) else Precision.BF16
    return {"engine": "openvino", "precision": str(precision)}


@contextmanager
def _reference_signature(graph: Path) -> Iterator[Signature]:
    from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine

    with OnnxRuntimeEngine().build_reference(graph) as session:
        yield session.signature
