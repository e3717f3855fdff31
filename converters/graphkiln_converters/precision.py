"""Lower a proven fp32 graph and prove it again: fp16 and bf16 by a pass, int8 by calibration."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir

from graphkiln_backend.engines import hardware
from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.onnxruntime.quantization import Coverage, Quantization, count_integer_products, quantize
from graphkiln_backend.engines.registry import REFERENCE_ENGINE, load_engine
from graphkiln_backend.engines.timing import fastest_runs_s, pick_fastest
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import (
    ConversionError,
    EngineUnavailable,
    GraphkilnError,
    LoweringError,
    VerificationError,
)
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Reading
from graphkiln_backend.passes.base import Rewritten, run_passes
from graphkiln_backend.passes.edge import Arrays, Edge
from graphkiln_backend.passes.graph_file import OPSET, load, save
from graphkiln_backend.passes.precision import LowerPrecision, lowered_products, matches, name_nodes
from graphkiln_backend.passes.rounding import emulate
from graphkiln_backend.proof.policy import BY_PRECISION
from graphkiln_backend.repository.config import read_config
from graphkiln_backend.repository.onnx_file import PRODUCTS
from graphkiln_backend.repository.version import CONFIG_FILE
from graphkiln_backend.system.resources import usable_cores
from graphkiln_converters.prove import (
    Proof,
    ProvenGraph,
    ReferenceSamples,
    prove_graph,
    prove_served,
    with_own_limit,
)
from graphkiln_converters.recipe import Recipe

_log = logging.getLogger("graphkiln.converters")

_OTHER_QUANTIZERS = ("nncf", "modelopt")  # modules, and extras, beside ONNX Runtime's


def check_lowers(recipe: Recipe, source: Precision, preprocess: Preprocess | None) -> None:
    """Refuse a lower precision that cannot be proven, or whose inputs clients cannot make.

    Args:
        recipe: Precision of the graph and of its inputs.
        source: Precision of the source. 16-bit sources are not lowered, because their fp32 outputs are unknown.
        preprocess: Preprocessing in the client, or None.

    Raises:
        ConversionError: The recipe requests such a precision.
    """
    lowers_inputs = recipe.lower_edges and recipe.precision is Precision.BF16
    if lowers_inputs and preprocess is not None and preprocess.dtype is not DType.UINT8:
        raise ConversionError(
            "--lower-edges: clients cannot prepare bf16 images", hint="use --input uint8-nhwc, or --precision fp16"
        )
    if source.is_half and recipe.precision not in (Precision.FP32, source):
        raise ConversionError(
            f"--precision {recipe.precision}: the source computes in {source}, and only fp32 is lowered",
            hint=f"leave it out: the graph stays in {source}; or export the source in fp32",
        )


def check_precision_options(recipe: Recipe) -> None:
    """Refuse options of the precision that are missing, contradictory or without effect, before the conversion starts.

    Raises:
        ConversionError: There are no samples to calibrate on, or an option has no effect.
        EngineUnavailable: NNCF or ModelOpt is not installed.
    """
    precision = recipe.precision
    for_halves = {"--amp": recipe.amp != "O2", "--lower-edges": recipe.lower_edges}
    for_lower = {"--keep-fp32": bool(recipe.keep_fp32), "--search-keep": recipe.search_keep}
    for_int8 = {
        "--calibration": recipe.calibration is not None,
        "--int8-by": recipe.int8_by in _OTHER_QUANTIZERS,
        "--calibration-method": recipe.calibration_method != "minmax",
    }
    if precision is Precision.INT8:
        without_effect = for_halves
    elif precision.is_half:
        without_effect = for_int8
    else:
        without_effect = for_halves | for_lower | for_int8
    if given := [flag for flag, is_given in without_effect.items() if is_given]:
        needed = "int8" if for_int8.keys() & set(given) else "fp16 or bf16"
        raise ConversionError(
            f"{' and '.join(given)} without effect: the precision is {precision}",
            hint=f"add --precision {needed}, or leave it out",
        )
    if precision is not Precision.INT8:
        return
    if recipe.int8_by in _OTHER_QUANTIZERS:
        if recipe.calibration_method != "minmax" or not recipe.quantize_bias:
            raise ConversionError(
                f"--int8-by {recipe.int8_by} finds ranges and leaves biases in its own way",
                hint="leave out --calibration-method and quantize_bias, or --int8-by",
            )
        if find_spec(recipe.int8_by) is None:
            raise EngineUnavailable(
                f"--int8-by {recipe.int8_by} needs a library that is not installed", extra=recipe.int8_by
            )
    if recipe.calibration is None:
        raise ConversionError(
            "--precision int8 needs samples to calibrate on",
            hint="give real ones: --calibration DIR or NPZ, not those of --samples",
        )
    if recipe.samples and recipe.samples.resolve() == recipe.calibration.resolve():
        raise ConversionError("--calibration and --samples are the same: a proof on calibrated samples proves nothing")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoweredGraph:
    """An unproven graph of a lower precision.

    Attributes:
        graph: The file to serve.
        emulated: An equivalent file with kernels for every CPU, used for the proof.
        rewritten: Changes to the fp32 graph.
        notes: Remarks for the log and the manifest.
    """

    graph: Path
    emulated: Path
    rewritten: Rewritten
    notes: tuple[str, ...]


_OTHER_ROUNDING = (
    "its integers round otherwise than their fp32 emulation, and the graph magnifies that: --search-keep finds the "
    "nodes that must stay fp32, --keep-fp32 names them; or other --calibration samples, --int8-by nncf"
)


def lower_and_prove(
    fp32: ProvenGraph,
    recipe: Recipe,
    samples: Sequence[ReferenceSamples],
    calibration: Arrays,
    batch_sizes: tuple[int, ...],
) -> ProvenGraph:
    """Lower the proven fp32 graph and prove it again, against the source.

    Args:
        fp32: The graph.
        recipe: Precision, and nodes that stay fp32.
        samples: Samples of the first proof.
        calibration: Feeds to calibrate an int8 graph on, `[samples, ...]` by name.
        batch_sizes: As for `prove_graph`.

    Raises:
        ConversionError: Nothing was lowered.
        RepositoryError: The model's config.pbtxt, which decides on the engines for int8, cannot be read.
        VerificationError: The outputs changed more than the policy allows.
    """
    if recipe.precision is not Precision.INT8:
        return _lower_and_prove(fp32, recipe, samples, calibration, batch_sizes, folder=recipe.precision)
    engines = _served_engines(recipe.model_store / recipe.name / CONFIG_FILE)
    if recipe.int8_by == "fastest" and _may_differ_in_speed(recipe, engines):
        return _prove_fastest(fp32, recipe, samples, calibration, batch_sizes, engines=engines)
    quantizer = "onnxruntime" if recipe.int8_by == "fastest" else recipe.int8_by
    proven = _lower_and_prove(
        fp32, pinned(recipe, quantizer), samples, calibration, batch_sizes, folder=recipe.precision
    )
    speed = compare_speed(fp32.graph, proven.graph, proven.proof.golden)
    return replace(proven, quantizer=quantizer, notes=(*proven.notes, *filter(None, [speed])))


def pinned(recipe: Recipe, quantizer: str) -> Recipe:
    """The recipe with a quantizer in place of a choice by speed."""
    return recipe.model_copy(update={"int8_by": quantizer})


def _lower_and_prove(
    fp32: ProvenGraph,
    recipe: Recipe,
    samples: Sequence[ReferenceSamples],
    calibration: Arrays,
    batch_sizes: tuple[int, ...],
    *,
    folder: str,
) -> ProvenGraph:
    target = fp32.graph.parent / folder / fp32.graph.name  # in a separate folder, with its weights
    target.parent.mkdir()
    trial = target.parent / "trial" / target.name
    limits = with_own_limit(BY_PRECISION[recipe.precision], recipe.relative_l2)
    reading = samples[0].ranking or samples[0].task

    def lower(target: Path, keep: Sequence[str] = ()) -> LoweredGraph:
        if recipe.precision is Precision.INT8:
            return quantize_graph(fp32.graph, recipe, calibration, target, keep, whole=samples[0].whole)
        return lower_graph(fp32.graph, recipe, target, keep)

    def prove_lowered(lowered: LoweredGraph) -> Proof:
        changed = [group.at(lowered.rewritten.edge) for group in samples]
        proof = prove_graph(lowered.emulated, changed, limits, fp32.proof.largest_difference, batch_sizes)
        prove_served(
            lowered.graph,
            proof.golden,
            recipe.precision,
            limits,
            reading=reading,
            largest_batch=recipe.max_batch_size,
            way_out=_OTHER_ROUNDING if recipe.precision is Precision.INT8 else "",
        )
        return proof

    def passes_proof(keep: Sequence[str]) -> bool:
        try:
            prove_lowered(lower(trial, keep))
        except VerificationError:
            return False
        except ConversionError:
            return True  # no product left to lower: identical to the fp32 graph
        return True

    if recipe.search_keep:
        trial.parent.mkdir()
        names = _candidates(fp32.graph, recipe)
        keep = smallest_kept(names, passes_proof)
        shutil.rmtree(trial.parent)
        _log.info("%d of %d nodes stay fp32: %s", len(keep), len(names), ", ".join(keep[:5]) or "none")
        lowered = lower(target, keep)
        notes = (f"kept in fp32 by search: {', '.join(keep) or 'nothing'}", *lowered.notes)
    else:
        lowered = lower(target)
        notes = lowered.notes
    _log.info("proving the lowered graph")
    proof = prove_lowered(lowered)
    return ProvenGraph(
        graph=lowered.graph,
        proof=proof,
        rewritten=fp32.rewritten.then(lowered.rewritten),
        verification=(*fp32.verification, *proof.verification),
        notes=(*fp32.notes, *notes),
        precision=recipe.precision,
    )


# Int8 by the fastest of several quantizers.
#
# NNCF's graphs are fast with OpenVINO but slow with ONNX Runtime, which runs them at 0.3 to 0.6 times the rate of
# graphs by its quantizer (MobileNetV3-small, BERT-base; DeiT-tiny: 0.9 to 1.1). ModelOpt's graphs are for TensorRT.
# Figures: docs/how-to/precision.md

_COMPARED = ("onnxruntime", "nncf")
# Samples for the graphs whose speed is compared: more change the ranges, but not the kernels.
_FEW_SAMPLES = 4
_ENGINES = ("onnxruntime", "openvino")


def _served_engines(config: Path) -> tuple[str, ...]:
    """Engines that a server may use for a model: that of its config.pbtxt, which is never changed, if there is one.

    Raises:
        RepositoryError: It cannot be read.
    """
    if not config.exists():
        return _ENGINES
    parameters = read_config(config).parameters
    engine = parameters["engine"].string_value if "engine" in parameters else REFERENCE_ENGINE
    return _ENGINES if engine == "auto" else (engine,)


def _may_differ_in_speed(recipe: Recipe, engines: Sequence[str]) -> bool:
    """Return true if NNCF's graph may be faster than ONNX Runtime's, with an engine that may serve."""
    own_options = recipe.calibration_method != "minmax" or not recipe.quantize_bias  # of ONNX Runtime's quantizer
    computes = all(map(find_spec, ("nncf", "openvino"))) and not hardware.saturates_products_of_bytes()
    if own_options or not computes:
        return False
    if "openvino" not in engines:
        _log.info("config.pbtxt chooses the engine: with engine: auto, NNCF's quantizer would be tried with OpenVINO")
        return False
    return True


def _prove_fastest(
    fp32: ProvenGraph,
    recipe: Recipe,
    samples: Sequence[ReferenceSamples],
    calibration: Arrays,
    batch_sizes: tuple[int, ...],
    *,
    engines: Sequence[str],
) -> ProvenGraph:
    """Quantize with the fastest of several quantizers on this CPU, or with the next one if the proof refuses its graph.

    If speed takes another engine than the default one, the graph is proven in that engine, too, and a new config.pbtxt
    has `engine: auto`: a server on another machine may lack the engine, or be faster without it.

    Raises:
        GraphkilnError: No quantizer makes a graph that passes the proof: the error of the first.
    """
    few = {name: array[:_FEW_SAMPLES] for name, array in calibration.items()}
    times, refused = _compare_quantizers(fp32, recipe, few, engines)
    # Graphs that could not be measured come last, with the default engine.
    waiting = {(name, REFERENCE_ENGINE): math.inf for name in _COMPARED if name not in refused}
    waiting |= {(name, engine): each[name] for engine, each in times.items() for name in _COMPARED if name in each}
    measured, proven = dict(waiting), dict[str, ProvenGraph]()
    while waiting:
        chosen, engine = list(waiting)[pick_fastest(list(waiting.values()))]
        del waiting[chosen, engine]
        try:
            if chosen not in proven:
                _log.info("quantizing by %s", chosen)
                own, folder = pinned(recipe, chosen), f"{recipe.precision}-{chosen}"
                proven[chosen] = _lower_and_prove(fp32, own, samples, calibration, batch_sizes, folder=folder)
            if engine != REFERENCE_ENGINE:
                _prove_in(engine, proven[chosen], recipe, samples[0].ranking or samples[0].task)
            break
        except GraphkilnError as error:
            if chosen in proven:
                refused[f"{chosen} with {engine}"] = error
            else:
                refused[chosen] = error
                waiting = {pair: seconds for pair, seconds in waiting.items() if pair[0] != chosen}
    else:
        raise refused[_COMPARED[0]]
    is_auto = engine != REFERENCE_ENGINE and not (recipe.model_store / recipe.name / CONFIG_FILE).exists()
    taken = [
        f"{seconds * 1e3:.3g} ms by {name} with {by}"
        for (name, by), seconds in sorted(measured.items(), key=lambda each: each[1])
        if math.isfinite(seconds)
    ]
    size = "an input" if fp32.proof.golden.whole else f"a batch of {_BATCH}"
    choice = [f"quantized by {chosen}, to be served with {engine}"]
    choice += [f"{size} on {hardware.cpu_name()} takes {', '.join(taken)}"] if taken else []
    choice += [f"{name} refused: {str(error).splitlines()[0]}" for name, error in refused.items()]
    choice += ["written into config.pbtxt: engine: auto"] if is_auto else []
    _log.info("%s", "; ".join(choice))
    if recipe.search_keep:  # the graph that was measured has no nodes in fp32
        speed = compare_speed(fp32.graph, proven[chosen].graph, proven[chosen].proof.golden)
    else:
        speed = _describe_speed(times, chosen)
    return replace(
        proven[chosen],
        quantizer=chosen,
        engine="auto" if is_auto else "",
        notes=(*proven[chosen].notes, "; ".join(choice), *filter(None, [speed])),
    )


def _compare_quantizers(
    fp32: ProvenGraph, recipe: Recipe, calibration: Arrays, engines: Sequence[str]
) -> tuple[dict[str, dict[str, float]], dict[str, GraphkilnError]]:
    """Measure the graphs of the quantizers beside the fp32 graph; they are neither proven nor kept.

    Returns:
        The times, as `_times_s`, and the errors of quantizers that failed.
    """
    _log.info("comparing the speed of int8 by %s", " and ".join(_COMPARED))
    graphs: dict[str, Path] = {Precision.FP32: fp32.graph}
    refused: dict[str, GraphkilnError] = {}
    for quantizer in _COMPARED:
        target = fp32.graph.parent / f"compared-{quantizer}" / fp32.graph.name
        target.parent.mkdir()
        try:
            quantize_graph(fp32.graph, pinned(recipe, quantizer), calibration, target, whole=fp32.proof.golden.whole)
        except GraphkilnError as error:
            refused[quantizer] = error
        else:
            graphs[quantizer] = target
    return _times_s(graphs, fp32.proof.golden, engines), refused


def _prove_in(engine: str, proven: ProvenGraph, recipe: Recipe, reading: Reading | None) -> None:
    """Prove a graph as another engine than the default one serves it.

    Raises:
        VerificationError: The session cannot be built, or its outputs differ.
    """
    prove_served(
        proven.graph,
        proven.proof.golden,
        Precision.INT8,
        with_own_limit(BY_PRECISION[Precision.INT8], recipe.relative_l2),
        reading=reading,
        largest_batch=recipe.max_batch_size,
        engine=engine,
    )


def lower_graph(fp32: Path, recipe: Recipe, target: Path, keep: Sequence[str] = ()) -> LoweredGraph:
    """Write an fp16 or bf16 graph; nodes of the recipe and in `keep` stay fp32.

    Raises:
        ConversionError: No product was lowered.
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


