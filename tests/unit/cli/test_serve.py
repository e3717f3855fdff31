"""`graphkiln serve`: arguments of the supervisor, output, and mistakes reported before the start."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from commands import Finished, RunVerb, table_rows, words
from running import free_ports
from statuses import instance_status

from graphkiln.cli import serve as module
from graphkiln.cli.options import open_stores
from graphkiln.cli.serve import LoadDisplay, log_states
from graphkiln.page import launch
from graphkiln_backend.graph import modules
from graphkiln_backend.lowering.settings import Override
from graphkiln_backend.server import installation as finding
from graphkiln_backend.server import supervisor as supervising
from graphkiln_backend.server.flags import ListenAddress
from graphkiln_backend.server.installation import Installation
from graphkiln_backend.server.launch import Launch
from graphkiln_backend.server.model_states import LoadProgress, ModelState
from graphkiln_backend.system.admin_key import HTTP_HEADER, find_key
from graphkiln_backend.triton.environment import LOG_FORMAT_VARIABLE, RecordSettings

PORTS = ("http-port", "grpc-port", "metrics-port")
FLAGS = dict.fromkeys((*PORTS, "http-address", "allow-metrics", "model-repository", "log-verbose", "log-format"), True)
Serve = Callable[..., Finished]


class FakeSupervisor:
    """Report `states` and return `code` without a server."""

    def __init__(self) -> None:
        self.started: Launch | None = None
        self.states: list[ModelState] = []
        self.found_key = ""
        self.last_words = ""
        self.metrics: ListenAddress | None = None
        self.code = 0

    def __call__(
        self,
        launch: Launch,
        *,
        on_live: Callable[[list[ModelState]], None],
        metrics: ListenAddress | None,
        **_: object,
    ) -> FakeSupervisor:
        self.started, self._on_live, self.metrics = launch, on_live, metrics
        return self

    @property
    def launch(self) -> Launch:
        assert self.started is not None
        return self.started

    def run(self) -> int:
        self._on_live(self.states)
        if address := self.launch.flags.listen_address("http"):
            self.found_key = find_key("localhost", address.port)
        return self.code


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeSupervisor:
    """A fake supervisor, and an installation with known flags."""
    installation = Installation(binary=tmp_path, backends=tmp_path, caches=tmp_path, stub=tmp_path, libraries=())
    vars(installation).update(flags=FLAGS, _help=None)
    monkeypatch.setattr(finding, "find_installation", lambda: installation)
    fake = FakeSupervisor()
    monkeypatch.setattr(supervising, "Supervisor", fake)
    for name in ("GRAPHKILN_MODEL_STORE", "GRAPHKILN_HOST", "GRAPHKILN_ADMIN_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return fake


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of models: one without a version, one without a configuration, one whose name is a number."""
    for file in ("resnet/labels.txt", "digits/1/x", "digits/config.pbtxt", "bare/1/model.onnx", "7/1/model.onnx"):
        (tmp_path / "store" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "store" / file).touch()
    return tmp_path / "store"


def port_flags() -> list[str]:
    return [f"--{flag}={port}" for flag, port in zip(PORTS, free_ports(3), strict=True)]


@pytest.fixture
def serve(run: RunVerb, supervisor: FakeSupervisor, store: Path) -> Serve:
    """Run `graphkiln serve` with the store and free ports."""
    assert supervisor.started is None
    return lambda *words: run("serve", "--model-store", store, *port_flags(), *words)


