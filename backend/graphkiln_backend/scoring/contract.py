"""What is known of a version's images and classes: what it says itself, else what its model's configuration says.

The same order as a client's, which reads both from the server.
"""

from __future__ import annotations

from pathlib import Path

from graphkiln_backend.graph.contract import Contract
from graphkiln_backend.graph.labels import read_labels
from graphkiln_backend.graph.preprocess import PARAMETER as PREPROCESS
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.ranking import PARAMETER as RANKING
from graphkiln_backend.graph.ranking import Ranking
from graphkiln_backend.graph.task import PARAMETER as TASK
from graphkiln_backend.graph.task import Task, is_classification, read_task
from graphkiln_backend.repository.config import ModelConfigProto
from graphkiln_backend.repository.version import ModelVersion


def complete_contract(version: ModelVersion, config: ModelConfigProto, model: Path) -> Contract:
    """The contract of a version, with what config.pbtxt says where the version says nothing.

    Args:
        version: The version.
        config: Of its model, complete.
        model: The model's folder, which holds labels.

    Raises:
        ManifestError: What the configuration says, or the labels, cannot be read.
    """
    said = version.contract
    labels, output = said.labels, said.output
    task = said.task or _task(config)
    if not labels and is_classification(task):
        output = config.output[0].name if config.output else ""
        labels = _labels_of(config, output, model)
    return Contract(
        preprocess=said.preprocess or _preprocess(config),
        labels=labels,
        output=output if labels else "",
        ranking=said.ranking or _ranking(config),
        task=task,
    )


def _preprocess(config: ModelConfigProto) -> Preprocess | None:
    return Preprocess.from_json(config.parameters[PREPROCESS].string_value) if PREPROCESS in config.parameters else None


def _ranking(config: ModelConfigProto) -> Ranking | None:
    return Ranking.from_json(config.parameters[RANKING].string_value) if RANKING in config.parameters else None


def _task(config: ModelConfigProto) -> Task | None:
    return read_task(config.parameters[TASK].string_value) if TASK in config.parameters else None


def _labels_of(config: ModelConfigProto, output: str, model: Path) -> tuple[str, ...]:
    """The labels that the configuration gives an output; none where it gives none."""
    for tensor in config.output:
        if tensor.name == output and tensor.label_filename:
            return read_labels(model / tensor.label_filename)
    return ()
