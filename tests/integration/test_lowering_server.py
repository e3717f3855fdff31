"""Lowering on the server: settings, isolated errors, the cache across starts, the commands."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import zoo
from running import Server, StartServer, run_command, run_here

from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.wide]

CPU_FACTS = Path("/proc/cpuinfo").read_text()
bf16_only = pytest.mark.skipif(
    "avx512_bf16" not in CPU_FACTS and "amx_bf16" not in CPU_FACTS, reason="this CPU does not compute in bf16"
)


@pytest.fixture
def store(digits: Path, tmp_path: Path) -> Path:
    """The example under several names, and a graph without a manifest."""
    for name in ("digits", "first", "second"):
        target = shutil.copytree(digits, tmp_path / "store" / name)
        config = (digits / "config.pbtxt").read_text().replace('name: "digits"', f'name: "{name}"')
        (target / "config.pbtxt").write_text(config)
    return tmp_path / "store"


def add_parameters(model: Path, **parameters: str) -> None:
    lines = (f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items())
    with (model / "config.pbtxt").open("a") as file:
        file.write("\n".join(lines) + "\n")


def row(server: Server, model: str) -> str:
    server.wait_until(lambda: "serving HTTP" in server.log)
    return next(line for line in server.log.splitlines() if re.match(rf"│ {model} ", line))


def answer(server: Server, model: str) -> str:
    with Client(server.url) as client:
        return str(client.model(model).classify("docs/digits/seven.png").top.label)


@bf16_only
def test_settings_of_configuration_and_command_line(start_server: StartServer, store: Path) -> None:
    add_parameters(store / "first", precision="bf16", engine="openvino")
    add_parameters(store / "second", engine="openvino", self_test="off", threads="1")
    server = start_server("--model-store", store, "--set", "digits.precision=bf16", "--set", "second.threads=2")
    server.wait_ready()
    for model, engine, precision in (
        ("digits", "openvino on cpu, 2 threads", "bf16"),
        ("first", "openvino on cpu, 2 threads", "bf16"),
        ("second", "openvino on cpu, 2 threads", "fp32"),
    ):
        assert engine in row(server, model)
        assert precision in row(server, model)
        assert answer(server, model) == "seven"
    metrics = server.metrics()
    products = {name: value for name, value in metrics.items() if name.startswith("graphkiln_products")}
    assert {(re.search('model="(.*?)"', name)[1], re.search('precision="(.*?)"', name)[1]) for name in products} == {  # type: ignore[index]
        ("digits", "bf16"),
        ("first", "bf16"),
        ("second", "fp32"),
    }
    assert set(products.values()) == {5.0}
    assert any(name.startswith("graphkiln_nodes") and 'executor="CPU"' in name for name in metrics)
    errors = {name: value for name, value in metrics.items() if name.startswith("graphkiln_self_test_error")}
    assert [value for name, value in errors.items() if 'model="second"' in name] == [-1.0]
    assert "self_test: off: the golden samples were not replayed" in server.log


FAULTS = {
    "unknown-engine": ({"engine": "onnxrutime"}, "unknown engine 'onnxrutime' (did you mean 'onnxruntime'?)"),
    "unknown-precision": (
        {"precision": "half"},
        "parameters.precision must be fp32, tf32, fp16, bf16, int8, got 'half'",
    ),
    "unknown-key": ({"precison": "bf16"}, "unknown key 'precison' in parameters (did you mean 'precision'?)"),
    "not-here": ({"engine": "tensorrt"}, "tensorrt serves gpu:N, not cpu"),
    "fp16": ({"precision": "fp16", "engine": "onnxruntime"}, "ONNX Runtime computes fp16 graphs in fp32 on a CPU"),
    "int8": ({"precision": "int8"}, "int8 needs samples to calibrate on"),
    "nhwc": ({"layout": "nhwc"}, "parameters.layout nhwc is for GPUs"),
}


def test_faults_are_load_errors_that_do_not_affect_others(start_server: StartServer, store: Path, digits: Path) -> None:
    for name, (parameters, _) in FAULTS.items():
        target = shutil.copytree(digits, store / name)
        text = (digits / "config.pbtxt").read_text().replace('name: "digits"', f'name: "{name}"')
        (target / "config.pbtxt").write_text(text)
        add_parameters(target, **parameters)
    server = start_server("--model-store", store, "--exit-on-error=false")
    server.wait_until(lambda: "serving HTTP" in server.log)
    flat = re.sub(r"\s+", " ", server.log)
    for name, (_, words) in FAULTS.items():
        assert re.sub(r"\s+", " ", words) in flat, name
        assert server.status(f"/v2/models/{name}/ready") != 200
    assert answer(server, "digits") == "seven"


@pytest.mark.slow
def test_model_of_a_missing_backend_does_not_affect_others(start_server: StartServer, store: Path) -> None:
    (store / "first" / "config.pbtxt").write_text('name: "first" backend: "tensorflow"')
    server = start_server("--model-store", store)
    server.wait_until(lambda: "serving HTTP" in server.log)
    assert "unexpected 'platform' and 'backend' pair, got:, tensorflow" in server.log
    others = [path.name for path in store.iterdir() if path.name != "first"]
    assert others
    assert {name: server.status(f"/v2/models/{name}/ready") for name in others} == dict.fromkeys(others, 200)


def test_operator_missing_in_an_engine(start_server: StartServer, tmp_path: Path) -> None:
    graph = zoo.model(
        [zoo.helper.make_node("Frobnicate", ["x"], ["y"], domain="com.example")],
        [zoo.value("x", ("n", 3))],
        [zoo.value("y", ("n", 3))],
    )
    graph.opset_import.append(zoo.helper.make_opsetid("com.example", 1))
    zoo.add(tmp_path / "store", "strange", graph)
    zoo.add(tmp_path / "store", "plain", zoo.identity(("n", 3), 1))
    server = start_server("--model-store", tmp_path / "store", "--exit-on-error=false", "--enable-openvino", "strange")
    server.wait_until(lambda: "serving HTTP" in server.log)
    assert "Frobnicate" in server.log
    assert server.status("/v2/models/strange/ready") != 200
    assert server.status("/v2/models/plain/ready") == 200


def test_fallback_only_on_request_with_log_and_metric(start_server: StartServer, store: Path) -> None:
    flags = ["--set", "digits.engine=tensorrt", "--set", "digits.fallback=openvino:fp32,onnxruntime"]
    server = start_server("--model-store", store, *flags)
    server.wait_ready()
    assert "openvino on cpu" in row(server, "digits")
    assert "tensorrt serves gpu:N, not cpu" in server.log
    falls = {name: value for name, value in server.metrics().items() if name.startswith("graphkiln_fallbacks_total")}
    assert {value for name, value in falls.items() if 'model="digits"' in name} == {1.0}


class TestCache:
    def test_second_start_builds_nothing(self, start_server: StartServer, store: Path, tmp_path: Path) -> None:
        flags = ["--cache", tmp_path / "cache", "--enable-openvino", "digits", "--log-info=true"]
        for compiled in (2, 0):  # two of the three have the same graph and settings: they share what was compiled
            server = start_server("--model-store", store, *flags)
            server.wait_ready()
            assert answer(server, "digits") == "seven"
            logged = [line for line in server.log.splitlines() if "compiling for" in line and "log.py" in line]
            assert len(logged) == compiled
            assert server.stop()[0] == 0

    @pytest.mark.slow
    def test_concurrent_servers_build_each_artifact_once(
        self, start_server: StartServer, store: Path, tmp_path: Path
    ) -> None:
        """As containers of one node: separate temporary folders, one folder of artifacts."""
        flags = ["--cache", tmp_path / "cache", "--enable-openvino", "digits", "--log-info=true"]
        servers = [start_server("--model-store", store, *flags) for _ in range(2)]
        for server in servers:
            server.wait_ready()
            assert answer(server, "digits") == "seven"
        logged = [line for server in servers for line in server.log.splitlines() if "log.py" in line]
        assert len([line for line in logged if "compiling for" in line]) == 2

    def test_lower_fills_the_cache_for_a_read_only_server(
        self, start_server: StartServer, store: Path, tmp_path: Path
    ) -> None:
        cache = tmp_path / "cache"
        for name in ("first", "second"):
            shutil.rmtree(store / name)
        lowered = run_here("lower", store / "digits", "--set", "engine=openvino", "--cache", cache)
        assert lowered.returncode == 0, lowered.stderr
        assert "products: 5 in fp32" in lowered.stdout
        assert "PASS" in lowered.stdout
        server = start_server("--model-store", store, "--cache", cache, "--enable-openvino=digits", "--log-info=true")
        server.wait_ready()
        assert "compiling for" not in server.log

    @pytest.mark.slow
    def test_cache_folder_that_cannot_be_created_is_a_warning(self, start_server: StartServer, store: Path) -> None:
        server = start_server("--model-store", store, "--cache", "/proc/nowhere")
        server.wait_ready()
        assert server.log.count("no artifact cache: /proc/nowhere cannot be written") == 1
        off = start_server("--model-store", store, "--cache", "off")
        off.wait_ready()

    def test_commands(self, store: Path, tmp_path: Path) -> None:
        cache = tmp_path / "cache"
        assert "there is no cache at" in run_here("cache", "list", "--cache", cache).stderr
        run_here("lower", store / "digits", "--cache", cache)
        listed = run_here("cache", "list", "--cache", cache).stdout
        assert "digits/1" in listed
        assert max(map(len, listed.splitlines())) <= 80
        whole = run_here("cache", "verify", "--cache", cache).stdout
        assert re.fullmatch(r"([34]) of \1 entries are whole\n", whole)
        (graph,) = cache.glob("entries/*/optimised.onnx")
        content = bytearray(graph.read_bytes())
        content[len(content) // 2] ^= 1
        graph.write_bytes(content)
        verified = run_here("cache", "verify", "--cache", cache)
        assert verified.returncode == 1
        assert "optimised.onnx is damaged" in verified.stdout
        rebuilt = run_here("lower", store / "digits", "--cache", cache)
        assert "discarded" in rebuilt.stderr
        assert run_here("cache", "verify", "--cache", cache).returncode == 0
        # A graph's hash is an entry, too, once its file is no longer new.
        assert re.match(r"removed ([34]) of \1 entries", run_here("cache", "prune", "--cache", cache).stdout)
        assert "the cache is empty" in run_here("cache", "list", "--cache", cache).stdout
        assert "'x' is not a size" in run_here("cache", "prune", "--to", "x", "--cache", cache).stderr


class TestExplain:
    def test_explain_lists_settings_with_origin_and_what_ran(self, store: Path) -> None:
        add_parameters(store / "digits", engine="openvino", fallback="onnxruntime", xrt="oneflow")
        shown = run_command("explain", store / "digits", "--set", "threads=1")
        assert shown.returncode == 0, shown.stderr
        text = shown.stdout
        assert max(map(len, text.splitlines()[:12])) <= 80
        assert re.search(r"engine +│ openvino +│ parameters.engine", text)
        assert re.search(r"threads +│ 1 +│ --set", text)
        assert "rejected: engine onnxruntime of parameters.xrt: parameters.engine requests openvino" in text
        assert "2. onnxruntime on cpu, 1 threads" in text
        assert "serves: openvino on cpu" in text
        assert "nodes on CPU; products: 5 in fp32" in text
        assert "PASS" in text

    def test_explain_plan_only(self, store: Path) -> None:
        shown = run_here("explain", store / "digits", "--plan-only", "--set", "engine=auto")
        assert "2. openvino on cpu" in shown.stdout
        assert "serves:" not in shown.stdout

    def test_explain_bare_graph(self, store: Path, tmp_path: Path) -> None:
        (tmp_path / "bare" / "m" / "1").mkdir(parents=True)
        shutil.copy(store / "digits" / "1" / "model.onnx", tmp_path / "bare" / "m" / "1")
        shown = run_here("explain", tmp_path / "bare" / "m")
        assert "as saved (fp32)" in shown.stdout
        assert "2 cores" in shown.stdout or os.cpu_count() != 2
        assert "self-test: none" in shown.stdout

    @pytest.mark.parametrize(("backend", "instances"), [("onnxruntime", "2 instances"), ("graphkiln", "1 instance")])
    def test_instances_are_counted_as_in_triton(self, tmp_path: Path, backend: str, instances: str) -> None:
        config = f'backend: "{backend}" instance_group [{{ kind: KIND_CPU }}]'
        zoo.add(tmp_path / "counted", "m", zoo.identity(("n", 3), 1), config)
        shown = run_here("explain", tmp_path / "counted" / "m", "--plan-only")
        assert f"shared by {instances}" in shown.stdout

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["nowhere"], "there is no file or folder nowhere"),
            (["{digits}", "--set", "precision"], "a value is missing"),
            (["{digits}", "--set", "precison=bf16"], "did you mean 'precision'?"),
            (["{digits}", "--set", "precision=int8"], "int8 needs samples to calibrate on"),
            (["{digits}", "--set", "engine=openvine"], "did you mean 'openvino'?"),
        ],
    )
    def test_mistakes(self, store: Path, arguments: list[str], words: str) -> None:
        shown = run_here("explain", *(argument.format(digits=store / "digits") for argument in arguments))
        assert shown.returncode != 0
        assert words in shown.stderr
        assert "Traceback" not in shown.stderr


def test_wrong_flags_of_serve(store: Path) -> None:
    for flags, words in (
        (["--set", "digit.precision=bf16"], "there is no such model"),
        (["--set", "precision=bf16"], "no model is named"),
        (["--set", "digits.precison=bf16"], "did you mean 'precision'?"),
        (["--cache-size", "many"], "'many' is not a size"),
    ):
        finished = run_command("serve", "--model-store", store, *flags)
        assert finished.returncode in (1, 2)
        assert words in finished.stderr
        assert len(finished.stderr.splitlines()) <= 3


def test_engines_agree(start_server: StartServer, store: Path) -> None:
    server = start_server(
        "--model-store",
        store,
        "--enable-openvino",
        "first",
        "--set",
        "second.engine=openvino",
        "--set",
        "second.streams=2",
    )
    server.wait_ready()
    with Client(server.url) as client:
        x = np.random.default_rng(5).normal(size=(6, 1, 32, 32)).astype(np.float32)
        scores = [client.model(name).infer({"INPUT_0": x})["OUTPUT_0"] for name in ("digits", "first", "second")]
    np.testing.assert_allclose(scores[1], scores[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(scores[2], scores[0], rtol=1e-4, atol=1e-6)
