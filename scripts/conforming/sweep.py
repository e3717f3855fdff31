"""Comparison of OpenVINO and ONNX Runtime for edge values in each operator and type, to verify the table of OpenVINO.

The cases are ONNX's node tests of one operator, in each element type that both the operator and Triton support, and
casts between all types. If the runtimes differ, the table (`openvino_numbers.TABLE`) must rewrite or refuse the
operator, check the request, or document the difference; or the self-test must refuse the graph. If ONNX's reference
evaluator agrees with OpenVINO, the result counts as undefined.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, defs, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from openvino import Type

from conforming.cases import Case
from graphkiln_backend.engines.base import Session, SessionConfig
from graphkiln_backend.engines.openvino import OpenVinoEngine
from graphkiln_backend.engines.openvino_numbers import TABLE, Action
from graphkiln_backend.engines.registry import open_reference
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError, LoweringError, SignatureError, VerificationError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.trial import try_beside
from graphkiln_backend.proof.policy import REPLAY

Feeds = Mapping[str, AnyArray]

_CONFIG = SessionConfig(engine="openvino", device=CPU, threads=1, spin=False, reason="the sweep")
_NAMES = ("FLOAT", "FLOAT16", "INT8", "UINT8", "INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64", "BOOL")
TYPES = {name: TensorProto.DataType.Value(name) for name in _NAMES}
_INSIDE = ("FLOAT8E4M3FN", "FLOAT8E5M2", "INT4", "UINT4")  # types that only values inside of a graph may have
# Random operators, and those whose inputs are sizes: extremes would take all memory.
_LEFT_OUT = {"Bernoulli", "RandomNormalLike", "RandomUniformLike", "Multinomial", "Dropout"} | {
    *("BlackmanWindow", "HannWindow", "HammingWindow", "ConstantOfShape", "Range", "OneHot", "Expand", "Tile"),
}
_LIMIT_S = 300.0  # for one variant
_MOST_ELEMENTS = 20_000  # for the reference evaluator, which is slow
_TYPE_NAMES = {Type.f16: "FLOAT16"}  # of documented rows with a type
# Relative tolerance of floats by bytes; the absolute one is the same share of the largest finite value, up to 1000.
_RTOL = {2: 1e-2, 4: 1e-3, 8: 1e-3}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A graph of one operator in one type.

    Attributes:
        operator: The operator.
        dtype: Name of the type.
        model: The graph.
        samples: Kinds of values, each with inputs of that kind.
    """

    operator: str
    dtype: str
    model: onnx.ModelProto
    samples: Sequence[tuple[str, Feeds]]


@dataclass(frozen=True, slots=True)
class Finding:
    """Comparison of a variant for one kind of values: `same`, an action of the table, or how it differs."""

    operator: str
    dtype: str
    values: str
    verdict: str
    detail: str = ""


def edge_values(dtype: str) -> dict[str, list[float]]:
    """Return values of a type by kind."""
    kind = np.dtype(helper.tensor_dtype_to_np_dtype(TYPES[dtype]))
    if dtype == "BOOL":
        return {"plain": [0, 1]}
    if kind.kind == "f":
        plain, limits = [0.5, -1.5, 2.5, -0.0, 0.0, 1, 1, -3, 7, 100.25, -0.5, 3], np.finfo(kind)
        smallest = float(limits.smallest_subnormal)
        return {
            "plain": plain,
            "nan": [np.nan, *plain],
            "infinity": [np.inf, -np.inf, *plain],
            "overflow": [float(limits.max), float(limits.min), *plain],
            "denormal": [smallest, -smallest, float(limits.tiny) / 2, 0, 1],
        }
    ends = np.iinfo(kind)
    most, least = int(ends.max), int(ends.min)
    return {
        "small": [0, 1, 2, 3, 5, 7, *([-1, -3, -7] if least else [])],
        "extreme": [most, least, most - 1, least + 1, most // 2 + 1, 3],
        **({"24 bits": [2**24 - 1, 2**24 + 1, 2**24 + 3, 2**20, 1, 3]} if ends.bits >= 32 else {}),
    }


def variants(cases: Iterable[Case]) -> Iterator[Variant]:
    """Yield each operator of the suite in each type, and casts."""
    seen: set[str] = set()
    for case in cases:
        if case.kind == "node" and len(case.model.graph.node) == 1 and not case.model.functions:
            yield from _variants_of(case, seen)
    yield from _casts()


def _variants_of(case: Case, seen: set[str]) -> Iterator[Variant]:
    node = case.model.graph.node[0]
    values = [*case.model.graph.input, *case.model.graph.output]
    feeds = case.feeds(0)
    types = {value.type.tensor_type.elem_type for value in values}  # 0 of a sequence or an optional value
    if node.domain or node.op_type in _LEFT_OUT or types & {0, TensorProto.STRING}:
        return
    schema = defs.get_schema(node.op_type, case.model.opset_import[0].version)
    allowed = {each.type_param_str: set(each.allowed_type_strs) for each in schema.type_constraints}
    formal = {name: schema.inputs[min(at, len(schema.inputs) - 1)].type_str for at, name in enumerate(node.input)}
    formal |= {name: schema.outputs[min(at, len(schema.outputs) - 1)].type_str for at, name in enumerate(node.output)}
    shapes = [np.shape(array) for array in feeds.values()]
    for variable in dict.fromkeys(formal[name] for name in feeds if name in formal):
        names = [name for name in feeds if formal.get(name) == variable]
        taken = [each for each in TYPES if f"tensor({each.lower()})" in allowed.get(variable, ())]
        if len(taken) < 2 or (set(taken) <= {"INT32", "INT64"} and variable != schema.inputs[0].type_str):
            continue  # a type of indices and sizes
        for dtype in taken:
            model = _retyped(case.model, formal, variable, TYPES[dtype])
            key = f"{node.op_type} {schema.since_version} {node.attribute} {shapes} {variable} {dtype}"
            if key not in seen:
                seen.add(key)
                samples = tuple(_samples(node, feeds, names, dtype))
                yield Variant(operator=node.op_type, dtype=dtype, model=model, samples=samples)


def _retyped(model: onnx.ModelProto, formal: Mapping[str, str], variable: str, dtype: int) -> onnx.ModelProto:
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for value in (*changed.graph.input, *changed.graph.output):
        if formal.get(value.name) == variable:
            value.type.tensor_type.elem_type = dtype
    for tensor in changed.graph.initializer:
        if formal.get(tensor.name) == variable:
            array = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(dtype))
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return changed


