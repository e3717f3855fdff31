"""docs/reference/policy.md: the rows of the numeric policy."""

from __future__ import annotations

from collections.abc import Iterable

from documenting.text import attributes_of, code, table
from graphkiln_backend.proof import policy
from graphkiln_backend.proof.policy import Limits, TaskLimits

_INTRODUCTION = """# Numeric policy

Written by `scripts/docs` from `graphkiln_backend.proof.policy`. A saved or lowered graph answers users only within
these limits; `--relative-l2` loosens the first of them for one conversion, which the manifest records. Why there are
limits, and what else is compared: [numeric policy, explained](../explanation/numerics.md).

"""
_BESIDE = """
Gradients may be off by {gradient:g} times the row of their precision. Two computations of one value, each rounded
once, may be {roundings:g} unit roundoffs of the output's type apart, whatever the row.
"""
_ROWS = {
    "a saved graph beside its source, fp32": policy.EXPORT,
    "another engine, fp32": policy.OTHER_ENGINE,
    "fp16": policy.FP16,
    "bf16": policy.BF16,
    "int8": policy.INT8,
    **{f"golden samples, {precision}": row for precision, row in policy.REPLAY.items()},
}


def render() -> str:
    """The page."""
    shown = {name: f"{text}" for name, text in attributes_of(Limits).items() if name not in ("name", "tasks")}
    return "".join(
        (
            _INTRODUCTION, table(["what changed", *map(code, shown)], _limits()), "\n", _meanings(shown),
            "\n## What is read from the outputs of a task\n\n",
            table(["precision", *map(code, _task_columns())], _tasks()), "\n", _meanings(attributes_of(TaskLimits)),
            _BESIDE.format(gradient=policy.GRADIENT_FACTOR, roundings=policy.ROUNDINGS),
        )
    )  # fmt: skip


def _limits() -> Iterable[tuple[str, ...]]:
    for what, row in _ROWS.items():
        figures = (row.relative_l2, row.worst_element, row.top1_agreement, row.metric_drop)
        yield (what, *map(_figure, figures))


def _tasks() -> Iterable[tuple[str, ...]]:
    rows = {"fp32": policy.FP32_TASKS, "fp16": policy.FP16_TASKS, "bf16": policy.BF16_TASKS, "int8": policy.INT8_TASKS}
    for precision, row in rows.items():
        yield (precision, *(_figure(getattr(row, name)) for name in _task_columns()))


def _task_columns() -> list[str]:
    return list(attributes_of(TaskLimits))


def _figure(value: float | None) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else f"{value:.10g}"


def _meanings(said: dict[str, str]) -> str:
    return "".join(f"- `{name}`: {text}\n" for name, text in said.items())
