"""Versions of another backend are proven through the server: only right ones answer, whatever the others do."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
import stand_in
from factors import factor
from running import Server, StartServer
from waiting import wait_until

from graphkiln_backend.graph.errors import ClientError
from graphkiln_client import Client

pytestmark = pytest.mark.server

POLL = ("--model-control-mode=poll", "--repository-poll-secs=1")
NOT_INSTALLED = stand_in.CONFIG.replace('"python"', '"tensorrt"')


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def processes(server: Server) -> list[psutil.Process]:
    """All processes of a server, also of one that was killed."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(server.temporary) in process.environ().get("TMPDIR", ""):
                found.append(process)
        except psutil.Error:
            continue
    return found


def check_nothing_is_left_of_proofs(server: Server) -> None:
    """No process, no folder, no shared memory of a proof that has ended."""
    (run,) = server.temporary.glob("graphkiln-*")
    assert list((run / "tmp").glob("proof-*")) == []
    assert list(Path("/dev/shm").glob(f"*{run.name}-proof-*")) == []
    servers = [child for child in psutil.Process(server.process.pid).children() if child.name() == "tritonserver"]
    assert len(servers) == 1


def refused(server: Server, model: str, version: int, words: str) -> bool:
    lines = [line for line in server.log.splitlines() if f"{model} version {version} is not served: " in line]
    assert all(words in line for line in lines), lines
    return bool(lines)


def replays(server: Server, model: str) -> float:
    name = "graphkiln_self_test_replays_total"
    return sum(value for key, value in server.metrics().items() if key.startswith(name) and f'model="{model}"' in key)


def kill_triton(server: Server) -> None:
    for child in psutil.Process(server.process.pid).children():
        if child.name() == "tritonserver":
            child.kill()


def test_only_right_versions_answer(start_server: StartServer, store: Path) -> None:
    """At the start, of what comes while it serves, and after its end; each refusal has its reason."""
    stand_in.add(store, "good")
    stand_in.add(store, "swap", 1, config=f"{stand_in.CONFIG}{stand_in.TWO_INSTANCES}")
    stand_in.add(store, "swap", 2, run=stand_in.FAULTY_RUNS["wrong in a batch"])
    stand_in.add(store, "bare", proven=False, run="y = x * 7")
    server = start_server("--model-store", store, *POLL)
    server.wait_until(lambda: "serving HTTP" in server.log)
    assert (factor(server, "good"), factor(server), factor(server, "bare")) == (2, 2, 7)
    assert refused(server, "swap", 2, "the outputs changed")
    assert "unproven" in server.log
    check_nothing_is_left_of_proofs(server)

    stand_in.publish(store, "swap", 3, run=stand_in.FAULTY_RUNS["server dies"])
    server.wait_until(lambda: refused(server, "swap", 3, "it ended the server that proved it"), timeout_s=60)
    assert factor(server) == 2
    check_nothing_is_left_of_proofs(server)

    stand_in.publish(store, "swap", 4)
    server.wait_until(lambda: server.status("/v2/models/swap/versions/4/ready") == 200, timeout_s=60)
    server.wait_until(lambda: server.status("/v2/models/swap/versions/1/ready") != 200, timeout_s=60)
    assert factor(server) == 2
    check_nothing_is_left_of_proofs(server)

    kill_triton(server)
    server.wait_until(lambda: server.log.count("serving HTTP") == 2)
    assert (factor(server, "good"), factor(server)) == (2, 2)
    assert server.stop()[0] == 0
    assert processes(server) == []


def test_a_version_that_turns_wrong_gives_way(start_server: StartServer, store: Path, tmp_path: Path) -> None:
    mark = tmp_path / "wrong from now on"
    turning = f"y = x * (3 if os.path.exists({str(mark)!r}) else 2)"
    stand_in.add(store, "swap", 1)
    # Right for the first sample: a start asks that one, and the others once it serves.
    stand_in.add(store, "swap", 2, run=f"y = x * np.where((x[:, :1] < 0) & os.path.exists({str(mark)!r}), 3, 2)")
    stand_in.add(store, "alone", 1, run=turning)
    server = start_server("--model-store", store, "--replay-interval", "1")
    server.wait_ready()
    time.sleep(2.5)  # two replays
    assert "restarting" not in server.log
    mark.touch()
    assert factor(server, "alone") == 3
    server.wait_until(lambda: "computes wrong outputs: " in server.log, timeout_s=60)
    server.wait_until(lambda: server.log.count("serving HTTP") == 2)
    assert refused(server, "swap", 2, "the outputs changed")
    assert refused(server, "alone", 1, "the outputs changed")
    assert (factor(server), factor(server, "alone")) == (2, 0)
    restarts = 'graphkiln_restarts_total{cause="wrong_outputs"}'
    assert server.metrics().get(restarts, 1) == 1