def _samples(node: onnx.NodeProto, feeds: Feeds, names: Sequence[str], dtype: str) -> Iterator[tuple[str, Feeds]]:
    kind = np.dtype(helper.tensor_dtype_to_np_dtype(TYPES[dtype]))
    for values, edges in {"suite": None, **edge_values(dtype)}.items():
        made = dict(feeds)
        for shift, name in enumerate(names):
            array = np.asarray(feeds[name])
            if edges is not None:
                array = np.roll(np.resize(np.array(edges, object), array.size), shift).reshape(array.shape)
            elif kind.kind in "iu":
                ends = np.iinfo(kind)
                array = np.nan_to_num(array.astype(np.float64), posinf=1, neginf=0).clip(ends.min, ends.max)
            made[name] = array.astype(kind)
        if kind.kind in "iu" and node.op_type in {"Div", "Mod"} and len(node.input) > 1:
            divisor = made[node.input[1]]  # ONNX defines neither division by zero nor the minimum divided by -1
            undefined = (divisor == 0) | (divisor == np.array(-1).astype(kind))
            made[node.input[1]] = np.where(undefined, kind.type(3), divisor)
        if node.op_type == "BitShift":
            made[node.input[1]] = (made[node.input[1]].astype(object) % (8 * kind.itemsize)).astype(kind)
        yield values, made


