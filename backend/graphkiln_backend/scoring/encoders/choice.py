"""Which encoder writes what a request asks for."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from graphkiln_backend.graph.contract import Contract
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.graph.spelling import did_you_mean
from graphkiln_backend.graph.task import Detection, Embedding, Segmentation, is_classification
from graphkiln_backend.scoring.encoders.base import Encoder
from graphkiln_backend.scoring.encoders.class_maps import ClassMaps
from graphkiln_backend.scoring.encoders.classes import Ranked, TopK
from graphkiln_backend.scoring.encoders.detections import Detections
from graphkiln_backend.scoring.encoders.scores import AllScores
from graphkiln_backend.scoring.encoders.tensors import Tensors
from graphkiln_backend.scoring.encoders.vectors import Vectors
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.request import DEFAULT_TOP_K, ScoreRequest

RESERVED = ("id", "model", "version", "error")
"""Columns that every table has."""
_RANK = 2


def choose_encoder(signature: Signature, contract: Contract, request: ScoreRequest) -> Encoder:
    """The encoder of a run.

    Args:
        signature: Of the graph; the first dimension of each output is the row.
        contract: What the version says of its classes.
        request: The run.

    Raises:
        ScoringError: The model has no such outputs, none that can be ranked, or a task without scores of classes.
    """
    if request.top_k < 1:
        raise ScoringError(f"top_k must be at least 1, got {request.top_k}")
    specs = {spec.name: spec for spec in signature.outputs}
    if request.outputs:
        _check_plain(request)
        return Tensors(_named(specs, request.outputs), (*RESERVED, *request.keep_columns))
    if not is_classification(contract.task):
        return _of_task(specs, contract, request)
    if contract.ranking:
        return _ranked(specs, contract, request)
    spec = _checked_scores(specs, contract.output or next(iter(specs)))
    if not request.scores:
        return TopK(spec.name, spec.dtype, request.top_k, contract.labels, softmax=request.softmax)
    classes = spec.shape[1] if len(spec.shape) == _RANK else 1
    if not isinstance(classes, int):
        raise ScoringError(
            f"output '{spec.name}' does not say how many classes it has: {spec}",
            hint=f"--output {spec.name} writes it as it is",
        )
    return AllScores(spec.name, spec.dtype, classes, softmax=request.softmax)


def _of_task(specs: Mapping[str, TensorSpec], contract: Contract, request: ScoreRequest) -> Encoder:
    """The encoder of a version that scores no classes.

    Raises:
        ScoringError: Scores of classes are requested, or nobody knows where a sample lies in its image.
    """
    if request.scores or request.softmax or request.top_k != DEFAULT_TOP_K:
        raise ScoringError(
            f"the model answers a {contract.task.kind if contract.task else 'task'}, which has no scores of classes",
            hint="leave out --scores, --softmax and --top-k",
        )
    match contract:
        case Contract(task=Embedding() as task):
            return Vectors(task, specs[task.vectors])
        case Contract(task=Detection() as task, preprocess=Preprocess() as preprocess):
            return Detections(task, contract.labels, preprocess)
        case Contract(task=Segmentation() as task, preprocess=Preprocess() as preprocess):
            return ClassMaps(task, contract.labels, preprocess)
    raise ScoringError(
        "places in an image are not known without its preprocessing",
        hint="convert the model with graphkiln convert --preprocess JSON",
    )


def _check_plain(request: ScoreRequest) -> None:
    if request.softmax:
        raise ScoringError(
            "--output writes what the model returns as it is, without --softmax",
            hint="--scores --softmax writes the probabilities of all classes",
        )


def _named(specs: Mapping[str, TensorSpec], names: Collection[str]) -> list[TensorSpec]:
    for name in names:
        if name not in specs:
            hint = did_you_mean(name, specs, otherwise=f"it has {', '.join(specs)}")
            raise ScoringError(f"the model has no output '{name}'", hint=hint)
    return [specs[name] for name in dict.fromkeys(names)]


def _ranked(specs: Mapping[str, TensorSpec], contract: Contract, request: ScoreRequest) -> Encoder:
    """The encoder of a graph that ranks its classes itself."""
    if request.scores or request.softmax or contract.ranking is None:
        what = "softmax over some of the scores" if request.softmax else "score of the other classes"
        raise ScoringError(
            f"the model returns its best classes only: there is no {what}",
            hint="convert it without --top-k" + (", or with --softmax --top-k" if request.softmax else ""),
        )
    spec = specs[contract.ranking.scores]
    there = spec.shape[-1] if spec.shape else 1
    if isinstance(there, int) and there < request.top_k != DEFAULT_TOP_K:
        raise ScoringError(
            f"the model returns its best {there} classes only, not {request.top_k}",
            hint=f"--top-k {there}, or convert it without --top-k",
        )
    return Ranked(contract.ranking, spec.dtype, request.top_k)


def _checked_scores(specs: Mapping[str, TensorSpec], name: str) -> TensorSpec:
    """The output that scores classes.

    Raises:
        ScoringError: Nothing can be ranked in it.
    """
    spec = specs[name]
    if spec.dtype is DType.BYTES or (spec.has_rank and not 1 <= len(spec.shape) <= _RANK):
        raise ScoringError(
            f"output '{name}' holds no scores of classes: {spec}, expected [rows, classes]",
            hint=f"--output NAME writes an output as it is: {', '.join(specs)}",
        )
    return spec