@pytest.mark.slow
def test_every_planted_fault_is_refused_at_the_start(start_server: StartServer, store: Path) -> None:
    words = {
        "wrong": "relative L2 0.005",
        "wrong in a batch": "the outputs changed",
        "constant": "the outputs changed",
        "nan": "NaN",
        "other shape": "float32[4, 2]",
        "other dtype": "float64[4, 3]",
        "rows swapped": "batch sizes 1, 8",
        "raises": "cannot compute this",
        "instance dies": "not healthy",
        "server dies": "it ended the server that proved it",
        "raises at load": "RuntimeError: cannot load this",
        "dies at load": "not healthy",
    }
    for fault, code in {**stand_in.FAULTY_RUNS, **stand_in.FAULTY_LOADS}.items():
        name = fault.replace(" ", "_")
        stand_in.add(store, name, 1)
        stand_in.add(store, name, 2, **{"load" if fault in stand_in.FAULTY_LOADS else "run": code})
    x = stand_in.doubled().inputs["x"]
    stand_in.add(store, "undecided", 1)
    stand_in.add(store, "undecided", 2, run="y = x * 0 + 1", golden=stand_in.golden_of({"x": x}, {"y": x * 0 + 1}))
    stand_in.add(store, "uninstalled", config=NOT_INSTALLED)
    stand_in.add(store, "many", golden=stand_in.doubled(20))  # more samples than a batch
    stand_in.add(store, "slow", run=stand_in.SLOW)
    server = start_server("--model-store", store)
    server.wait_until(lambda: "serving HTTP" in server.log)
    for fault, text in words.items():
        name = fault.replace(" ", "_")
        assert refused(server, name, 2, text), fault
        assert factor(server, name) == 2, fault
    assert refused(server, "undecided", 2, "the samples prove nothing")
    assert refused(server, "uninstalled", 1, "unable to find backend library for backend 'tensorrt'")
    assert (factor(server, "many"), factor(server, "slow")) == (2, 2)


@pytest.mark.slow
def test_explicit_mode(start_server: StartServer, store: Path) -> None:
    stand_in.add(store, "swap", 1)
    stand_in.add(store, "swap", 2, run=stand_in.FAULTY_RUNS["wrong"])
    server = start_server(
        "--model-store", store, "--model-control-mode=explicit", "--load-model=swap", "--replay-interval", "1"
    )
    server.wait_until(lambda: "serving HTTP" in server.log)
    assert refused(server, "swap", 2, "the outputs changed")
    assert factor(server) == 2
    with Client(server.url, timeout_s=60) as client:
        stand_in.publish(store, "late", 1, run=stand_in.FAULTY_RUNS["wrong"])
        client.load("late")
        server.wait_until(lambda: factor(server, "late") == 0, timeout_s=60)
        assert refused(server, "late", 1, "the outputs changed")
        stand_in.publish(store, "late", 2)
        client.load("late")
        assert factor(server, "late") == 2
        stand_in.publish(store, "late", 3, run=stand_in.FAULTY_RUNS["raises"])
        client.load("late")
        server.wait_until(lambda: factor(server, "late") == 2, timeout_s=60)
        client.unload("late")
        time.sleep(3)  # replays go on with what serves
        folder = stand_in.publish(store, "place", 1)
        client.load("place")
        server.wait_until(lambda: replays(server, "place") > 0, timeout_s=60)
        model, x = client.model("place"), np.ones((1, 3), np.float32)
        for _ in range(500):  # more than the next version answers until it is looked at
            model.infer({"x": x})
        time.sleep(3)
        stand_in.write_model(folder, run=stand_in.FAULTY_RUNS["wrong"])
        client.load("place")
        server.wait_until(lambda: factor(server, "place") == 0, timeout_s=60)
    assert "restarting" not in server.log
    assert factor(server) == 2