class TestStores:
    def test_all_flags_name_stores(self, serve: Serve, supervisor: FakeSupervisor, store: Path, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        assert serve(f"--model-repository={tmp_path / 'empty'}").code == 0
        assert supervisor.launch.stores == [store, tmp_path / "empty"]

    @pytest.mark.parametrize("path", ["bare", "bare/1", "bare/1/model.onnx", "7", "7/1", "digits"])
    def test_one_model_of_a_store(self, run: RunVerb, supervisor: FakeSupervisor, store: Path, path: str) -> None:
        name = path.partition("/")[0]
        assert run("serve", store / path, *port_flags(), "--set", f"{name}.threads=1").code == 0
        (chosen,) = supervisor.launch.stores
        assert not chosen.exists()
        assert list(supervisor.launch.overrides) == [name]

    def test_models_and_stores_are_linked_together(
        self, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(store / "bare")
        with open_stores([Path(), tmp_path / "other", store / "7", store / "7"]) as (first, second):
            assert first == tmp_path / "other"
            links = {entry.name: entry.resolve() for entry in second.iterdir()}
            assert links == {"bare": store / "bare", "7": store / "7"}
        assert (store / "bare").exists()

    def test_store_of_the_working_folder_or_environment(
        self, run: RunVerb, supervisor: FakeSupervisor, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "model_repository").mkdir()
        monkeypatch.chdir(tmp_path)
        assert run("serve", *port_flags()).code == 0
        assert supervisor.launch.stores == [Path("model_repository")]
        monkeypatch.setenv("GRAPHKILN_MODEL_STORE", str(store))
        assert run("serve", *port_flags()).code == 0
        assert supervisor.launch.stores == [store]


class TestOpenVinoModelServer:
    @pytest.fixture
    def listed(self, store: Path, tmp_path: Path) -> Callable[..., Path]:
        """Write a `config.json` with the model `bare`, named `one`, and a `plugin_config`."""

        def write(**plugin_config: object) -> Path:
            model = {"name": "one", "base_path": str(store / "bare"), "nireq": 2, "plugin_config": plugin_config}
            (tmp_path / "listed").mkdir(exist_ok=True)
            text = json.dumps({"model_config_list": [{"config": model}]})
            (tmp_path / "listed" / "config.json").write_text(text)
            return tmp_path / "listed"

        return write

    def test_models_are_linked_and_their_properties_are_settings(
        self, run: RunVerb, supervisor: FakeSupervisor, listed: Callable[..., Path]
    ) -> None:
        place = listed(INFERENCE_NUM_THREADS=3, PERFORMANCE_HINT="LATENCY")
        finished = run("serve", place, *port_flags(), "--set", "one.threads=1")
        assert finished.code == 0, finished.err
        assert [(each.key, each.value) for each in supervisor.launch.overrides["one"]] == [
            ("threads", "1"),
            ("threads", "3"),
        ]
        assert "nireq has no effect" in finished.err
        assert "PERFORMANCE_HINT LATENCY has no effect" in finished.err
        (linked,) = supervisor.launch.stores
        assert linked not in (place, place / "config.json")

    def test_links_lead_to_the_models(self, store: Path, listed: Callable[..., Path]) -> None:
        with open_stores([listed(), store]) as (plain, linked):
            assert plain == store
            assert [path.resolve() for path in linked.iterdir()] == [store / "bare"]

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("NUM_STREAM", 1, "did you mean 'NUM_STREAMS'"),
            ("TARGET_DEVICE", "GPU", "must be CPU"),
            ("CPU_EXTENSION_PATH", "a.so", "cannot be met"),
        ],
    )
    def test_properties_that_cannot_be_met(
        self, run: RunVerb, listed: Callable[..., Path], key: str, value: object, message: str
    ) -> None:
        finished = run("serve", listed(**{key: value}), *port_flags())
        assert finished.code == 2
        assert message in finished.err


