"""`--calibration`: an int8 graph of the model that is tuned, converted and proven as any other, and tried beside it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from graphkiln.tuning.subject import Subject
from graphkiln_backend.graph.contract import Contract
from graphkiln_backend.graph.decoding import encode_json
from graphkiln_backend.graph.errors import InvalidInput, VerificationError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.task import Classification
from graphkiln_backend.repository.version import read_version_signature

_ELSEWHERE = "graphkiln convert SOURCE --precision int8 --calibration PATH makes a version that can be tuned"


def with_int8(subject: Subject, calibration: Path, samples: Path | None, folder: Path) -> Subject:
    """The subject with an int8 graph of it; with the reason in its place where that does not compute the same.

    Args:
        subject: The model.
        calibration: Samples to find ranges with: a folder of images, or an .npz.
        samples: Others, to judge by; None for made-up ones.
        folder: Where the graph may lie, for as long as the subject is used.

    Raises:
        InvalidInput: The model is saved in another precision than fp32, or answers with more than scores of classes.
        ConversionError: The samples cannot be used, or nothing of the graph becomes int8.
    """
    _check(subject)
    try:
        version = _convert(subject, calibration.absolute(), samples.absolute() if samples else None, folder)
    except VerificationError as error:
        return replace(subject, no_int8=f"does not compute the same: {error}")
    _check_tensors(subject, version)
    return replace(subject, int8=version)


def _check(subject: Subject) -> None:
    saved, contract = subject.deployment.saved, subject.deployment.version.contract
    if saved is not Precision.FP32:
        raise InvalidInput(f"--calibration: the graph was saved in {saved}, and int8 is made of fp32", hint=_ELSEWHERE)
    if contract.ranking or not isinstance(contract.task, Classification | None):
        raise InvalidInput("--calibration: the model answers with more than scores of classes", hint=_ELSEWHERE)


def _convert(subject: Subject, calibration: Path, samples: Path | None, folder: Path) -> Path:
    from graphkiln_converters.convert import convert
    from graphkiln_converters.recipe import Recipe

    folder.mkdir()
    contract = subject.deployment.version.contract
    recipe = Recipe(
        source=str(subject.deployment.version.graph_path),
        name=subject.name,
        model_store=folder / "store",
        keep_names=True,
        preprocess=json.loads(encode_json(contract.preprocess)) if contract.preprocess else None,
        labels=_write_labels(contract, folder),
        batch="free" if subject.signature.batchable else "fixed",
        precision=Precision.INT8,
        calibration=calibration,
        samples=samples,
    )
    return convert(recipe)


def _write_labels(contract: Contract, folder: Path) -> Path | None:
    if not contract.labels:
        return None
    path = folder / "labels.txt"
    path.write_text("".join(f"{label}\n" for label in contract.labels), encoding="utf-8")
    return path


def _check_tensors(subject: Subject, version: Path) -> None:
    """The configuration is of both graphs."""
    own, found = subject.signature, read_version_signature(version, "")
    for ours, theirs in ((own.inputs, found.inputs), (own.outputs, found.outputs)):
        if len(ours) != len(theirs) or not all(one.is_like(other) for one, other in zip(ours, theirs, strict=True)):
            raise InvalidInput("--calibration: the int8 graph has other tensors than the model", hint=_ELSEWHERE)