@pytest.mark.slow
def test_no_request_is_lost_while_a_wrong_version_arrives(start_server: StartServer, store: Path) -> None:
    stand_in.add(store, "swap", 1, config=f"{stand_in.CONFIG}{stand_in.TWO_INSTANCES}")
    server = start_server("--model-store", store, *POLL)
    server.wait_ready()
    seen: Counter[str] = Counter()
    lock, requests, threads = threading.Lock(), 20_000, 4

    def ask() -> None:
        mine: Counter[str] = Counter()
        x = np.ones((1, 3), np.float32)
        with Client(server.url, max_retries=0, timeout_s=60) as client:
            model = client.model("swap")
            while sum(seen.values()) < requests:
                for _ in range(100):
                    try:
                        result = model.infer({"x": x})
                        mine[str(float(result["y"][0, 0]))] += 1
                    except ClientError as error:
                        mine[str(error)] += 1
                with lock:
                    seen.update(mine)
                mine.clear()

    callers = [threading.Thread(target=ask) for _ in range(threads)]
    for caller in callers:
        caller.start()
    faults = ("wrong", "server dies", "instance dies", "raises")
    for version, fault in enumerate(faults, 2):
        stand_in.publish(store, "swap", version, run=stand_in.FAULTY_RUNS[fault])
        server.wait_until(lambda version=version: refused(server, "swap", version, ""), timeout_s=120)
    for caller in callers:
        caller.join()
    assert sum(seen.values()) >= requests
    assert seen.keys() == {"2.0"}


@pytest.mark.slow
def test_files_that_change_while_they_are_proven(start_server: StartServer, store: Path) -> None:
    stand_in.add(store, "swap", 1)
    server = start_server("--model-store", store, *POLL, "--replay-interval", "1")
    server.wait_ready()
    folder = stand_in.publish(store, "swap", 2, load="time.sleep(5)")
    server.wait_until(lambda: bool(list(server.temporary.glob("graphkiln-*/tmp/proof-*"))), timeout_s=60)
    other = stand_in.add(store.with_name("other"), "swap", 2, run="y = x * 2  # other code")
    for path in other.iterdir():
        shutil.copy2(path, folder / path.name)
    server.wait_until(lambda: "swap version 2 has changed while it was proven" in server.log, timeout_s=60)
    server.wait_until(lambda: server.status("/v2/models/swap/versions/2/ready") == 200, timeout_s=60)
    server.wait_until(lambda: server.status("/v2/models/swap/versions/1/ready") != 200, timeout_s=60)
    assert not refused(server, "swap", 2, "")
    # While it serves, its files are replaced by wrong ones: what was loaded serves on, and is no fault.
    stand_in.write_model(folder, run=stand_in.FAULTY_RUNS["wrong"])
    stand_in.adopt(folder, stand_in.doubled(), stand_in.signature_of(stand_in.doubled()))
    server.wait_until(lambda: refused(server, "swap", 2, "the outputs changed"), timeout_s=60)
    assert factor(server) == 2
    assert "restarting" not in server.log


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["load", "run"])
def test_a_version_that_hangs_takes_no_other_with_it(start_server: StartServer, store: Path, moment: str) -> None:
    stand_in.add(store, "good")
    stand_in.add(store, "hangs", **{moment: f"{stand_in.HANGS}\ny = x" if moment == "run" else stand_in.HANGS})
    server = start_server("--model-store", store, "--load-deadline=10")
    server.wait_until(lambda: "serving HTTP" in server.log)
    assert refused(server, "hangs", 1, "its proof did not finish within 10 s")
    assert factor(server, "good") == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("mode", ["none", "poll"])
def test_an_end_during_a_proof_leaves_nothing(
    start_server: StartServer, store: Path, number: signal.Signals, mode: str
) -> None:
    stand_in.add(store, "good")
    if mode == "none":
        stand_in.add(store, "hangs", load=stand_in.HANGS)
    server = start_server("--model-store", store, *(POLL if mode == "poll" else ()))
    if mode == "poll":
        server.wait_ready()
        stand_in.publish(store, "hangs", 1, run=f"{stand_in.HANGS}\ny = x")
    server.wait_until(lambda: bool(list(server.temporary.glob("graphkiln-*/tmp/proof-*/models/hangs"))), timeout_s=60)
    time.sleep(2)  # the model hangs
    assert processes(server)
    code, seconds = server.stop(number)
    assert code == (0 if number == signal.SIGTERM else -number)
    assert seconds < 10
    wait_until(lambda: not processes(server))
    if number == signal.SIGKILL:  # the next start removes the folder
        from graphkiln_backend.server.run_folder import remove_leftovers

        assert remove_leftovers([server.temporary])
    assert list(server.temporary.iterdir()) == []
