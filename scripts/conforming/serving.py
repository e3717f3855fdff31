"""Cases on the real server: loaded in chunks in Triton's explicit mode, asked over HTTP, unloaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from conforming.cases import Case
from conforming.models import ranks_of, to_tensors, to_values, write_model
from conforming.outcome import PASSED, Outcome, Verdict
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_client import Client
from soaking.guard import guarded_folder
from soaking.service import Service

CHUNK = 60  # cases of one server: few enough that a fault of it costs little, many enough that its start does
_AT_ONCE = 4
_LIMIT_S = 300.0
_FLAGS = ("--model-control-mode=explicit", "--disable-auto-complete-config", "--replay-interval=0", "--cache=off")
# What Triton answers where a version cannot be served; all else that keeps a model from loading is a fault.
_REFUSED = "load failed for model"


def ask_served(cases: Sequence[Case], engine: str = "") -> Iterator[tuple[Case, Outcome]]:
    """What the server makes of cases.

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
    """Puts a case into the store; why not, where its configuration cannot be completed."""
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
            yield from zip(cases, threads.map(lambda case: _ask(client, case), cases), strict=True)
    finally:
        service.stop()


def _ask(client: Client, case: Case) -> Outcome:
    try:
        client.load(case.served_name)
    except GraphkilnError as error:
        return Outcome.of(Verdict.REFUSED if _REFUSED in str(error) else Verdict.FAILS, error)
    try:
        outcome = _infer(client, case)
        client.unload(case.served_name)
    except GraphkilnError as error:
        return Outcome.of(Verdict.FAILS, error)
    return outcome


def _infer(client: Client, case: Case) -> Outcome:
    model = client.model(case.served_name)
    ranks = ranks_of(model.metadata["inputs"])
    for sample in range(len(case.samples)):
        outputs = model.infer(to_tensors(case.feeds(sample), ranks))
        if difference := case.difference(sample, to_values(case, outputs)):
            return Outcome.of(Verdict.DIFFERS, difference)
    return PASSED