def quantize_graph(
    fp32: Path, recipe: Recipe, calibration: Arrays, target: Path, keep: Sequence[str] = (), *, whole: bool = False
) -> LoweredGraph:
    """Write an int8 graph.

    Args:
        fp32: The proven fp32 graph.
        recipe: Calibration, and nodes that stay fp32.
        calibration: Feeds, `[samples, ...]` by name.
        target: File to write.
        keep: Names of further nodes that stay fp32.
        whole: The graph has no batch: each sample is a whole input.

    Raises:
        ConversionError: Nothing was quantized.
        LoweringError: The graph cannot be quantized.
    """
    model = _with_quantizers(onnx_ir.load(fp32))
    name_nodes(model)
    named = target.parent / "named" / target.name
    named.parent.mkdir(exist_ok=True)
    save(model, named)
    kept, notes = (*kept_by_recipe(model, recipe), *keep), []
    if recipe.int8_by == "nncf":
        coverage = quantize_by_nncf(named, calibration, target, exclude=kept, whole=whole)
    elif recipe.int8_by == "modelopt":
        coverage = quantize_by_modelopt(named, calibration, target, exclude=kept, whole=whole)
    else:
        settings = Quantization(
            method=recipe.calibration_method, quantize_bias=recipe.quantize_bias, exclude=kept, whole=whole
        )
        coverage = quantize(named, calibration, settings, target)
    in_float = coverage.integer - count_integer_products(target).integer if recipe.int8_by in _OTHER_QUANTIZERS else 0
    if in_float > 0:
        notes.append(f"ONNX Runtime computes {in_float} of these in float here, OpenVINO and TensorRT do not")
    if not coverage.integer:
        raise ConversionError(
            "--precision int8: no convolution or matrix product was quantized", hint="stay with fp32 or bf16"
        )
    unchanged = Rewritten(reports=(), edge=Edge())
    # A graph with QuantizeLinear and DequantizeLinear emulates itself: the reference engine computes these in fp32.
    return LoweredGraph(graph=target, emulated=target, rewritten=unchanged, notes=(str(coverage), *notes))


