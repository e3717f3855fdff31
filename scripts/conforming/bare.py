"""The same cases by ONNX Runtime alone: what a server of ONNX graphs can be asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnxruntime

from conforming.cases import Case
from conforming.outcome import PASSED, Outcome, Verdict
from graphkiln_backend.engines.onnxruntime.session import run_ort_values

_BF16 = "tensor(bfloat16)"


def ask_bare(cases: Sequence[Case]) -> Iterator[tuple[Case, Outcome]]:
    """What ONNX Runtime makes of cases, with its own defaults.

    Yields:
        An outcome for each case.
    """
    for case in cases:
        yield case, _ask(case)


def _ask(case: Case) -> Outcome:
    try:
        session = _open(case)
    except Exception as error:
        return Outcome.of(Verdict.REFUSED, error)
    for sample in range(len(case.samples)):
        try:
            outputs = _run(session, case.feeds(sample))
        except Exception as error:
            return Outcome.of(Verdict.FAILS, error)
        if difference := case.difference(sample, outputs):
            return Outcome.of(Verdict.DIFFERS, difference)
    return PASSED


def _open(case: Case) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(case.model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _run(session: onnxruntime.InferenceSession, feeds: Mapping[str, Any]) -> dict[str, Any]:
    values = [*session.get_inputs(), *session.get_outputs()]
    names = [value.name for value in session.get_outputs()]
    if any(value.type == _BF16 for value in values):  # which its binding for numpy does not know
        return dict(zip(names, run_ort_values(session, names, feeds, onnxruntime.RunOptions()), strict=True))
    return dict(zip(names, session.run(names, feeds), strict=True))
