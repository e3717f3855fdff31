"""Each model of OneFlow's library of models: converted, proven, whole and split, beside PyTorch and the whole."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from inputs import CACHE
from measurement import show_progress
from parts import Parts
from split_sessions import Planned, plan_instance, prove

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.base import Session
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.files import format_size
from graphkiln_backend.graph.graph_costs import GraphCosts
from graphkiln_backend.graph.parallelism import Parallelism
from graphkiln_backend.lowering.parallel.parts import count_costs
from graphkiln_backend.lowering.spreading import sample_shapes
from graphkiln_backend.passes.sharding import left_whole
from graphkiln_backend.repository.version import ModelVersion, read_version
from graphkiln_converters.convert import convert
from graphkiln_converters.recipe_file import read_recipe

if TYPE_CHECKING:
    from library_models import Made

PARTS = CACHE / "models"
"""Where each model is kept as it is done."""
NAMES = ("BERT", "GPT-2", "T5 encoder", "T5 decoder", "ViT", "Swin", "MoCo v3", "MAE")
_USUAL = ", usual size"
"""Ends the name of a model that is not small: it is done when it is asked for."""
_LARGEST_BATCH = 4
SPLITS = {"pipeline=2": Parallelism(pipeline=2, micro_batches=_LARGEST_BATCH), "tensor=2": Parallelism(tensor=2)}
_CORES = 2
_MOST_REASONS = 3
Arrays = Mapping[str, AnyArray]


def benchmark_models(rounds: int, seconds: float, only: str = "") -> list[dict[str, object]]:
    """Every small model, those that are not done yet now, and those of usual size that are done; nothing is timed.

    Args:
        rounds: Without meaning here.
        seconds: Likewise.
        only: Do this model, also where it is done, and no other; `BERT, usual size` is not small.

    Raises:
        SystemExit: There is no such model.
    """
    if only and only.removesuffix(_USUAL) not in NAMES:
        raise SystemExit(f"there is no model '{only}': {', '.join(NAMES)}")
    parts = Parts(PARTS, rounds, seconds)
    for name in [only] if only else NAMES:
        parts.measure(name, partial(_split_model, name), again=bool(only))
    show_progress("")
    names = [name for small in NAMES for name in (small, f"{small}{_USUAL}")]
    return [row for name in names for row in parts.read(name) or ()]


def _split_model(name: str) -> list[dict[str, object]]:
    from library_models import MODELS  # seconds of imports

    with tempfile.TemporaryDirectory() as folder, ArtifactCache(Path(folder) / "cache") as cache:
        show_progress(f"{name}: making and converting")
        files = Path(folder) / "files"
        files.mkdir()
        made = MODELS[name.removesuffix(_USUAL)](files, not name.endswith(_USUAL))
        version = convert_made(made, name, Path(folder) / "store")
        return list(rows_of(name, made, version, cache))


def convert_made(made: Made, name: str, store: Path) -> ModelVersion:
    """Converts a model under its own names of tensors.

    Args:
        made: The model.
        name: Its name; characters that no model may have are left out.
        store: The folder of models.

    Raises:
        GraphkilnError: It cannot be converted, or the graph computes something else.
    """
    legal = re.sub(r"[^a-z0-9]+", "-", name.lower())
    values = {"source": made.source, "name": legal, "model_store": store, "keep_names": True, **made.options}
    return read_version(convert(read_recipe(None, values, []), command=f"convert {made.source}"))


def rows_of(name: str, made: Made, version: ModelVersion, cache: ArtifactCache) -> Iterator[dict[str, object]]:
    """A row for the whole model, and one for each split that can be.

    Args:
        name: Of the model.
        made: Its inputs, and what its library computes.
        version: What it was converted to.
        cache: Where artifacts are kept.
    """
    costs = count_costs(version.graph_path, 1, sample_shapes(version))
    whole = plan_instance(version, None, cores=_CORES, largest_batch=_LARGEST_BATCH)
    with prove(whole, cache, batch_sizes=(1, _LARGEST_BATCH)).session as session:
        together, alone = session.run(made.feeds), run_alone(session, made.feeds)
    yield {
        "model": name,
        "split": "whole",
        "weights a device": format_size(costs.weight_bytes),
        "arithmetic a device": f"{costs.flops / 1e9:.3g} GFLOP",
        "to the whole": "-",
        "to PyTorch": f"{difference(together, made.expected):.0e}",
        "stays whole": "",
    }
    for split, numbers in SPLITS.items():
        show_progress(f"{name}: {split}")
        try:
            planned = plan_instance(version, numbers, cores=_CORES, largest_batch=_LARGEST_BATCH)
        except LoweringError as error:
            yield _refused(name, split, error)
            continue
        with prove(planned, cache, batch_sizes=(1, _LARGEST_BATCH)).session as session:
            found = session.run(made.feeds)
        yield _row(name, split, planned, costs, found, made, alone if numbers.pipeline > 1 else together)


def _row(  # noqa: PLR0917 - the columns
    name: str, split: str, planned: Planned, whole: GraphCosts, found: Arrays, made: Made, reference: Arrays
) -> dict[str, object]:
    stages = planned.spread.split.stages if planned.spread and planned.spread.split else ()
    away = difference(found, reference)
    reasons = left_whole(planned.version.graph_path, 2) if split.startswith("tensor") else {}
    return {
        "model": name,
        "split": split,
        "weights a device": f"{max(stage.weight_bytes for stage in stages) / whole.weight_bytes:.1%}",
        "arithmetic a device": f"{max(stage.flops for stage in stages) / whole.flops:.1%}",
        "to the whole": f"{away:.0e}" if away else "same bits",
        "to PyTorch": f"{difference(found, made.expected):.0e}",
        "stays whole": in_words(reasons),
    }


def _refused(name: str, split: str, error: LoweringError) -> dict[str, object]:
    row = dict.fromkeys(("weights a device", "arithmetic a device", "to the whole", "to PyTorch"), "-")
    return {"model": name, "split": split, **row, "stays whole": error.message}


def run_alone(session: Session, feeds: Arrays) -> dict[str, AnyArray]:
    """What a session computes of each sample by itself, as one batch.

    Args:
        session: Of a whole graph.
        feeds: `[samples, ...]` each.
    """
    count = len(next(iter(feeds.values())))
    rows = [session.run({key: array[row : row + 1] for key, array in feeds.items()}) for row in range(count)]
    return {key: np.concatenate([row[key] for row in rows]) for key in rows[0]}


def difference(found: Arrays, expected: Arrays) -> float:
    """The largest relative L2 of all expected outputs; 0 for the same bits.

    Raises:
        ValueError: An output is missing, has another shape, or is expected to be all zeros.
    """
    errors = []
    for name, array in expected.items():
        norm = float(np.linalg.norm(array))
        if name not in found or found[name].shape != array.shape or not norm:
            raise ValueError(f"output '{name}' cannot be compared")
        apart = found[name].astype(np.float64) - array.astype(np.float64)
        errors.append(float(np.linalg.norm(apart)) / norm)
    return max(errors)


def in_words(reasons: Mapping[str, str]) -> str:
    """Why products stay whole: how many for each kind of reason, the most frequent first.

    Args:
        reasons: By the name of the product.
    """
    kinds: dict[str, int] = {}
    for reason in reasons.values():
        kind = re.sub(r"'[^']*'", "a tensor", re.sub(r"\b(?:node_|/)\S+ ", "", reason))
        kinds[kind] = kinds.get(kind, 0) + 1
    listed = sorted(kinds.items(), key=lambda item: -item[1])
    told = [f"{count}: {kind}" for kind, count in listed[:_MOST_REASONS]]
    more = sum(count for _, count in listed[_MOST_REASONS:])
    return "; ".join((*told, *([f"{more} for other reasons"] if more else [])))
