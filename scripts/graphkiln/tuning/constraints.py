"""Which combinations of values are illegal or hopeless: each rule is written once, with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from graphkiln.tuning.candidate import (
    ENGINE,
    INSTANCES,
    MAX_BATCH_SIZE,
    PRECISION,
    PREFERRED,
    QUEUE_DELAY_US,
    SPIN,
    STREAMS,
    THREADS,
    Candidate,
)
from graphkiln.tuning.serving_keys import CONV_SEARCH, ENGINES_CHOICE, LAYOUT, default_values
from graphkiln.tuning.space import Constraint
from graphkiln.tuning.subject import Subject
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.repository.config_changes import NO_BATCHER


def constraints_of(subject: Subject) -> Iterator[Constraint]:
    """What rules candidates of a model out, on the kind of device that it is served on."""
    on_gpu = subject.config.device.is_gpu
    default = Candidate.of(default_values(subject))
    rules: list[Constraint] = [
        _refuse_batcher,
        _refuse_preferred,
        partial(_refuse_ensembles, ensembles=subject.ensembles),
        *([] if on_gpu else [partial(_refuse_threads, cores=subject.cores)]),
    ]
    rules += [_refuse_gpu] if on_gpu else [_refuse_precision, _refuse_streams, _refuse_spin]
    for rule in rules:
        yield partial(_spare_default, rule=rule, default=default)


def _spare_default(candidate: Candidate, *, rule: Constraint, default: Candidate) -> str:
    """What serves today is always measured: the others are compared with it."""
    serves = all(default.values.get(key) == value for key, value in candidate.items)
    return "" if serves else rule(candidate)


def _refuse_threads(candidate: Candidate, *, cores: int) -> str:
    asked = candidate.number(THREADS) * candidate.number(INSTANCES)
    return f"threads x instances > {cores} cores" if asked > cores else ""


def _refuse_batcher(candidate: Candidate) -> str:
    if MAX_BATCH_SIZE not in candidate or QUEUE_DELAY_US not in candidate:
        return ""
    batches, delay = candidate.number(MAX_BATCH_SIZE) > 1, candidate.number(QUEUE_DELAY_US)
    if batches and delay == NO_BATCHER:
        return "a model with batches always gets a dynamic batcher"
    return "without batches there is nothing to wait for" if not batches and delay != NO_BATCHER else ""


def _refuse_preferred(candidate: Candidate) -> str:
    preferred = candidate.values.get(PREFERRED, ())
    largest = max(preferred, default=0) if isinstance(preferred, tuple) else 0
    if largest and candidate.number(QUEUE_DELAY_US, 0) == NO_BATCHER:
        return "preferred batch sizes need a dynamic batcher"
    return "a preferred batch size is above max_batch_size" if largest > candidate.number(MAX_BATCH_SIZE) else ""


def _refuse_ensembles(candidate: Candidate, *, ensembles: Mapping[str, int]) -> str:
    size = candidate.number(MAX_BATCH_SIZE, 0)
    larger = [f"'{name}' takes batches of {largest}" for name, largest in ensembles.items() if 0 < size < largest]
    return f"a step of an ensemble takes its batches: {larger[0]}" if larger else ""


def _refuse_precision(candidate: Candidate) -> str:
    engine, precision = candidate.values.get(ENGINE), candidate.values.get(PRECISION)
    if engine == "onnxruntime" and precision in (Precision.BF16, Precision.FP16):
        return f"ONNX Runtime has no {precision} kernels for CPUs"
    return ""


def _refuse_streams(candidate: Candidate) -> str:
    streams = candidate.number(STREAMS)
    if streams > 1 and candidate.values.get(ENGINE) == "onnxruntime":
        return "ONNX Runtime computes a batch as a whole: no streams"
    if streams > candidate.number(THREADS):
        return "streams > threads"
    return "streams > max_batch_size" if streams > max(1, candidate.number(MAX_BATCH_SIZE)) else ""


def _refuse_spin(candidate: Candidate) -> str:
    if not candidate.values.get(SPIN):
        return ""
    if candidate.values.get(ENGINE) != "onnxruntime":
        return "only ONNX Runtime's idle threads can spin"
    if candidate.number(INSTANCES) > 1:
        return "threads of several instances that spin take the cores from each other"
    return "a single thread has nobody to wait for: no spin" if candidate.number(THREADS) == 1 else ""


def _refuse_gpu(candidate: Candidate) -> str:
    if candidate.values.get(ENGINE) == "tensorrt":
        chosen = [key for key in (LAYOUT, CONV_SEARCH) if candidate.values.get(key, ENGINES_CHOICE) != ENGINES_CHOICE]
        return f"TensorRT chooses itself: no {', '.join(chosen)}" if chosen else ""
    return ""
