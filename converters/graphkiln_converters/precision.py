"""Lowers a proven fp32 graph: to fp16 and bf16 by a pass, to int8 by calibration; or finds what must stay fp32."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir

from graphkiln_backend.engines.onnxruntime.quantization import Coverage, Quantization, quantize
from graphkiln_backend.graph.errors import ConversionError, VerificationError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.passes.base import Rewritten, run_passes
from graphkiln_backend.passes.edge import Arrays, Edge
from graphkiln_backend.passes.emulation import emulate
from graphkiln_backend.passes.graph_file import load, save
from graphkiln_backend.passes.precision import LowerPrecision, lowered_products, name_nodes
from graphkiln_backend.proof.policy import BY_PRECISION, Limits
from graphkiln_converters.int8_speed import compare_speed
from graphkiln_converters.keep_search import smallest_kept
from graphkiln_converters.kept_nodes import kept_by_recipe
from graphkiln_converters.nncf_quantization import check_nncf, quantize_by_nncf
from graphkiln_converters.proving import Proof, ProvenGraph, ReferenceSamples, prove_graph
from graphkiln_converters.recipe import Recipe

_log = logging.getLogger("graphkiln.converters")


def limits_for(recipe: Recipe, precision: Precision) -> Limits:
    """The policy's row for a precision, loosened where the recipe says so."""
    return loosened(BY_PRECISION[precision], recipe)


def loosened(limits: Limits, recipe: Recipe) -> Limits:
    """A row of the policy, looser where the recipe says so."""
    return replace(limits, relative_l2=recipe.relative_l2) if recipe.relative_l2 else limits


def check_lowers(recipe: Recipe, source: Precision) -> None:
    """Refuses another precision for a source that computes in 16 bits: its fp32 outputs are not known.

    Raises:
        ConversionError: The recipe requests one.
    """
    if source.is_half and recipe.precision not in (Precision.FP32, source):
        raise ConversionError(
            f"--precision {recipe.precision}: the source computes in {source}, and only fp32 is lowered",
            hint=f"leave it out: the graph stays in {source}; or export the source in fp32",
        )


def check_quantizer(recipe: Recipe) -> None:
    """Refuses, before minutes pass, what a recipe requests of a quantizer in vain.

    Raises:
        ConversionError: Nothing is quantized, or NNCF does otherwise.
        EngineUnavailable: NNCF is not installed.
    """
    if recipe.precision is Precision.INT8:
        if recipe.int8_by == "nncf":
            _check_ways_of_nncf(recipe)
            check_nncf()
        return
    given = {
        "--int8-by": recipe.int8_by != "onnxruntime",
        "--calibration-method": recipe.calibration_method != "minmax",
    }
    if unread := [flag for flag, is_given in given.items() if is_given]:
        raise ConversionError(
            f"{' and '.join(unread)}: nothing is quantized in {recipe.precision}",
            hint="add --precision int8, or leave it out",
        )