class TestLaunch:
    def test_options_are_passed_on(self, serve: Serve, supervisor: FakeSupervisor, tmp_path: Path) -> None:
        cache = ("--cache", tmp_path / "cache", "--cache-size", "3G")
        words = ("--replace-onnxruntime", "--replay-interval", "2.5", "--load-deadline=inf")
        assert serve(*cache, *words, "--log-format=ISO8601", "--log-verbose", "1").code == 0
        launch = supervisor.launch
        assert launch.flags.arguments[3:6] == ("--log-verbose", "1", "--log-format=ISO8601")
        assert (launch.replay_interval_s, launch.replace_onnxruntime) == (2.5, True)
        assert launch.load_deadline_s == 1e6  # replaces infinity
        assert (launch.cache.folder, launch.cache.limit_bytes) == (tmp_path / "cache", 3 << 30)

    def test_defaults(self, serve: Serve, supervisor: FakeSupervisor) -> None:
        finished = serve()
        assert finished.code == 0
        assert finished.err.startswith("graphkiln: Triton of an unknown version: 58 known vulnerabilities")
        assert finished.err.count("\n") == 1
        launch = supervisor.launch
        assert (launch.replace_onnxruntime, launch.overrides, launch.replay_interval_s) == (False, {}, 600)

    def test_record(self, serve: Serve, supervisor: FakeSupervisor, tmp_path: Path) -> None:
        assert serve().code == 0
        assert supervisor.launch.record is None
        folder = tmp_path / "new" / "record"
        assert serve("--record", folder).code == 0
        assert supervisor.launch.record == RecordSettings(
            folder=folder, share=0.01, keep_s=7 * 86400.0, keep_bytes=10 << 30
        )
        assert folder.stat().st_mode & 0o777 == 0o700
        words = ("--record-share=0.5", "--record-inputs=digest", "--record-keep=1h")
        assert serve("--record", folder, *words).code == 0
        expected = RecordSettings(folder=folder, share=0.5, inputs="digest", keep_s=3600.0)
        assert supervisor.launch.record == expected

    def test_record_needs_pyarrow(
        self, serve: Serve, supervisor: FakeSupervisor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(modules, "find_spec", lambda _: None)
        finished = serve("--record", "record")
        assert (finished.code, supervisor.started) == (1, None)
        assert "--record needs pyarrow (pip install 'graphkiln[score]')" in finished.err

    def test_page_is_served(self, serve: Serve, run: RunVerb, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        listening: list[object] = []
        monkeypatch.setattr(launch, "ListeningChild", lambda *given: listening.append(given[-1]) or nullcontext())
        (port,) = free_ports(1)
        assert f"page http://127.0.0.1:{port}" in serve("--page-address", f"127.0.0.1:{port}").out
        assert [address.port for address in listening if isinstance(address, ListenAddress)] == [port]
        assert serve("--page").out.count("page http://127.0.0.1:8003") == 1
        placed = run("serve", "--page", f"127.0.0.1:{port}", "--model-store", store, *port_flags())
        assert f"page http://127.0.0.1:{port}" in placed.out
        assert "page http" not in serve().out
        assert len(listening) == 3
        assert "unexpected argument" in run("serve", f"127.0.0.1:{port}", "--model-store", store, *port_flags()).err

    def test_settings_precede_engines(self, serve: Serve, supervisor: FakeSupervisor) -> None:
        serve(
            *("--enable-openvino", "digits", "--enable-openvino=digits", "--enable-tensorrt=resnet"),
            *("--set", "digits.precision=bf16", "--set=digits.session.a.b=c=d"),
        )
        assert supervisor.launch.overrides == {
            "digits": [
                Override("precision", "bf16", "--set"),
                Override("session.a.b", "c=d", "--set"),
                *[Override("engine", "openvino", "--enable-openvino")] * 2,
            ],
            "resnet": [Override("engine", "tensorrt", "--enable-tensorrt")],
        }


def test_exit_code_of_the_server(serve: Serve, supervisor: FakeSupervisor) -> None:
    supervisor.code = 3
    finished = serve()
    assert finished.code == 3
    assert "tritonserver ended with code 3" in finished.err


class TestTable:
    def test_table_has_a_row_per_version(self, serve: Serve, supervisor: FakeSupervisor) -> None:
        status = instance_status(engine="onnxruntime", precision="bf16", threads=4, load_ms=1234.5)
        supervisor.states = [
            ModelState(model="digits", version="3", state="READY", reason="", status=status),
            ModelState(model="other", version="1", state="READY", reason="", status=None),
            ModelState(model="ending", version="2", state="UNLOADING", reason="", status=status),
        ]
        lines = serve().out.splitlines()
        ours = next(line for line in lines if "digits" in line)
        for cell in ("3", "onnxruntime on cpu, 4", "bf16", "1234 ms"):
            assert cell in ours
        for name, version, state in (("other", "1", "ready"), ("ending", "2", "unloading")):
            assert [name, version, state, "-", "-", "-"] in table_rows("\n".join(lines))

    def test_long_reason_follows_the_table(self, serve: Serve, supervisor: FakeSupervisor) -> None:
        reason = "[no markup] /a/long/" + "folder/" * 30 + "model.onnx is cut short"
        name = "a-model-with-a-rather-long-name"
        supervisor.states = [
            ModelState(model=name, version="20261122", state="UNAVAILABLE", reason=reason, status=None),
            ModelState(model="refused", version="1", state="REFUSED", reason=reason, status=None),
            ModelState(model="m", version="1", state="READY", reason="", status=instance_status(engine="onnxruntime")),
        ]
        lines = serve().out.splitlines()
        assert max(len(line) for line in lines if line[:1] in "│┃┏└") <= 80
        assert f"{name} 20261122: {reason}" in lines
        assert sum(reason in line for line in lines) == 1, "that of a refused version is in the log"

    def test_addresses_without_models(self, run: RunVerb, supervisor: FakeSupervisor, store: Path) -> None:
        assert supervisor.states == []
        http, grpc, metrics = free_ports(3)
        ports = (f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}")
        out = run("serve", "--model-store", store, *ports).out
        assert "no model is loaded" in out
        assert "precision" not in out
        assert f"serving HTTP 127.0.0.1:{http}, gRPC 127.0.0.1:{grpc}, metrics 127.0.0.1:{metrics}" in out
        assert "metrics" not in run("serve", "--model-store", store, *port_flags(), "--allow-metrics=false").out


def test_json_log_has_an_event_per_version(caplog: pytest.LogCaptureFixture) -> None:
    status = instance_status()
    states = [
        ModelState(model="digits", version="1", state="READY", reason="", status=status),
        ModelState(model="digits", version="2", state="UNAVAILABLE", reason="it is cut off", status=None),
    ]
    with caplog.at_level(logging.INFO, "graphkiln"):
        log_states(states, ["serving HTTP 127.0.0.1:1234"])
        log_states([], [])
    first, second, third, fourth = caplog.records
    assert vars(first)["model"] == vars(second)["model"] == "digits"
    assert first.getMessage().startswith(f"version 1 is ready: {status.engine} on {status.device}")
    assert (second.levelname, second.getMessage()) == ("ERROR", "version 2 is unavailable: it is cut off")
    assert third.getMessage() == "serving HTTP 127.0.0.1:1234"
    assert (fourth.levelname, fourth.getMessage()) == ("WARNING", "no model is loaded")


@pytest.fixture
def _odd_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are no stores, and a second model `bare`, in the working folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("net.onnx", "net.xml", "text.txt", "again/bare/1/model.onnx"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()


@pytest.mark.usefixtures("_odd_files")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--set", "precision"], ["--set precision: no model is named", "--set MODEL.KEY=VALUE"]),
        (["--set", "digts.precision=bf16"], ["there is no such model", "'digits'"]),
        (["--set", "digits.precision"], ["a value is missing"]),
        (["--set", "digits.precison=bf16"], ["unknown key 'precison'", "'precision'"]),
        (["--enable-openvino", "resnt"], ["--enable-openvino resnt: there is no such model", "'resnet'"]),
        (
            ["--enable-openvino=digits", "--enable-tensorrt=digits"],
            ["both --enable-openvino and --enable-tensorrt are given"],
        ),
        (["--http-prt=9"], ["'--http-prt'", "'--http-port'"]),
        (["--record", "r", "--record-share", "0%"], ["--record-share 0%: expected a share above 0"]),
        (["--record", "r", "--record-share", "200%"], ["--record-share 200%"]),
        (["--record", "r", "--record-inputs", "some"], ["--record-inputs some: expected full or digest"]),
        (["--record", "r", "--record-keep", "7d,much"], ["--record-keep much: expected a time such as 7d"]),
        (["models"], ["unexpected argument 'models'", "--model-store models"]),
        (["--model-store", "nowhere/deep"], ["is missing", "name a folder of models: --model-store DIR"]),
        (["--model-store", "stor"], ["is missing (did you mean './store'?: --model-store DIR)"]),
        (["--model-store", "text.txt"], ["text.txt' is not a folder"]),
        (["--model-store", "net.onnx"], ["is a graph, not a model store (graphkiln convert net.onnx"]),
        (["--model-store", "net.xml"], ["is a graph, not a model store (copy it and its .bin to models/net/1/"]),
        (["--model-store", "store/bare", "--model-store", "again/bare"], ["two models are named bare"]),
    ],
)
def test_mistakes_are_reported_in_one_line(
    serve: Serve, supervisor: FakeSupervisor, options: list[str], expected: list[str]
) -> None:
    finished = serve(*options)
    assert (finished.code, finished.out) == (2, "")
    for text in expected:
        assert text in finished.err
    assert len(finished.err.strip().splitlines()) == 1
    assert supervisor.started is None


def test_busy_port_is_reported_before_the_start(run: RunVerb, supervisor: FakeSupervisor, store: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        finished = run("serve", "--model-store", store, *port_flags()[1:], f"--http-port={port}")
    assert finished.code == 2
    assert f"port {port} (HTTP) is in use" in finished.err
    assert supervisor.started is None


def test_store_that_this_user_cannot_read(serve: Serve, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system answers for other users than root; tests/image asks the real one."""
    monkeypatch.setattr(os, "access", lambda path, mode: path != store or mode != os.R_OK | os.X_OK)
    finished = serve()
    assert finished.code == 2
    assert re.search(rf"cannot be read by user \d+ \(chmod -R a\+rX {store}", finished.err)


class TestAccess:
    def test_key_is_found_by_own_commands(self, serve: Serve, supervisor: FakeSupervisor) -> None:
        assert serve().code == 0
        assert supervisor.found_key == supervisor.launch.access.http_headers[HTTP_HEADER] != ""
        assert find_key("localhost", int(supervisor.launch.flags.values["http-port"])) == ""

    def test_key_file_is_created_once(self, serve: Serve, supervisor: FakeSupervisor, tmp_path: Path) -> None:
        keys = []
        for _ in range(2):
            serve("--admin-key-file", tmp_path / "key")
            keys.append(supervisor.found_key)
        assert keys[0] == keys[1] == (tmp_path / "key").read_text().strip()

    def test_open_endpoints_on_a_public_address_are_a_warning(
        self, serve: Serve, supervisor: FakeSupervisor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert "DANGER" not in serve("--admin-key-file", "off").err
        assert supervisor.launch.access.arguments == ()
        assert "DANGER" in serve("--host", "0.0.0.0", "--admin-key-file", "off", "--edge", "off").err
        monkeypatch.setenv("GRAPHKILN_HOST", "0.0.0.0")
        assert "DANGER" not in serve("--edge", "off").err
        hosts = {each.protocol: each.host for each in supervisor.launch.flags.listen_addresses()}
        assert hosts == {"HTTP": "0.0.0.0", "gRPC": "0.0.0.0", "metrics": "127.0.0.1"}
        assert supervisor.metrics
        assert supervisor.metrics.host == "0.0.0.0"


# Progress of loading, on a terminal and in a log.


def row(activity: str, seconds: float, model: str = "m") -> LoadProgress:
    return LoadProgress(model=model, version=2, activity=activity, seconds=seconds)


def test_log_has_a_line_per_step_of_slow_models(capsys: pytest.CaptureFixture[str]) -> None:
    steps = [("lowering", 0.2), ("lowering", 1.1), ("lowering", 1.2), ("proving onnxruntime on cpu", 2.0)]
    display = LoadDisplay()
    for _ in range(2):  # the second time as after a restart
        for step in (*steps, ("ready", 2.5), ("ready", 2.5)):
            display.show([row(*step), row("ready", 0.1, model="fast")])
        display.close()
        assert capsys.readouterr().err.splitlines() == [
            "graphkiln: m version 2: lowering",
            "graphkiln: m version 2: proving onnxruntime on cpu",
            "graphkiln: m version 2: ready in 2.5 s",
        ]


def test_terminal_table_is_removed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REFRESH_S", -1)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    with LoadDisplay() as display:
        display.show([])
        display.show([row("lowering", 0.1)])
        display.show([row("ready", 3.21), row("lowering", 0.5, model="[odd]")])
    shown = capsys.readouterr().err
    for text in ("lowering", "3.2", "[odd]"):
        assert text in shown
    assert "\x1b[2K" in shown, "erased"


def test_json_log_starts_before_other_options_are_parsed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setenv(LOG_FORMAT_VARIABLE, "text")  # restored after the test
    monkeypatch.setattr(module, "log_as_json", lambda: calls.append(None))
    refused = serve("--log-format", "xml")
    assert (refused.code, len(calls)) == (2, 0)
    assert "'xml' is not one of text, json, default, ISO8601" in words(refused.err)
    assert (serve("--drain", "many", "--log-format", "json").code, len(calls)) == (2, 1)
    assert (serve("--log-format", "json").code, len(calls)) == (0, 2)
    assert os.environ[LOG_FORMAT_VARIABLE] == "json"  # instances inherit it
    assert (serve().code, len(calls)) == (0, 3)