def _casts() -> Iterator[Variant]:
    """Yield casts to a type inside of the graph, where OpenVINO may keep more bits than in an output."""
    for source, target in product(TYPES, (*TYPES, *_INSIDE)):
        to = TensorProto.DataType.Value(target)
        nodes = [
            helper.make_node("Cast", ["x"], ["inside"], to=to),
            helper.make_node("Cast", ["inside"], ["y"], to=TensorProto.FLOAT),
        ]
        values = (("x", TYPES[source]), ("y", TensorProto.FLOAT))
        ends = [helper.make_tensor_value_info(name, dtype, ["n", 64]) for name, dtype in values]
        graph = helper.make_graph(nodes, "cast", ends[:1], ends[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        samples = tuple(_samples(nodes[0], {"x": np.zeros((2, 64))}, ["x"], source))
        yield Variant(operator="Cast", dtype=f"{source} to {target}", model=model, samples=samples)


def examine(variant: Variant, folder: Path) -> Iterator[Finding]:
    """Compare a variant; yield a finding for each kind of values that ONNX Runtime computes."""
    finding = partial(Finding, variant.operator, variant.dtype)
    path = folder / "model.onnx"
    onnx.save(variant.model, path)
    with ExitStack() as stack:
        try:
            expected = stack.enter_context(open_reference(path))
            session = stack.enter_context(OpenVinoEngine().build(path, _CONFIG))
        except LoweringError as error:
            by_table = any(row.reason in str(error) for row in TABLE) or "computes integers in 32 bits" in str(error)
            yield finding("all", str(Action.REFUSED) if by_table else "not supported", str(error))
            return
        except GraphkilnError as error:
            yield finding("all", "not supported", str(error))
            return
        refused_by_test: str | None = None
        for values, feeds in variant.samples:
            verdict, detail = _compare(variant, values, feeds, session, expected)
            if verdict == "differs":
                if refused_by_test is None:
                    refused_by_test = _self_test(session, path)
                verdict = "refused by the self-test" if refused_by_test else verdict
            if verdict:
                yield finding(values, verdict, detail)


def _compare(variant: Variant, values: str, feeds: Feeds, session: Session, expected: Session) -> tuple[str, str]:
    """Return a verdict and how the outputs differ; an empty verdict if ONNX Runtime fails."""
    try:
        wanted = expected.run(feeds)
    except GraphkilnError:
        return "", ""
    try:
        found = session.run(feeds)
    except GraphkilnError as error:
        return str(Action.CHECKED) if isinstance(error, SignatureError) else "fails", str(error)
    detail = difference(wanted, found)
    if not detail:
        return "same", ""
    if _is_documented(variant, values):
        return str(Action.DOCUMENTED), detail
    third = _reference(variant.model, feeds)
    return "undefined" if third is not None and not difference(third, found) else "differs", detail


def _reference(model: onnx.ModelProto, feeds: Feeds) -> Feeds | None:
    """Evaluate a graph by ONNX's reference; None if it does not support it, for which it has many exceptions."""
    if any(array.size > _MOST_ELEMENTS for array in feeds.values()):
        return None
    try:
        outputs = ReferenceEvaluator(model).run(None, dict(feeds))
    except Exception:
        return None
    return {value.name: np.asarray(array) for value, array in zip(model.graph.output, outputs, strict=True)}


def _is_documented(variant: Variant, values: str) -> bool:
    source, _, target = variant.dtype.partition(" to ")
    to_integer = source.startswith("FLOAT") and target in TYPES and not target.startswith("FLOAT")
    if to_integer and values in {"infinity", "overflow"}:
        values = "out of range"
    return any(
        row.action is Action.DOCUMENTED
        and row.values in {"", values}
        and (not row.onnx or variant.operator in row.onnx)
        and (not row.types or target in {_TYPE_NAMES[each] for each in row.types})
        for row in TABLE
    )


def _self_test(session: Session, path: Path) -> str:
    try:
        try_beside(session, path, open_reference, REPLAY[Precision.FP32])
    except (VerificationError, LoweringError) as error:
        return str(error)
    return ""


def difference(expected: Feeds, found: Feeds) -> str:
    """Describe the first difference; integers must be equal, floats within a tolerance, with equal NaN."""
    for name, wanted in expected.items():
        got = found[name]
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            return f"{name}: {got.dtype} {list(got.shape)} in place of {wanted.dtype} {list(wanted.shape)}"
        if wanted.dtype.kind in "iub":
            differs = wanted != got
        else:
            rtol = _RTOL[wanted.dtype.itemsize]
            numbers, others = wanted.astype(np.float64), got.astype(np.float64)
            scale = np.abs(numbers[np.isfinite(numbers)]).max(initial=0)
            differs = ~np.isclose(others, numbers, rtol=rtol, atol=rtol * min(scale, 1e3), equal_nan=True)
        if differs.any():
            place = tuple(np.argwhere(differs)[0])
            return f"{name}: {got[place]} in place of {wanted[place]}, {differs.sum()} of {differs.size}"
    return ""


def sweep(cases: Iterable[Case]) -> Iterator[Finding]:
    """Examine all variants in a child process, which is replaced whenever an operator kills it."""
    context, todo = multiprocessing.get_context("spawn"), list(variants(cases))
    done = 0
    while done < len(todo):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_examine_all, args=(todo[done:], sender))
        process.start()
        sender.close()
        try:
            while receiver.poll(_LIMIT_S):
                yield from receiver.recv()
                done += 1
        except EOFError:
            pass
        process.kill()
        process.join()
        if done < len(todo):
            yield Finding(todo[done].operator, todo[done].dtype, "all", "ended its process, or took too long")
            done += 1


def _examine_all(todo: Sequence[Variant], sender: Connection) -> None:
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
        for variant in todo:
            sender.send(tuple(examine(variant, Path(folder))))
    sender.close()


def report(findings: Iterable[Finding]) -> tuple[str, ...]:
    """Print findings by operator and type; return those that the table does not cover."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    missing = []
    for each in findings:
        if each.verdict != "same":
            rows.setdefault((each.operator, each.dtype), Counter())[f"{each.values}: {each.verdict}"] += 1
        if each.verdict in {"differs", "fails"} or each.verdict.startswith("ended"):
            missing.append(f"{each.operator} {each.dtype}, {each.values}: {each.verdict}: {each.detail}")
    for (operator, dtype), verdicts in sorted(rows.items()):
        print(f"{operator:24} {dtype:24} {', '.join(verdicts)}")
    return tuple(missing)
