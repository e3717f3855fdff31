"""`graphkiln tune` with real servers: results, kills, resuming, `--apply` and the HTML page."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from browsing import CHROMIUM, browse
from running import COMMAND, Server, StartServer
from tune_command import digest, environment, journal, leftovers, measured, processes, temporary, tune

from graphkiln.tuning.apply import Applied, prove, write
from graphkiln.tuning.candidate import Candidate
from graphkiln.tuning.requests import read_requests
from graphkiln.tuning.subject import read_subject, vanishing_cache
from graphkiln_backend.graph.errors import ClientError
from graphkiln_backend.repository.config import read_config
from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

# Options for a search of two candidates.
FEW = ("--only", "spin")


@pytest.fixture
def model(digits: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "it's a store" / "digits"
    shutil.copytree(digits, folder)
    return folder


@pytest.fixture(scope="module")
def found(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The JSON document and the HTML page of a search, whose target is met on a busy machine, too."""
    folder = tmp_path_factory.mktemp("tune")
    model = folder / "models" / "digits"
    shutil.copytree(digits, model)
    before = digest(model)
    page = folder / "page.html"
    done = tune(
        folder, model, "--p99", "2s", "--rate", "60/s", *FEW, "--budget", "150s", "--json", "--html", page,
    )  # fmt: skip
    document = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert digest(model) == before, "the user's files are as they were"
    return document, page.read_text()


class TestFound:
    def test_chosen_configuration(self, found: tuple[dict[str, Any], str]) -> None:
        document, _ = found
        assert document["met"]
        shown = document["promise"]
        assert shown["placed"] == "onnxruntime on cpu in fp32"
        assert shown["throughput"] > 0
        assert shown["memory_mb"] > 30
        assert 0 < shown["client_cores"] < 2
        assert document["requests"] == "golden samples"
        assert document["measurements"] >= 3
        assert shown["rate"] == 60
        assert shown["p99_range_ms"][1] <= 2000
        assert document["spent_s"] <= 150 + 30, "the budget; a start may be slower than the slowest before it"

    def test_excluded_candidates_have_a_reason(self, found: tuple[dict[str, Any], str]) -> None:
        document, _ = found
        assert document["space"]["candidates"] > 1
        assert all(row["lost"] for row in document["rows"] if row["id"] != document["chosen"]["id"])
        assert any(line.startswith("precision int8") for line in document["space"]["left_out"])

    @pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
    @pytest.mark.parametrize("width", [320, 1280])
    def test_page_is_legible_on_phone_and_screen(
        self, found: tuple[dict[str, Any], str], tmp_path: Path, width: int
    ) -> None:
        document, page = found
        shown = browse(page, tmp_path, width, {"marks": "#front .mark", "rows": "#rows tr"})
        assert shown["overflow"] == 0
        assert shown["outside"] == []
        assert shown["marks"] == len([row for row in document["rows"] if row["best"] and row["best"]["p99_ms"]])
        assert shown["rows"] == len(document["rows"]) + 1
        assert shown["smallest"] >= 10, "letters in a plot, in pixels"


def test_impossible_target(model: Path, tmp_path: Path) -> None:
    done = tune(tmp_path, model, "--p99", "10us", "--rate", "20/s", *FEW, "--budget", "20s")
    assert done.returncode == 1, done.stderr
    output = " ".join(done.stdout.split())
    assert "no candidate could be measured" in output

    assert "a session without a server takes" in output


