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

from conforming.cases import Case, ranks_of, to_tensors, to_values, write_model
from conforming.outcome import PASSED, Outcome, Verdict, needs_samples
from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.onnxruntime.session import run_ort_values
from graphkiln_backend.engines.registry import probe
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.lowering.deployment import Deployment
from graphkiln_backend.lowering.plan import Resources
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.version import CONFIG_FILE
from graphkiln_client import Client
from graphkiln_converters.convert import convert
from graphkiln_converters.recipe import Recipe
from soaking.guard import guarded_folder
from soaking.service import Service

_BF16 = "tensor(bfloat16)"


def ask_bare(cases: Sequence[Case]) -> Iterator[tuple[Case, Outcome]]:
    """Run cases by ONNX Runtime with its defaults.

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
    return _compare(case, partial(_run, session), Exception)


def _compare(case: Case, run: Callable[[dict[str, Any]], Mapping[str, Any]], fault: type[Exception]) -> Outcome:
    """Run each sample of a case and compare its outputs; a fault of `run` is a failure."""
    for sample in range(len(case.samples)):
        try:
            outputs = run(case.feeds(sample))
        except fault as error:
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


# Cases as an instance computes them, in this process: from a version's folder to an answer, without a server.


def ask_openvino(cases: Sequence[Case]) -> Iterator[tuple[Case, Outcome]]:
    """Run cases whose configuration says `engine: openvino`.

    Yields:
        An outcome for each case.
    """
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="conforming-") as folder:
            yield case, _ask_engine(case, Path(folder), "openvino")


def ask_instance(case: Case, version: Path) -> Outcome:
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


def _ask_engine(case: Case, store: Path, engine: str) -> Outcome:
    try:
        model = write_model(case, store, engine)
    except GraphkilnError as error:
        return Outcome.of(Verdict.REFUSED, error)
    return ask_instance(case, model / "1")


# Cases through `graphkiln convert`, and the converted version as an instance computes it.


def ask_converted(cases: Sequence[Case]) -> Iterator[tuple[Case, Outcome]]:
    """Run cases that are converted first; with their own inputs as samples if made-up ones are refused.

    Yields:
        An outcome for each case.
    """
    for case in cases:
        with tempfile.TemporaryDirectory(prefix="conforming-") as folder:
            yield case, _convert_and_ask(case, Path(folder))


def _convert_and_ask(case: Case, folder: Path) -> Outcome:
    source = folder / f"{case.served_name}.onnx"
    onnx.save(case.model, source)
    recipe = Recipe(
        source=str(source), name=case.served_name, model_store=folder / "store", keep_names=True, max_batch_size=2
    )
    outcome = _convert(case, recipe)
    if outcome.verdict is not Verdict.REFUSED or not needs_samples(outcome.reason):
        return outcome
    for path in _write_samples(case, folder):
        outcome = _convert(case, recipe.model_copy(update={"samples": path}))
        if outcome.verdict is not Verdict.REFUSED:
            break
    return outcome


def _convert(case: Case, recipe: Recipe) -> Outcome:
    try:
        version = convert(recipe)
    except GraphkilnError as error:
        return Outcome.of(Verdict.REFUSED, error)
    return ask_instance(case, version)


def _write_samples(case: Case, folder: Path) -> Iterator[Path]:
    """A case's inputs as `convert --samples` takes them: rows of a batch, or one whole sample. Which, it says then."""
    feeds = {name: value for name, value in case.feeds(0).items() if isinstance(value, np.ndarray)}
    for name, arrays in (("rows", feeds), ("whole", {key: value[np.newaxis] for key, value in feeds.items()})):
        path = folder / f"{name}.npz"
        np.savez(path, **arrays)
        yield path


# Cases on the real server: loaded in chunks in Triton's explicit mode, asked over HTTP, unloaded.

CHUNK = 60  # cases of one server: few enough that a fault of it costs little, many enough that its start does
_AT_ONCE = 4
_LIMIT_S = 300.0
_FLAGS = ("--model-control-mode=explicit", "--disable-auto-complete-config", "--replay-interval=0", "--cache=off")
# What Triton answers where a version cannot be served; all else that keeps a model from loading is a fault.
_REFUSED = "load failed for model"


def ask_served(cases: Sequence[Case], engine: str = "") -> Iterator[tuple[Case, Outcome]]:
    """Run cases by the server.

    Args:
        cases: The cases.
        engine: The engine that each model's configuration asks for; empty for the default.

    Yields:
        An outcome for each case, chunk by chunk.
    """
    for start in range(0, len(cases), CHUNK):
        chunk = cases[start : start + CHUNK]
        with guarded_folder("conforming-") as folder:
            store = folder / "store"
            store.mkdir()
            refused = {case.served_name: _write(case, store, engine) for case in chunk}
            yield from ((case, outcome) for case in chunk if (outcome := refused[case.served_name]))
            yield from _serve(folder, store, [case for case in chunk if not refused[case.served_name]])


def _write(case: Case, store: Path, engine: str) -> Outcome | None:
    """Put a case into the store; why not, where its configuration cannot be completed."""
    try:
        write_model(case, store, engine)
    except GraphkilnError as error:
        shutil.rmtree(store / case.served_name)
        return Outcome.of(Verdict.REFUSED, error)
    return None


def _serve(folder: Path, store: Path, cases: Sequence[Case]) -> Iterator[tuple[Case, Outcome]]:
    if not cases:
        return
    service = Service(folder, store, *_FLAGS)
    service.start()
    try:
        service.wait_ready()
        with (
            Client(service.reach.http_url, timeout_s=_LIMIT_S, max_retries=0, admin_key=service.admin_key) as client,
            ThreadPoolExecutor(_AT_ONCE) as threads,
        ):
            yield from zip(cases, threads.map(lambda case: _load_and_ask(client, case), cases), strict=True)
    finally:
        service.stop()


def _load_and_ask(client: Client, case: Case) -> Outcome:
    try:
        client.load(case.served_name)
    except GraphkilnError as error:
        return Outcome.of(Verdict.REFUSED if _REFUSED in str(error) else Verdict.FAILS, error)
    try:
        model = client.model(case.served_name)
        ranks = ranks_of(model.metadata["inputs"])
        outcome = _compare(case, lambda feeds: to_values(case, model.infer(to_tensors(feeds, ranks))), GraphkilnError)
        client.unload(case.served_name)
    except GraphkilnError as error:
        return Outcome.of(Verdict.FAILS, error)
    return outcome
