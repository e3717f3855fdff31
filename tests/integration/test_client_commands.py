"""The client's view of a server's models, and the commands `models` and `infer`, over HTTP and gRPC."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zoo
from running import COMMAND, Server, Serving, StartServer, run_command, run_here, settled

from graphkiln_backend.graph.errors import ProtocolError, ServerError
from graphkiln_client import Client, ServedModel

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def partly(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Server with two models, one of which is broken."""
    store = tmp_path_factory.mktemp("partly")
    shutil.copytree(digits, store / "digits")
    (store / "broken" / "1").mkdir(parents=True)
    (store / "broken" / "1" / "model.onnx").write_bytes(b"nonsense")
    with Serving(tmp_path_factory.mktemp("server"), "--model-store", store, "--exit-on-error=false") as running:
        running.wait_until(lambda: running.status("/v2/health/live") == 200)
        running.wait_until(lambda: "serving HTTP" in running.log)
        yield running


@pytest.fixture(params=["http", "grpc"])
def url(server: Server, request: pytest.FixtureRequest) -> str:
    return server.url if request.param == "http" else server.grpc_url


class TestModels:
    def test_versions_and_states(self, url: str) -> None:
        with Client(url) as client:
            (digits,) = client.models()
        assert digits == ServedModel(name="digits", version="1", state="READY", reason="")
        assert digits.ready

    def test_command(self, url: str) -> None:
        shown = run_command("models", "--url", url)
        assert shown.returncode == 0
        assert "digits" in shown.stdout
        assert "READY" in shown.stdout
        assert json.loads(run_here("models", "--url", url, "--json").stdout)[0]["name"] == "digits"

    def test_failed_model_has_a_reason(self, partly: Server) -> None:
        assert partly.status("/v2/health/ready") != 200
        assert partly.status("/v2/models/digits/ready") == 200
        shown = run_here("models", "--url", partly.url)
        assert shown.returncode == 1
        assert "UNAVAILABLE" in shown.stdout
        with Client(partly.grpc_url) as client:
            broken, working = client.models()
        assert "is not an ONNX graph" in broken.reason
        assert working.ready

    def test_load_and_unload_in_explicit_mode(self, start_server: StartServer, tmp_path: Path) -> None:
        store = tmp_path / "store"
        zoo.add(store, "plain", zoo.identity(("n", 3), 1))
        server = start_server("--model-store", store, "--model-control-mode=explicit")
        server.wait_until(lambda: server.status("/v2/health/live") == 200)
        with Client(server.url) as first, Client(server.grpc_url) as second:
            assert not first.models()[0].ready
            first.load("plain")
            assert second.models()[0].ready
            second.unload("plain")
            server.wait_until(lambda: not first.models()[0].ready, timeout_s=20)
            for client in (first, second):
                with pytest.raises(ServerError, match="nonesuch"):
                    client.load("nonesuch")

    def test_reload_without_explicit_mode(self, url: str) -> None:
        with Client(url) as client:
            client.load("digits")
            assert any(model.ready for model in client.models() if model.name == "digits")

    def test_row_without_model_name_is_a_protocol_error(self) -> None:
        with pytest.raises(ProtocolError, match="has no model name"):
            ServedModel.parse({"version": "1"})


def test_statistics_are_numbers(server: Server) -> None:
    found = []
    for address in (server.url, server.grpc_url):
        with Client(address) as client:
            model = client.model("digits")
            model.infer({"INPUT_0": np.zeros((1, 1, 32, 32), np.float32)})
            found.append(settled(model))
    for statistics in found:
        assert statistics["inference_count"] >= 1
        assert statistics["inference_stats"]["compute_infer"]["ns"] > 0
        assert (statistics["name"], statistics["version"]) == ("digits", "1")


class TestInfer:
    @pytest.fixture
    def sample(self, tmp_path: Path) -> Path:
        path = tmp_path / "sample.npy"
        np.save(path, np.random.default_rng(1).normal(size=(2, 1, 32, 32)).astype(np.float32))
        return path

    def test_outputs_in_files(self, url: str, sample: Path, tmp_path: Path) -> None:
        shown = run_here(
            "infer", "--model", "digits", "--input", f"INPUT_0={sample}", "--output-dir", tmp_path / "out", "--url", url
        )
        assert shown.returncode == 0, shown.stderr
        scores = np.load(tmp_path / "out" / "OUTPUT_0.npy")
        with Client(url) as client:
            np.testing.assert_allclose(scores, client.model("digits").infer({"INPUT_0": np.load(sample)})["OUTPUT_0"])

    def test_printed_outputs(self, url: str, sample: Path) -> None:
        command = [*COMMAND, "infer", "--model", "digits", "--input", "INPUT_0=-", "--url", url]
        text = subprocess.run(command, input=sample.read_bytes(), capture_output=True, check=True).stdout.decode()
        assert "OUTPUT_0: float32[2, 10]" in text
        shown = run_here("infer", "--model", "digits", "--input", f"INPUT_0={sample}", "--url", url, "--json")
        document = json.loads(shown.stdout)["OUTPUT_0"]
        assert document["shape"] == [2, 10]
        assert np.shape(document["data"]) == (2, 10)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--input", "OTHER={sample}"], "OTHER"),
            (["--input", "INPUT_0={sample}", "--output", "OTHER"], "OTHER"),
            (["--input", "INPUT_0={sample}", "--version", "7"], "7"),
        ],
    )
    def test_mistakes(self, url: str, sample: Path, repository: Path, arguments: list[str], words: str) -> None:
        shown = run_here(
            "infer",
            "--model",
            "digits",
            *(text.format(sample=sample) for text in arguments),
            "--url",
            url,
            cwd=repository,
        )
        assert shown.returncode in (1, 2)
        assert words in shown.stderr
        assert "Traceback" not in shown.stderr