def _check_ways_of_nncf(recipe: Recipe) -> None:
    if recipe.calibration_method != "minmax" or not recipe.quantize_bias:
        raise ConversionError(
            "--int8-by nncf finds ranges and leaves biases in its own way",
            hint="leave out --calibration-method and quantize_bias, or --int8-by",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweredGraph:
    """A graph of a lower precision that is not proven yet.

    Attributes:
        graph: The file to serve.
        emulated: A file that computes the same with kernels that every CPU has: what is proven.
        rewritten: What the lowering did to the fp32 graph.
        notes: What a person should know of it.
    """

    graph: Path
    emulated: Path
    rewritten: Rewritten
    notes: tuple[str, ...]


def lower_and_prove(
    fp32: ProvenGraph, recipe: Recipe, samples: Sequence[ReferenceSamples], calibration: Arrays
) -> ProvenGraph:
    """Lowers the proven fp32 graph and proves it again, against the source.

    Args:
        fp32: The graph.
        recipe: Which precision, and what stays fp32.
        samples: What the graph was proven with.
        calibration: Feeds to calibrate an int8 graph on, `[samples, ...]` by name.

    Raises:
        ConversionError: Nothing was lowered.
        VerificationError: The outputs changed more than the policy allows.
    """
    target = fp32.graph.parent / recipe.precision / fp32.graph.name
    target.parent.mkdir()
    lower = _Lower(fp32.graph, recipe, calibration, whole=samples[0].whole)
    lowered = _lower_with_search(fp32, lower, samples, target) if recipe.search_keep else lower(target)
    _log.info("proving the lowered graph")
    proof = _prove(lowered, recipe, samples, fp32.proof.noise)
    told = compare_speed(fp32.graph, lowered.graph, proof.golden) if recipe.precision is Precision.INT8 else ""
    return ProvenGraph(
        graph=lowered.graph,
        proof=proof,
        rewritten=fp32.rewritten.then(lowered.rewritten),
        verification=(*fp32.verification, *proof.verification),
        notes=(*fp32.notes, *lowered.notes, *filter(None, [told])),
        precision=recipe.precision,
    )


@dataclass(frozen=True, slots=True)
class _Lower:
    """Writes a graph of the recipe's precision, with more of its nodes in fp32."""

    fp32: Path
    recipe: Recipe
    calibration: Arrays
    whole: bool

    def __call__(self, target: Path, keep: Sequence[str] = ()) -> LoweredGraph:
        if self.recipe.precision is Precision.INT8:
            return quantize_graph(self.fp32, self.recipe, self.calibration, target, keep, whole=self.whole)
        return lower_graph(self.fp32, self.recipe, target, keep)

    def candidates(self) -> list[str]:
        """Names of the nodes that may have to stay fp32."""
        model = onnx_ir.load(self.fp32)
        if self.recipe.precision is Precision.INT8:
            name_nodes(model)
            kept = {*kept_by_recipe(model, self.recipe)}
            return [str(node.name) for node in model.graph if node.name not in kept]
        return LowerPrecision(self.recipe.precision, self.recipe.amp, self.recipe.keep_fp32).candidates(model)


def _prove(lowered: LoweredGraph, recipe: Recipe, samples: Sequence[ReferenceSamples], noise: float) -> Proof:
    at_edge = [sample.at(lowered.rewritten.edge) for sample in samples]
    return prove_graph(lowered.emulated, at_edge, limits_for(recipe, recipe.precision), noise)


def lower_graph(fp32: Path, recipe: Recipe, target: Path, keep: Sequence[str] = ()) -> LoweredGraph:
    """Writes an fp16 or bf16 graph.

    Args:
        fp32: The proven fp32 graph.
        recipe: Which precision, and what stays fp32.
        target: Where to write.
        keep: Names of further nodes that stay fp32.

    Raises:
        ConversionError: Not one product was lowered.
    """
    model = load(fp32)
    lower = LowerPrecision(recipe.precision, recipe.amp, recipe.keep_fp32, frozenset(keep), edges=recipe.lower_edges)
    rewritten = run_passes(model, [lower])
    if not lowered_products(model, recipe.precision)[0]:
        raise ConversionError(
            f"--precision {recipe.precision} lowers nothing: {rewritten.reports[0].note}",
            hint="check --amp and --keep-fp32, or stay with fp32",
        )
    save(model, target)
    emulate(model, recipe.precision)
    emulated = target.parent / "emulated" / target.name
    emulated.parent.mkdir(exist_ok=True)
    save(model, emulated)
    notes = [f"proven with {recipe.precision} values and fp32 sums, as units for {recipe.precision} compute"]
    if recipe.precision is Precision.BF16:
        notes.append("ONNX Runtime has no bf16 kernels for CPUs: serve it with OpenVINO or on a GPU")
    return LoweredGraph(graph=target, emulated=emulated, rewritten=rewritten, notes=tuple(notes))


def _lower_with_search(
    fp32: ProvenGraph, lower: _Lower, samples: Sequence[ReferenceSamples], target: Path
) -> LoweredGraph:
    """Lowers all but the fewest nodes that must stay fp32 for the policy to pass."""
    names = lower.candidates()
    trial = target.parent / "trial" / target.name
    trial.parent.mkdir()

    def passes(keep: Sequence[str]) -> bool:
        try:
            _prove(lower(trial, keep), lower.recipe, samples, fp32.proof.noise)
        except VerificationError:
            return False
        except ConversionError:
            return True  # no product is left to lower: it is the fp32 graph
        return True

    keep = smallest_kept(names, passes)
    shutil.rmtree(trial.parent)
    _log.info("%d of %d nodes stay fp32: %s", len(keep), len(names), ", ".join(keep[:5]) or "none")
    lowered = lower(target, keep)
    return replace(lowered, notes=(f"kept in fp32 by search: {', '.join(keep) or 'nothing'}", *lowered.notes))


def quantize_graph(
    fp32: Path, recipe: Recipe, calibration: Arrays, target: Path, keep: Sequence[str] = (), *, whole: bool = False
) -> LoweredGraph:
    """Writes an int8 graph.

    Args:
        fp32: The proven fp32 graph.
        recipe: How to calibrate, and what stays fp32.
        calibration: Feeds, `[samples, ...]` by name.
        target: Where to write.
        keep: Names of further nodes that stay fp32.
        whole: Whether the graph has no batch: each of the feeds is a whole input.

    Raises:
        ConversionError: Nothing became integer.
        LoweringError: The graph cannot be quantized.
    """
    model = onnx_ir.load(fp32)
    name_nodes(model)
    named = target.parent / "named" / target.name
    named.parent.mkdir(exist_ok=True)
    save(model, named)
    kept = [*kept_by_recipe(model, recipe), *keep]
    coverage = _quantize(named, recipe, calibration, target, kept, whole=whole)
    if not coverage.integer:
        raise ConversionError("--precision int8: not one product became integer", hint="stay with fp32 or bf16")
    unchanged = Rewritten(reports=(), edge=Edge())
    return LoweredGraph(graph=target, emulated=target, rewritten=unchanged, notes=(str(coverage),))


def _quantize(
    graph: Path, recipe: Recipe, calibration: Arrays, target: Path, keep: Sequence[str], *, whole: bool
) -> Coverage:
    """By the quantizer that the recipe names.

    Raises:
        ConversionError: The recipe requests of NNCF what it does otherwise.
    """
    if recipe.int8_by == "nncf":
        _check_ways_of_nncf(recipe)
        return quantize_by_nncf(graph, calibration, target, exclude=keep, whole=whole)
    settings = Quantization(
        method=recipe.calibration_method, quantize_bias=recipe.quantize_bias, exclude=tuple(keep), whole=whole
    )
    return quantize(graph, calibration, settings, target)