def test_killed_search_is_resumed(model: Path, tmp_path: Path) -> None:
    """The measured server ends with the tuner, and the next search removes its files."""
    words = [str(model), "--p99", "2s", "--rate", "60/s", *FEW, "--budget", "120s", "--json"]
    process = subprocess.Popen(
        [*COMMAND, "tune", *words], env=environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    end = time.monotonic() + 200
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(ValueError):
            if len(measured(journal(tmp_path))) >= 3:
                break
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = measured(journal(tmp_path))
    assert before
    _, alive = psutil.wait_procs(processes(tmp_path), 60)
    assert alive == []
    assert list(temporary(tmp_path).iterdir())

    done = tune(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert "continuing from" in done.stderr
    after = measured(journal(tmp_path))
    assert after[: len(before)] == before
    assert len(set(after)) == len(after), "nothing is measured twice"
    again = tune(tmp_path, *words)
    assert json.loads(again.stdout)["chosen"] == json.loads(done.stdout)["chosen"]
    assert measured(journal(tmp_path)) == after


def test_ctrl_c_leaves_nothing(model: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "tune", str(model), "--p99", "2s", "--rate", "200/s", *FEW, "--budget", "60s"],
        env=environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509 - background runs ignore it
    )  # fmt: skip
    assert process.stderr
    for line in process.stderr:
        if "/s, p99" in line:  # a server runs
            process.send_signal(signal.SIGINT)
            break
    output = process.communicate(timeout=120)[1]
    assert process.returncode == 130, output
    assert "run the same command" in output
    assert leftovers(tmp_path) == []
    assert list(temporary(tmp_path).iterdir()) == []


CHOSEN = Candidate.of(
    {"engine": "onnxruntime", "precision": "fp32", "threads": 1, "spin": False, "instances": 2, "max_batch_size": 8}
)


def apply_chosen(model: Path) -> Applied:
    with vanishing_cache() as cache:
        subject = read_subject(model / "1", cache)
        prove(CHOSEN, subject, read_requests(subject))
        return write(CHOSEN, subject)


def largest_batch(server: Server) -> int:
    """Return max_batch_size of the served model; 0 while it is reloaded."""
    try:
        with Client(server.url, max_retries=0) as client:
            return int(client.model("digits").config["max_batch_size"])
    except ClientError:
        return 0


def run_shell(command: str) -> None:
    """Run a command as if copied from the terminal."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", command], env={**os.environ, "PATH": path}, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_applied_configuration_is_loaded_in_poll_mode(model: Path, start_server: StartServer) -> None:
    server = start_server("--model-store", model.parent, "--model-control-mode=poll", "--repository-poll-secs=1")
    server.wait_ready()
    before = (model / "config.pbtxt").read_text()
    applied = apply_chosen(model)
    server.wait_until(lambda: largest_batch(server) == 8)
    with Client(server.url) as client:
        assert client.model("digits").config["instance_group"][0]["count"] == 2
    run_shell(applied.commands_back[0])
    assert (model / "config.pbtxt").read_text() == before
    server.wait_until(lambda: largest_batch(server) == 32)


FOREIGN = """# of the vision team
platform: "onnxruntime_onnx"
max_batch_size: 16  # as clients send them
dynamic_batching { max_queue_delay_microseconds: 500 }
instance_group [ { count: 1 kind: KIND_CPU } ]  # one is enough
parameters { key: "intra_op_thread_count" value: { string_value: "1" } }
"""


def test_model_of_tritons_cpp_backend(digits: Path, tmp_path: Path) -> None:
    """Requests are generated for a graph without golden samples; the backup keeps the comments."""
    model = tmp_path / "store" / "foreign"
    (model / "1").mkdir(parents=True)
    shutil.copy(digits / "1" / "model.onnx", model / "1")
    (model / "config.pbtxt").write_text(FOREIGN)
    done = tune(
        tmp_path, model, "--p99", "2s", "--rate", "60/s", "--only", "max_queue_delay_us", "--fix", "max_batch_size=8",
        "--fix", "max_queue_delay_us=0", "--budget", "120s", "--apply", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["requests"] == "made up"
    assert found["promise"]["placed"] == "onnxruntime on cpu in fp32"
    written = read_config(model / "config.pbtxt")
    assert (written.platform, written.max_batch_size) == ("onnxruntime_onnx", 8)
    assert written.dynamic_batching.max_queue_delay_microseconds == 0
    assert written.instance_group[0].count == 1
    assert written.parameters["intra_op_thread_count"].string_value == "1"
    assert (model / "config.pbtxt.untuned").read_text() == FOREIGN


def test_int8_graph(model: Path, repository: Path, tmp_path: Path) -> None:
    """Five samples are too few for calibration in production."""
    for image in (repository / "docs" / "digits").glob("*.png"):
        for folder in (tmp_path / "calibration", tmp_path / "judged"):
            folder.mkdir(exist_ok=True)
            shutil.copy(image, folder)
    words = ["--calibration", tmp_path / "calibration", "--samples", tmp_path / "judged", "--fix", "precision=int8"]
    before = digest(model)
    done = tune(tmp_path, model, "--p99", "2s", "--rate", "60/s", *FEW, *words, "--budget", "120s", "--apply", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["chosen"]["configuration"]["precision"] == "int8"
    assert found["promise"]["placed"].startswith("onnxruntime on cpu in int")
    manifest = json.loads((model / "2" / "manifest.json").read_text())
    assert manifest["conversion"]["precision"] == "int8"
    (undo,) = [line.removeprefix("graphkiln:   ") for line in done.stderr.splitlines() if "&& rm -r" in line]
    run_shell(undo)
    assert digest(model) == before


def test_detector(repository: Path, tmp_path: Path) -> None:
    """The number of boxes has another shape in Triton than in the graph."""
    model = repository / "model_repository" / "scenes-detector"
    done = tune(
        tmp_path, model, "--p99", "2s", "--rate", "20/s", *FEW, "--fix", "spin=off", "--budget", "60s", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["promise"]["answers_checked"] > 0
