"""Four ways to run the cases: ONNX Runtime alone, OpenVINO, converted, and served by the real server."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from conforming.cases import Case
from conforming.outcome import PASSED, Outcome, Verdict, needs_samples
from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.onnxruntime.session import run_ort_values
from graphkiln_backend.engines.registry import probe
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.lowering.deployment import Deployment
from graphkiln_backend.lowering.plan import Resources
from graphkiln_backend.repository.config import BACKEND, write_config
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.overlay import complete_config
from graphkiln_backend.repository.version import CONFIG_FILE
from graphkiln_client import Client
from graphkiln_converters.convert import convert
from graphkiln_converters.recipe import Recipe
from soaking.guard import guarded_folder
from soaking.service import Service

_BF16 = "tensor(bfloat16)"
_CHUNK = 60  # cases of one server: few, so that its crash costs little; many, so that its start does
_AT_ONCE = 4
_LIMIT_S = 300.0
_FLAGS = ("--model-control-mode=explicit", "--disable-auto-complete-config", "--replay-interval=0", "--cache=off")
_REFUSED = "load failed for model"  # Triton's error for a version that cannot be served


def _compare(case: Case, run: Callable[[dict[str, Any]], Mapping[str, Any]], failure: type[Exception]) -> Outcome:
    """Run each sample of a case and compare its outputs."""
    for sample in range(len(case.samples)):
        try:
            outputs = run(case.feeds(sample))
        except failure as error:
            return Outcome.of(Verdict.FAILS, error)
        if difference := case.difference(sample, outputs):
            return Outcome.of(Verdict.DIFFERS, difference)
    return PASSED


# ONNX Runtime alone.


def run_bare(cases: Sequence[Case]) -> Iterator[tuple[Case, Outcome]]:
    """Run cases by ONNX Runtime with its defaults; yield an outcome for each."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    for case in cases:
        content = case.model.SerializeToString()
        try:
            session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            yield case, Outcome.of(Verdict.REFUSED, error)
        else:
            yield case, _compare(case, partial(_run_session, session), Exception)


def _run_session(session: onnxruntime.InferenceSession, feeds: Mapping[str, Any]) -> dict[str, Any]:
    values = [*session.get_inputs(), *session.get_outputs()]
    names = [value.name for value in session.get_outputs()]
    if any(value.type == _BF16 for value in values):  # its binding for numpy does not know bf16
        return dict(zip(names, run_ort_values(session, names, feeds, onnxruntime.RunOptions()), strict=True))
    return dict(zip(names, session.run(names, feeds), strict=True))


# Cases as an instance computes them, without a server: with `engine: openvino`, and converted.


def run_openvino(cases: Sequence[Case]) -> Iterator[tuple[Case, Outcome]]:
    """Run cases with `engine: openvino`; yield an outcome for each."""
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="conforming-") as folder:
            try:
                model = write_model(case, Path(folder), "openvino")
            except GraphkilnError as error:
                yield case, Outcome.of(Verdict.REFUSED, error)
            else:
                yield case, run_instance(case, model / "1")


def run_converted(cases: Sequence[Case]) -> Iterator[tuple[Case, Outcome]]:
    """Convert and run cases; yield an outcome for each."""
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="conforming-") as folder:
            yield case, _convert_and_run(case, Path(folder))


def _convert_and_run(case: Case, folder: Path) -> Outcome:
    """Convert a case; if synthetic samples are refused, with its own inputs as samples."""
    source = folder / f"{case.served_name}.onnx"
    onnx.save(case.model, source)
    recipe = Recipe(
        source=str(source), name=case.served_name, model_store=folder / "store", keep_names=True, max_batch_size=2
    )

    def attempt(recipe: Recipe) -> Outcome:
        try:
            return run_instance(case, convert(recipe))
        except GraphkilnError as error:
            return Outcome.of(Verdict.REFUSED, error)

    outcome = attempt(recipe)
    if outcome.verdict is not Verdict.REFUSED or not needs_samples(outcome.reason):
        return outcome
    rows = {name: value for name, value in case.feeds(0).items() if isinstance(value, np.ndarray)}
    whole = {name: value[np.newaxis] for name, value in rows.items()}
    for name, arrays in (("rows", rows), ("whole", whole)):  # rows of a batch, or one sample
        path = folder / f"{name}.npz"
        np.savez(path, **arrays)
        outcome = attempt(recipe.model_copy(update={"samples": path}))
        if outcome.verdict is not Verdict.REFUSED:
            break
    return outcome