class TestClassifyCommand:
    def test_csv_has_one_row_per_label(self, url: str, repository: Path) -> None:
        shown = run_here("classify", repository / "docs/digits", "--model=digits", "--url", url, "--top-k=2", "--csv")
        rows = list(csv.DictReader(shown.stdout.splitlines()))
        assert len(rows) == 10
        assert all(Path(row["source"]).stem == row["label"] for row in rows if row["rank"] == "1")
        assert {row["output"] for row in rows} == {"OUTPUT_0"}

    def test_softmax(self, url: str, repository: Path) -> None:
        command = ("classify", repository / "docs/digits/four.png", "--model=digits", "--url", url, "--json")
        (result,) = json.loads(run_here(*command, "--softmax", "--top-k=10").stdout)
        assert sum(answer["score"] for answer in result["classifications"]) == pytest.approx(1)

    def test_headers(self, url: str, repository: Path) -> None:
        command = ("classify", repository / "docs/digits/four.png", "--model=digits", "--url", url)
        assert run_here(*command, "--header", "Authorization: Bearer token").returncode == 0
        wrong = run_here(*command, "--header", "token")
        assert (wrong.returncode, wrong.stderr[:42]) == (2, "graphkiln: --header: expected NAME:TEXT (f")


class TestHealthCommand:
    def test_json(self, url: str) -> None:
        shown = run_here("health", "--url", url, "--json")
        document = json.loads(shown.stdout)
        assert (shown.returncode, document["live"], document["ready"], document["not_ready"]) == (0, True, True, [])
        assert document["server"].startswith("triton ")

    def test_model_that_is_not_ready(self, partly: Server) -> None:
        shown = run_here("health", "--url", partly.url)
        assert shown.returncode == 1
        assert "broken 1 is UNAVAILABLE" in shown.stderr


@pytest.mark.wide
class TestBench:
    def test_json(self, url: str) -> None:
        shown = run_command(
            "bench", "--model=digits", "--url", url, "--concurrency=1,2", "--duration=1", "--warmup=0.2", "--json"
        )
        assert shown.returncode == 0, shown.stderr
        one, two = json.loads(shown.stdout)
        assert (one["load"], two["load"]) == ("1", "2")
        for row in (one, two):
            assert row["client"]["answered"] > 5
            assert set(row["client"]["latency_ms"]) == {"p50", "p90", "p99", "p99.9", "mean"}
            assert row["client"]["errors"] == {}
            assert set(row["server_us"]) == {"queue", "input", "infer", "output"}
            assert row["server_us"]["infer"] > 0
            assert row["batch"] >= 1
            assert row["server_cores"] > 0

    @pytest.mark.parametrize("extra", [(), ("--rate=50",), ("--shared-memory",), ("--input=docs/digits/four.png",)])
    def test_table(self, url: str, repository: Path, extra: tuple[str, ...]) -> None:
        shown = run_here(
            "bench", "--model=digits", "--url", url, "--duration=0.5", "--warmup=0.2", *extra, cwd=repository
        )
        assert shown.returncode == 0, shown.stderr
        assert "answered/s" in shown.stdout
        assert max(map(len, shown.stdout.splitlines())) <= 80

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("--model=nope",), "'nope' is not found"),
            (("--model=digits", "--input=nowhere.png"), "there is no file nowhere.png"),
        ],
    )
    def test_mistakes(self, url: str, arguments: tuple[str, ...], words: str) -> None:
        shown = run_here("bench", "--url", url, *arguments)
        assert (shown.returncode, shown.stderr.count("\n")) == (2, 1)
        assert words in shown.stderr

    def test_failed_requests_are_exit_code_1(self, start_server: StartServer, slow_store: Path) -> None:
        server = start_server("--model-store", slow_store)
        server.wait_ready()
        np.save(slow_store / "rounds.npy", np.array([[20_000]]))
        rounds = f"--input=ROUNDS={slow_store / 'rounds.npy'}"
        shown = run_here("bench", "--model=slow", "--url", server.url, rounds, "--duration=1", "--timeout=0.3")
        assert shown.returncode == 1
        assert "within 0.3 s" in shown.stderr


def test_shell_completion() -> None:
    environment = {"_GRAPHKILN_COMPLETE": "complete_bash", "COMP_WORDS": "graphkiln cla", "COMP_CWORD": "1"}
    command = Path(sys.executable).parent / "graphkiln"
    shown = subprocess.run(
        [command], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
    )
    assert shown.stdout.split() == ["classify"]
