"""Lowers a proven fp32 graph: to fp16 and bf16 by a pass, to int8 by calibration; or finds what must stay fp32."""

from __future__ import annotations

import fnmatch
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir

from graphkiln_backend.engines.onnxruntime.quantization import Quantization, quantize
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ConversionError, VerificationError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.passes.base import PassReport, run_passes
from graphkiln_backend.passes.graph_file import load, save
from graphkiln_backend.passes.precision import LowerPrecision, emulate, lowered_products, name_nodes
from graphkiln_backend.proof.policy import BY_PRECISION, Limits
from graphkiln_backend.repository.onnx_file import PRODUCTS
from graphkiln_converters.proving import Proof, Sampled, prove_graph
from graphkiln_converters.recipe import Recipe

_log = logging.getLogger("graphkiln.converters")


def limits_of(recipe: Recipe, precision: Precision) -> Limits:
    """The policy's row for a precision, loosened where the recipe says so."""
    limits = BY_PRECISION[precision]
    return replace(limits, relative_l2=recipe.relative_l2) if recipe.relative_l2 else limits


Prove = Callable[[Path], object]
"""Proves a graph that ONNX Runtime can run on the CPU; raises VerificationError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweredGraph:
    """A graph of a lower precision, and what was shown of it."""

    graph: Path
    proof: Proof
    reports: tuple[PassReport, ...]
    notes: tuple[str, ...]


def lower_and_prove(
    fp32: Path,
    recipe: Recipe,
    samples: Sequence[Sampled],
    fp32_proof: Proof,
    *,
    calibration: Callable[[], Mapping[str, AnyArray]],
) -> LoweredGraph:
    """Lowers the proven fp32 graph and proves it again, against the source.

    Raises:
        VerificationError: The answers changed more than the policy allows.
    """
    limits = limits_of(recipe, recipe.precision)
    if recipe.lower_edges and recipe.precision.is_half:
        samples = [_with_edges(sampled, recipe.precision.numpy) for sampled in samples]
    target = fp32.parent / recipe.precision / fp32.name
    target.parent.mkdir()
    reports: tuple[PassReport, ...] = ()
    notes: list[str] = []
    to_prove = target
    if recipe.precision is Precision.INT8:
        notes.append(quantize_graph(fp32, recipe, calibration(), target))
    else:
        keep: tuple[str, ...] = ()
        if recipe.search_keep:
            trial = target.parent / "trial" / target.name
            trial.parent.mkdir()
            keep = search_keep(fp32, recipe, lambda path: prove_graph(path, samples, limits, fp32_proof.noise), trial)
            shutil.rmtree(trial.parent)
            notes.append(f"kept in fp32 by search: {', '.join(keep) or 'nothing'}")
        to_prove, report = lower_graph(fp32, recipe, target, keep)
        reports = (report,)
        notes.append(f"proven with {recipe.precision} values and fp32 sums, as units for {recipe.precision} compute")
    _log.info("proving the lowered graph")
    proof = prove_graph(to_prove, samples, limits, fp32_proof.noise)
    if recipe.precision is Precision.BF16:
        notes.append("ONNX Runtime has no bf16 kernels for CPUs: serve it with OpenVINO or on a GPU")
    return LoweredGraph(graph=target, proof=proof, reports=reports, notes=tuple(notes))


def _with_edges(sampled: Sampled, dtype: np.dtype[np.generic]) -> Sampled:
    """The same samples with their fp32 arrays in another type."""

    def typed(arrays: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        return {name: array.astype(dtype) if array.dtype == np.float32 else array for name, array in arrays.items()}

    return replace(sampled, feeds=typed(sampled.feeds), outputs=typed(sampled.outputs))


def lower_graph(fp32: Path, recipe: Recipe, target: Path, keep: Sequence[str] = ()) -> tuple[Path, PassReport]:
    """Writes the lowered graph.

    Args:
        fp32: The proven fp32 graph.
        recipe: Which precision, and what stays.
        target: Where to write.
        keep: Names of further nodes that stay fp32.

    Returns:
        The graph to prove, which does the same with fp32 kernels, and the report.

    Raises:
        ConversionError: Not one product was lowered.
    """
    model = load(fp32)
    lower = LowerPrecision(
        recipe.precision,
        recipe.amp,
        recipe.keep_fp32,
        frozenset(keep),
        edges=recipe.lower_edges,
    )
    (report,) = run_passes(model, [lower])
    if not lowered_products(model, recipe.precision)[0]:
        raise ConversionError(
            f"--precision {recipe.precision} lowers nothing: {report.note}",
            hint="check --amp and --keep-fp32, or stay with fp32",
        )
    save(model, target)
    emulate(model, recipe.precision)
    emulated = target.parent / "emulated" / target.name
    emulated.parent.mkdir(exist_ok=True)
    save(model, emulated)
    return emulated, report


def quantize_graph(fp32: Path, recipe: Recipe, samples: Mapping[str, AnyArray], target: Path) -> str:
    """Writes the int8 graph; returns how much of it became integer.

    Raises:
        ConversionError: Nothing became integer.
        LoweringError: The graph cannot be quantized.
    """
    model = onnx_ir.load(fp32)
    name_nodes(model)
    named = target.parent / "named" / target.name
    named.parent.mkdir(exist_ok=True)
    save(model, named)
    products = [str(node.name) for node in model.graph if node.op_type in PRODUCTS]
    keep = [
        str(node.name)
        for node in model.graph
        if any(
            fnmatch.fnmatchcase(word, pattern)
            for pattern in recipe.keep_fp32
            for word in (str(node.name), node.op_type)
        )
    ]
    if not recipe.quantize_ends:
        keep += [products[0], products[-1]]
    settings = Quantization(method=recipe.calibration_method, quantize_bias=recipe.quantize_bias, exclude=tuple(keep))
    coverage = quantize(named, samples, settings, target)
    if not coverage.integer:
        raise ConversionError("--precision int8: not one product became integer", hint="stay with fp32 or bf16")
    return str(coverage)


def search_keep(fp32: Path, recipe: Recipe, prove: Prove, target: Path) -> tuple[str, ...]:
    """Finds nodes that must stay fp32 for the policy to pass: a set of which none can be left out.

    Returns:
        Their names; empty when the whole graph passes.

    Raises:
        VerificationError: The policy fails even with all of them in fp32.

    Source: Junker, "QuickXplain", 2004: halves the set, and tests each half with the other kept.
    """
    lower = LowerPrecision(recipe.precision, recipe.amp, recipe.keep_fp32)
    names = lower.candidates(onnx_ir.load(fp32))

    def passes(keep: Sequence[str]) -> bool:
        if len(keep) == len(names):
            return True  # nothing is lowered
        try:
            prove(lower_graph(fp32, recipe, target, keep)[0])
        except VerificationError:
            return False
        except ConversionError:
            return True  # no product is left to lower: it is the fp32 graph
        return True

    def needed(among: list[str], kept: list[str]) -> list[str]:
        if passes(kept):
            return []
        if len(among) == 1:
            return among
        first, second = among[: len(among) // 2], among[len(among) // 2 :]
        from_first = needed(first, [*kept, *second])
        return [*from_first, *needed(second, [*kept, *from_first])]

    found = needed(names, [])
    _log.info("%d of %d nodes stay fp32: %s", len(found), len(names), ", ".join(found[:5]) or "none")
    return tuple(found)