def run_instance(case: Case, version: Path) -> Outcome:
    """Run a case by a version that is proven as before it serves."""
    config = ModelConfig.read(version.parent / CONFIG_FILE, has_gpu=False)
    with (
        tempfile.TemporaryDirectory(prefix="conforming-") as folder,
        ArtifactCache(Path(folder), lasting=False) as cache,
    ):
        try:
            deployment = Deployment.read(version, config, Resources(device=CPU, cores=1, probe=probe))
            session = deployment.build(cache).session
        except GraphkilnError as error:
            return Outcome.of(Verdict.REFUSED, error)
        with session:
            return _compare(case, session.run, GraphkilnError)


def write_model(case: Case, store: Path, engine: str = "") -> Path:
    """Write a case's graph into a model store, and complete its configuration as `graphkiln serve` does.

    Returns:
        The model's folder.

    Raises:
        GraphkilnError: The graph cannot be served.
    """
    folder = store / case.served_name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(case.model.SerializeToString())
    lines = [f'backend: "{BACKEND}"', "instance_group { count: 1 kind: KIND_CPU }"]
    lines += [f'parameters {{ key: "engine" value {{ string_value: "{engine}" }} }}'] if engine else []
    (folder / CONFIG_FILE).write_text("\n".join(lines))
    write_config(complete_config(folder, frozenset({BACKEND}), lambda version: version), folder / CONFIG_FILE)
    return folder


# Cases on the real server: loaded in chunks in Triton's explicit mode, requested over HTTP, unloaded.


def run_served(cases: Sequence[Case], engine: str = "") -> Iterator[tuple[Case, Outcome]]:
    """Run cases by the server, chunk by chunk.

    Args:
        cases: The cases.
        engine: Engine of each model's configuration; empty for the default.

    Yields:
        An outcome for each case.
    """
    for start in range(0, len(cases), _CHUNK):
        with guarded_folder("conforming-") as folder:
            store, servable = folder / "store", list[Case]()
            store.mkdir()
            for case in cases[start : start + _CHUNK]:
                try:
                    write_model(case, store, engine)
                    servable.append(case)
                except GraphkilnError as error:
                    shutil.rmtree(store / case.served_name)
                    yield case, Outcome.of(Verdict.REFUSED, error)
            if servable:
                yield from _serve(folder, store, servable)


def _serve(folder: Path, store: Path, cases: Sequence[Case]) -> Iterator[tuple[Case, Outcome]]:
    service = Service(folder, store, *_FLAGS)
    service.start()
    try:
        service.wait_ready()
        with (
            Client(service.reach.http_url, timeout_s=_LIMIT_S, max_retries=0, admin_key=service.admin_key) as client,
            ThreadPoolExecutor(_AT_ONCE) as threads,
        ):
            yield from zip(cases, threads.map(partial(_load_and_run, client), cases), strict=True)
    finally:
        service.stop()


def _load_and_run(client: Client, case: Case) -> Outcome:
    try:
        client.load(case.served_name)
    except GraphkilnError as error:
        return Outcome.of(Verdict.REFUSED if _REFUSED in str(error) else Verdict.FAILS, error)
    try:
        model = client.model(case.served_name)
        ranks = {each["name"]: len(each["shape"]) for each in model.metadata["inputs"]}
        outcome = _compare(
            case, lambda feeds: restore_scalars(case, model.infer(as_published(feeds, ranks))), GraphkilnError
        )
        client.unload(case.served_name)
    except GraphkilnError as error:
        return Outcome.of(Verdict.FAILS, error)
    return outcome


def as_published(feeds: Mapping[str, Any], ranks: Mapping[str, int]) -> dict[str, AnyArray]:
    """Reshape scalar inputs to `[1]` where the server publishes rank 1 for them."""
    arrays = {name: np.asarray(value) for name, value in feeds.items()}
    return {
        name: array.reshape(1) if array.ndim == 0 and ranks.get(name) == 1 else array for name, array in arrays.items()
    }


def restore_scalars(case: Case, outputs: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
    """Reshape outputs of `[1]` to scalars where the graph declares them."""
    scalars = {
        value.name
        for value in case.model.graph.output
        if value.type.HasField("tensor_type")
        and value.type.tensor_type.HasField("shape")
        and not value.type.tensor_type.shape.dim
    }
    return {
        name: array.reshape(()) if name in scalars and array.shape == (1,) else array for name, array in outputs.items()
    }
