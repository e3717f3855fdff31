"""The client's view of a server's models, and the commands `models` and `infer`, over HTTP and gRPC."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import zoo
from running import COMMAND, Server, StartServer, run_command

from graphkiln.client import Client, ServedModel
from graphkiln.graph.errors import ModelNotReady, ProtocolError, ServerError

pytestmark = pytest.mark.server


@pytest.fixture(params=["http", "grpc"])
def url(server: Server, request: pytest.FixtureRequest) -> str:
    return server.url if request.param == "http" else server.grpc_url


class TestModels:
    def test_every_version_and_its_state(self, url: str) -> None:
        with Client(url) as client:
            (digits,) = client.models()
        assert digits == ServedModel(name="digits", version="1", state="READY", reason="")
        assert digits.ready

    def test_the_command(self, url: str) -> None:
        shown = run_command("models", "--url", url)
        assert shown.returncode == 0
        assert "digits" in shown.stdout
        assert "READY" in shown.stdout
        assert json.loads(run_command("models", "--url", url, "--json").stdout)[0]["name"] == "digits"

    def test_a_model_that_failed_says_why(self, start_server: StartServer, digits: Path, tmp_path: Path) -> None:
        store = tmp_path / "store"
        shutil.copytree(digits, store / "digits")
        (store / "broken" / "1").mkdir(parents=True)
        (store / "broken" / "1" / "model.onnx").write_bytes(b"nonsense")
        server = start_server("--model-store", store, "--exit-on-error=false")
        server.wait_until(lambda: "serving HTTP" in server.log)
        shown = run_command("models", "--url", server.url)
        assert shown.returncode == 1
        assert "UNAVAILABLE" in shown.stdout
        with Client(server.grpc_url) as client:
            broken, working = client.models()
        assert "is not an ONNX graph" in broken.reason
        assert working.ready

    def test_loads_and_unloads_where_the_server_allows_it(self, start_server: StartServer, tmp_path: Path) -> None:
        store = tmp_path / "store"
        zoo.add(store, "plain", zoo.identity(("n", 3), 1))
        server = start_server("--model-store", store, "--model-control-mode=explicit")
        server.wait_until(lambda: server.status("/v2/health/live") == 200)
        for address in (server.url, server.grpc_url):
            with Client(address) as client:
                assert not client.models()[0].ready
                client.load("plain")
                assert client.models()[0].ready
                client.unload("plain")
                server.wait_until(lambda client=client: not client.models()[0].ready, timeout_s=20)
                with pytest.raises(ServerError, match="nonesuch"):
                    client.load("nonesuch")

    def test_a_server_that_does_not_load_on_demand_says_so(self, url: str) -> None:
        with Client(url) as client, pytest.raises(ModelNotReady, match="is not allowed if polling is enabled"):
            client.load("digits")

    def test_rows_that_name_no_model_break_the_protocol(self) -> None:
        with pytest.raises(ProtocolError, match="names no model"):
            ServedModel.parse({"version": "1"})


def test_statistics_are_numbers_on_both_protocols(server: Server) -> None:
    found = []
    for address in (server.url, server.grpc_url):
        with Client(address) as client:
            model = client.model("digits")
            model.infer({"INPUT_0": np.zeros((1, 1, 32, 32), np.float32)})
            found.append(model.statistics())
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

    def test_answers_go_into_files(self, url: str, sample: Path, tmp_path: Path) -> None:
        shown = run_command(
            "infer", "--model", "digits", "--input", f"INPUT_0={sample}", "--output-dir", tmp_path / "out", "--url", url
        )
        assert shown.returncode == 0, shown.stderr
        scores = np.load(tmp_path / "out" / "OUTPUT_0.npy")
        with Client(url) as client:
            np.testing.assert_allclose(scores, client.model("digits").infer({"INPUT_0": np.load(sample)})["OUTPUT_0"])

    def test_or_onto_the_screen(self, url: str, sample: Path) -> None:
        command = [*COMMAND, "infer", "--model", "digits", "--input", "INPUT_0=-", "--url", url]
        text = subprocess.run(command, input=sample.read_bytes(), capture_output=True, check=True).stdout.decode()
        assert "OUTPUT_0: float32[2, 10]" in text
        shown = run_command("infer", "--model", "digits", "--input", f"INPUT_0={sample}", "--url", url, "--json")
        document = json.loads(shown.stdout)["OUTPUT_0"]
        assert document["shape"] == [2, 10]
        assert np.shape(document["data"]) == (2, 10)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--input", "INPUT_0"], "expected NAME=FILE"),
            (["--input", "INPUT_0=nowhere.npy"], "cannot read nowhere.npy: No such file"),
            (["--input", "INPUT_0=README.md"], "README.md is not an .npy file"),
            (["--input", "OTHER={sample}"], "OTHER"),
            (["--input", "INPUT_0={sample}", "--output", "OTHER"], "OTHER"),
            (["--input", "INPUT_0={sample}", "--version", "7"], "7"),
            (["--input", "INPUT_0={sample}", "--output-dir", "README.md"], "cannot write to README.md"),
        ],
    )
    def test_mistakes_are_one_line(
        self, url: str, sample: Path, repository: Path, arguments: list[str], words: str
    ) -> None:
        shown = run_command(
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

    def test_pickled_code_is_not_run(self, url: str, tmp_path: Path) -> None:
        path = tmp_path / "evil.npy"
        np.save(path, np.array([{"a": 1}], object), allow_pickle=True)
        shown = run_command("infer", "--model", "digits", "--input", f"INPUT_0={path}", "--url", url)
        assert "is not an .npy file of numbers or texts" in shown.stderr