# Newest version of QuantizeLinear that ONNX Runtime 1.32 has kernels of.
_NEWEST_QUANTIZER = 25


def _with_quantizers(model: onnx_ir.Model) -> onnx_ir.Model:
    """Lower the operator set of a graph if ONNX Runtime cannot run the quantizers of that set.

    Raises:
        LoweringError: ONNX cannot convert the graph.
    """
    version = model.opset_imports.get("", OPSET)
    if onnx.defs.get_schema("QuantizeLinear", version).since_version <= _NEWEST_QUANTIZER:
        return model
    try:
        lowered = onnx.version_converter.convert_version(onnx_ir.to_proto(model), _NEWEST_QUANTIZER)
    except Exception as error:  # ONNX has no error class for it
        raise LoweringError(
            f"ONNX Runtime cannot run int8 graphs of operator set {version}",
            attempts=(f"the conversion to {_NEWEST_QUANTIZER} failed: {error}",),
            hint=f"export the source with operator set {_NEWEST_QUANTIZER} or older",
        ) from error
    return onnx_ir.from_proto(lowered)


# Nodes kept in fp32: those of the recipe, those without effect on speed, and the fewest needed to pass the proof.


def kept_by_recipe(model: onnx_ir.Model, recipe: Recipe) -> list[str]:
    """Names of the nodes that a recipe keeps in fp32, and of those behind the last products."""
    products = [str(node.name) for node in model.graph if node.op_type in PRODUCTS]
    ends = [] if recipe.quantize_ends or not products else [products[0], products[-1]]
    matched = [str(node.name) for node in model.graph if matches(node, recipe.keep_fp32)]
    return [*matched, *ends, *behind_products(model)]


