"""From an image to labeled answers: library and command, HTTP and gRPC, real server."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
from PIL import Image
from running import Server, free_ports, run_command, run_here

from graphkiln_backend.graph.errors import ConnectionFailed, InvalidInput, ModelNotFound
from graphkiln_backend.images.decoding import load_sample
from graphkiln_client import Client

pytestmark = pytest.mark.server

LABELS = {"three": 3, "four": 4, "seven": 7, "eight": 8, "nine": 9}


@pytest.fixture(params=["http", "grpc"])
def url(server: Server, request: pytest.FixtureRequest) -> str:
    return server.url if request.param == "http" else server.grpc_url


@pytest.fixture
def samples(repository: Path) -> list[Path]:
    return sorted((repository / "docs" / "digits").glob("*.png"))


def test_every_sample_digit_is_recognized(url: str, samples: list[Path]) -> None:
    assert {sample.stem for sample in samples} == set(LABELS)
    with Client(url) as client:
        model = client.model("digits")
        for sample in samples:
            result = model.classify(sample, top_k=3)
            assert (result.top.label, result.top.index) == (sample.stem, LABELS[sample.stem])
            assert len(result.classifications) == 3
            scores = [answer.score for answer in result.classifications]
            assert scores == sorted(scores, reverse=True)
            assert (result.model, result.version, result.source) == ("digits", "1", str(sample))
            assert result.latency_ms > 0


def test_scores_equal_a_bare_session(url: str, samples: list[Path], digits: Path) -> None:
    """Compare the served scores with a bare ONNX Runtime session on the same pixels."""
    import onnxruntime

    session = onnxruntime.InferenceSession(digits / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    with Client(url) as client:
        model = client.model("digits")
        for sample in samples:
            tensor = load_sample(sample, model.preprocess)[np.newaxis]
            expected = session.run(None, {"INPUT_0": tensor})[0]
            np.testing.assert_allclose(model.infer({"INPUT_0": tensor})["OUTPUT_0"], expected, rtol=1e-5, atol=1e-7)
            answers = model.classify(sample, top_k=10).classifications
            for answer in answers:
                assert answer.score == pytest.approx(float(expected[0, answer.index]), abs=1e-5)


def test_every_type_of_image_argument_gives_the_same_answer(url: str, samples: list[Path]) -> None:
    path = samples[0]
    image = Image.open(path)
    forms = [path, str(path), path.read_bytes(), image, np.asarray(image), np.asarray(image.convert("RGB"))]
    with Client(url) as client:
        model = client.model("digits")
        answers = {tuple(model.classify(form).classifications) for form in forms}  # type: ignore[arg-type]
    assert len(answers) == 1


def test_many_images_keep_order_with_errors_in_place(url: str, samples: list[Path], tmp_path: Path) -> None:
    text = tmp_path / "text.png"
    text.write_text("not an image")
    mixed = [*samples, text, *samples]
    with Client(url) as client:
        outcomes = list(client.model("digits").classify_many(mixed, on_error="return"))
    assert [getattr(o, "source", "error") for o in outcomes] == [*map(str, samples), "error", *map(str, samples)]
    assert isinstance(outcomes[len(samples)], InvalidInput)


def test_unmodified_tritonclient_gets_labels(server: Server, samples: list[Path]) -> None:
    with Client(server.url) as client:
        tensor = load_sample(samples[0], client.model("digits").preprocess)[np.newaxis]
    with tritonclient.grpc.InferenceServerClient(server.grpc_url.removeprefix("grpc://")) as plain:
        tensor_in = tritonclient.grpc.InferInput("INPUT_0", tensor.shape, "FP32")
        tensor_in.set_data_from_numpy(tensor)
        wanted = tritonclient.grpc.InferRequestedOutput("OUTPUT_0", class_count=1)
        answer = plain.infer("digits", [tensor_in], outputs=[wanted]).as_numpy("OUTPUT_0")
    assert answer.ravel()[0].decode().split(":")[1:] == ["8", "eight"]


def test_an_unknown_model_is_not_found(url: str, samples: list[Path]) -> None:
    with Client(url) as client, pytest.raises(ModelNotFound, match="nope"):
        client.model("nope").classify(samples[0])


def test_an_unknown_version_is_not_found(url: str, samples: list[Path]) -> None:
    with Client(url) as client, pytest.raises(ModelNotFound, match="digits"):
        client.model("digits", "7").classify(samples[0])


def test_no_server_at_the_address(samples: list[Path]) -> None:
    (port,) = free_ports(1)
    for scheme in ("http", "grpc"):
        with Client(f"{scheme}://127.0.0.1:{port}") as client, pytest.raises(ConnectionFailed, match=str(port)):
            client.model("digits").classify(samples[0])


class TestCommand:
    """`graphkiln classify`."""

    def test_prints_a_table_for_a_folder(self, url: str, repository: Path) -> None:
        finished = run_command("classify", repository / "docs" / "digits", "--model", "digits", "--url", url)
        assert finished.returncode == 0, finished.stderr
        for name in LABELS:
            assert f"{name}.png" in finished.stdout
        assert max(map(len, finished.stdout.splitlines())) <= 80

    def test_prints_json(self, url: str, samples: list[Path]) -> None:
        finished = run_here("classify", *samples, "--model=digits", "--url", url, "--top-k=2", "--json")
        documents = json.loads(finished.stdout)
        assert [Path(d["source"]).stem for d in documents] == [d["classifications"][0]["label"] for d in documents]
        assert all(len(document["classifications"]) == 2 for document in documents)

    def test_bad_image_is_reported_and_others_are_answered(
        self, server: Server, samples: list[Path], tmp_path: Path
    ) -> None:
        truncated = tmp_path / "truncated.png"
        truncated.write_bytes(samples[0].read_bytes()[:300])
        finished = run_here("classify", truncated, samples[0], "--model", "digits", "--url", server.url)
        assert finished.returncode == 1
        assert "eight" in finished.stdout
        assert "truncated.png" in finished.stderr

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("nowhere.png", "--model", "digits"), "there is no file nowhere.png"),
            (("docs/digits", "--model", "nope"), "'nope' is not found"),
            (("backend/graphkiln_backend/graph", "--model", "digits"), "holds no image"),
            (("docs/digits", "--model", "digits", "--url", "ftp://x"), "use http://HOST:PORT"),
        ],
    )
    def test_mistakes_are_one_line_and_code_2(
        self, server: Server, repository: Path, arguments: tuple[str, ...], words: str
    ) -> None:
        finished = run_here("classify", *arguments, cwd=repository, env={"GRAPHKILN_URL": server.url})
        assert finished.returncode == 2, finished.stderr
        assert words in finished.stderr
        assert len(finished.stderr.strip().splitlines()) == 1

    def test_a_top_k_of_zero_is_a_usage_error(self) -> None:
        finished = run_here("classify", "x.png", "--model", "digits", "--top-k", "0")
        assert finished.returncode == 2
        assert "--top-k" in finished.stderr


class TestHealth:
    """`graphkiln health`."""

    def test_ready(self, url: str) -> None:
        finished = run_here("health", "--url", url)
        assert (finished.returncode, finished.stdout) == (0, "ready\n")

    def test_no_server(self) -> None:
        (port,) = free_ports(1)
        finished = run_command("health", "--url", f"http://127.0.0.1:{port}", "--wait", "0.3")
        assert finished.returncode == 1
        assert "cannot reach" in finished.stderr