def behind_products(model: onnx_ir.Model) -> list[str]:
    """Names of the nodes behind the last products.

    They cost little, and need precision: coordinates of boxes in 256 steps would be off by pixels.
    """
    before: set[onnx_ir.Node] = set()
    waiting = [node for node in model.graph if node.op_type in PRODUCTS]
    while waiting:
        producers = {value.producer() for value in waiting.pop().inputs if value is not None}
        new = {producer for producer in producers if producer is not None} - before
        before |= new
        waiting += new
    return [str(node.name) for node in model.graph if node not in before and node.op_type not in PRODUCTS]


def _candidates(fp32: Path, recipe: Recipe) -> list[str]:
    """Names of the candidates to keep in fp32."""
    model = onnx_ir.load(fp32)
    if recipe.precision is not Precision.INT8:
        return LowerPrecision(recipe.precision, recipe.amp, recipe.keep_fp32).candidates(model)
    name_nodes(model)
    kept = {*kept_by_recipe(model, recipe)}
    return [str(node.name) for node in model.graph if node.name not in kept]


def smallest_kept(names: Sequence[str], passes: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """Find a minimal set of nodes with which a test passes.

    Args:
        names: All nodes; keeping all of them is assumed to pass.
        passes: Tests a set of kept nodes; must be monotonic.

    Returns:
        Their names; empty when the test passes without any.

    Source: Junker, "QuickXplain", 2004: halves the set, and tests each half with the other kept.
    """

    def needed(among: Sequence[str], kept: Sequence[str]) -> list[str]:
        if len(kept) == len(names) or passes(kept):
            return []
        if len(among) == 1:
            return list(among)
        first, second = among[: len(among) // 2], among[len(among) // 2 :]
        from_first = needed(first, [*kept, *second])
        return [*from_first, *needed(second, [*kept, *from_first])]

    return tuple(needed(names, []))


# Int8 by NNCF, OpenVINO's quantizer: an alternative for transformers, whose activations it smooths. docs/precision.md
# compares it with ONNX Runtime's quantizer. The proof is the same.

_TRANSFORMER = {"LayerNormalization", "Softmax"}  # operators of every transformer


def quantize_by_nncf(
    graph: Path, samples: Mapping[str, AnyArray], target: Path, *, exclude: Sequence[str] = (), whole: bool = False
) -> Coverage:
    """Write a QDQ graph.

    Args:
        graph: The fp32 graph, with named nodes.
        samples: Calibration inputs by name, `[samples, ...]`; not those of the proof.
        target: File to write.
        exclude: Names of nodes that stay fp32.
        whole: The graph has no batch: each sample is a whole input.

    Returns:
        Number of products between quantizers, whether or not ONNX Runtime has integer kernels for them.

    Raises:
        EngineUnavailable: NNCF is not installed.
        LoweringError: NNCF cannot quantize the graph.
    """
    nncf = _import_nncf()
    count = len(next(iter(samples.values())))
    rows: list[Any] = [index if whole else slice(index, index + 1) for index in range(count)]
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # hide progress bars, because --json prints to stdout
            model = onnx.load(graph)
            transformer = {node.op_type for node in model.graph.node} >= _TRANSFORMER
            quantized = nncf.quantize(
                model,
                nncf.Dataset([{name: array[row] for name, array in samples.items()} for row in rows]),
                subset_size=count,
                model_type=nncf.ModelType.TRANSFORMER if transformer else None,
                ignored_scope=nncf.IgnoredScope(names=list(exclude), validate=False) if exclude else None,
            )
            onnx.save(quantized, target)
        return _count_quantized(target)
    except Exception as error:  # NNCF has no error class
        raise LoweringError(
            f"NNCF cannot quantize {graph}",
            attempts=(f"{type(error).__name__}: {error}",),
            hint="use ONNX Runtime's quantizer: --int8-by onnxruntime",
        ) from error


def _import_nncf() -> Any:
    """Import NNCF without telemetry and warnings."""
    os.environ.setdefault("NNCF_CI", "1")  # turns off telemetry. Source: nncf/telemetry/wrapper.py
    try:
        import nncf
    except ImportError as error:
        raise EngineUnavailable(
            f"--int8-by nncf needs a library that is not installed: {error}", extra="nncf"
        ) from error
    except Exception as error:  # built for another release of a library
        raise EngineUnavailable(
            f"--int8-by nncf: NNCF cannot be loaded: {type(error).__name__}: {error}",
            hint="reinstall it (pip install --force-reinstall 'graphkiln[nncf]'), or use --int8-by onnxruntime",
        ) from error
    logging.getLogger("nncf").setLevel(logging.ERROR)
    return nncf


# Int8 by ModelOpt, TensorRT's quantizer: symmetric activations, which TensorRT requires. It runs on CPUs, too.


def quantize_by_modelopt(
    graph: Path, samples: Mapping[str, AnyArray], target: Path, *, exclude: Sequence[str] = (), whole: bool = False
) -> Coverage:
    """Write a QDQ graph by ModelOpt's command, in a separate process: it patches ONNX Runtime's quantizer.

    Args:
        graph: The fp32 graph, with named nodes; ModelOpt writes temporary files beside it.
        samples: Calibration inputs by name, `[samples, ...]`; not those of the proof.
        target: File to write.
        exclude: Names of nodes that stay fp32.
        whole: The graph has no batch: each sample is a whole input.

    Returns:
        Number of products between quantizers, whether or not ONNX Runtime has integer kernels for them.

    Raises:
        LoweringError: ModelOpt cannot quantize the graph.
    """
    calibration = graph.parent / "calibration.npz"
    # It cuts samples along the first dimension, into as many rows as a fixed batch of the graph has.
    rows = {name: array.reshape(-1, *array.shape[2:]) if whole else array for name, array in samples.items()}
    np.savez(calibration, **rows)
    command: list[str | Path] = [sys.executable, "-m", "modelopt.onnx.quantization"]
    command += ["--onnx_path", graph, "--output_path", target]
    command += ["--quantize_mode", "int8", "--calibration_method", "max", "--calibration_eps", "cpu"]
    command += ["--calibration_data_path", calibration, "--high_precision_dtype", "fp32"]
    if exclude:
        command += ["--nodes_to_exclude", *(f"^{re.escape(name)}$" for name in exclude)]
    finished = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if finished.returncode:
        lines = finished.stderr.strip().splitlines() or [f"exit code {finished.returncode}"]
        raise LoweringError(
            f"ModelOpt cannot quantize {graph}",
            attempts=(lines[-1],),
            hint="use ONNX Runtime's quantizer: --int8-by onnxruntime",
        )
    return _count_quantized(target)


def _count_quantized(graph: Path) -> Coverage:
    """Count the products between quantizers, whether or not ONNX Runtime has integer kernels for them."""
    products = [node for node in onnx_ir.load(graph).graph if node.op_type in PRODUCTS]
    quantized = [node for node in products if all(map(_is_dequantized, node.inputs[:2]))]
    return Coverage(integer=len(quantized), products=len(products))


def _is_dequantized(value: onnx_ir.Value | None) -> bool:
    producer = value.producer() if value else None
    return producer is not None and producer.op_type == "DequantizeLinear"


# Speed of an int8 graph relative to its fp32 graph on this machine.
#
# An int8 version has no fp32 graph, so this cannot be measured later. On CPUs int8 may be slower: MobileNetV3-small,
# with its many small layers, reaches 0.7 to 0.9 of the rate of fp32 even with AVX512-VNNI.

_BATCH = 4


def _to_compare(engine: str) -> SessionConfig:
    return SessionConfig(
        engine=engine, device=CPU, threads=usable_cores(), spin=True, reason="to compare", largest_batch=_BATCH
    )


def _times_s(
    graphs: Mapping[str, Path], golden: GoldenSamples, engines: Sequence[str] = _ENGINES
) -> dict[str, dict[str, float]]:
    """Measure graphs in turns, in each engine.

    Returns:
        Engine -> name of each graph that it can run -> seconds of the fastest run.
    """
    feeds = golden.batch(_BATCH)
    times: dict[str, dict[str, float]] = {}
    for engine in engines:
        with ExitStack() as opened:
            runs = {}
            for name, graph in graphs.items():
                try:
                    session = opened.enter_context(load_engine(engine).build(graph, _to_compare(engine)))
                    session.run(feeds)
                except GraphkilnError as error:  # not installed, or int8 is not exact on this CPU
                    _log.debug("%s is not measured with %s: %s", name, engine, error)
                else:
                    runs[name] = partial(session.run, feeds)
            times[engine] = fastest_runs_s(runs) if runs else {}
    return times


def compare_speed(fp32: Path, int8: Path, golden: GoldenSamples) -> str:
    """Measure the speed of int8 on this CPU, in each engine that supports both graphs; empty if none does.

    A warning is logged if the fastest fp32 is faster than the fastest int8.
    """
    return _describe_speed(_times_s({Precision.FP32: fp32, Precision.INT8: int8}, golden), Precision.INT8)


def _describe_speed(measured: Mapping[str, Mapping[str, float]], int8: str) -> str:
    """Describe the times of an int8 graph beside those of fp32; warn if fp32 is faster."""
    times = {
        engine: {Precision.FP32: each[Precision.FP32], Precision.INT8: each[int8]}
        for engine, each in measured.items()
        if {Precision.FP32, int8} <= each.keys()
    }
    if not times:
        return ""
    ratios = " and ".join(
        f"{each[Precision.FP32] / each[Precision.INT8]:.2f}x with {engine}" for engine, each in times.items()
    )
    _, precision, engine = min((took, name, engine) for engine, each in times.items() for name, took in each.items())
    fastest = f"the fastest there is {precision} with {engine}"
    text = f"rate of int8 to that of fp32, on {hardware.cpu_name()}: {ratios}; {fastest}"
    if precision is Precision.FP32:
        _log.warning("%s", text)
    return text
