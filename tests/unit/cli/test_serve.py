"""`graphkiln serve`: what it hands to the supervisor, what it prints, and what it refuses before anything starts."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import pytest
import typer
from commands import RunVerb
from running import free_ports
from statuses import instance_status
from typer.testing import CliRunner

from graphkiln.cli import serve as load_display
from graphkiln.cli import serve as module
from graphkiln.cli.serve import LoadDisplay, LogFormatOption, tritons_flags
from graphkiln.page import launch
from graphkiln_backend.lowering.settings import Override
from graphkiln_backend.server import installation as finding
from graphkiln_backend.server import supervisor as supervising
from graphkiln_backend.server.flags import ListenAddress
from graphkiln_backend.server.installation import Installation
from graphkiln_backend.server.launch import Launch
from graphkiln_backend.server.load_progress import LoadProgress
from graphkiln_backend.server.probe import ModelState
from graphkiln_backend.system.admin_key import HTTP_HEADER, find_key
from graphkiln_backend.triton.environment import LOG_FORMAT_VARIABLE

PORTS = ("http-port", "grpc-port", "metrics-port")
FLAGS = dict.fromkeys((*PORTS, "http-address", "allow-metrics", "model-repository", "log-verbose"), True)


class FakeSupervisor:
    """Serves nothing: tells its states, and ends with its code."""

    def __init__(self) -> None:
        self.launch: Launch | None = None
        self.states: list[ModelState] = []
        self.found_key = ""
        self.last_words = ""
        self.code = 0

    def __call__(self, launch: Launch, *, on_live: Callable[[list[ModelState]], None], **_: object) -> FakeSupervisor:
        self.launch, self._on_live = launch, on_live
        return self

    def run(self) -> int:
        self._on_live(self.states)
        if self.launch and (address := self.launch.flags.listen_address("http")):
            self.found_key = find_key("localhost", address.port)
        return self.code


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeSupervisor:
    """What the server would be run by, beside an installation whose flags are known."""
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
    """A store of two models, which nobody looks into."""
    for name in ("resnet", "digits"):
        (tmp_path / "store" / name).mkdir(parents=True)
    return tmp_path / "store"


@pytest.fixture
def ports() -> list[str]:
    """Flags that give every service a free port."""
    return [f"--{flag}={port}" for flag, port in zip(PORTS, free_ports(3), strict=True)]


def launched(supervisor: FakeSupervisor) -> Launch:
    assert supervisor.launch is not None
    return supervisor.launch


class TestLaunch:
    def test_stores_of_all_flags_are_served(
        self, run: RunVerb, supervisor: FakeSupervisor, store: Path, tmp_path: Path, ports: list[str]
    ) -> None:
        (tmp_path / "other").mkdir()
        assert run("serve", "--model-store", store, f"--model-repository={tmp_path / 'other'}", *ports).code == 0
        assert launched(supervisor).stores == [store, tmp_path / "other"]

    @pytest.mark.parametrize("option", [[], ["--model-store"]])
    def test_one_model_of_a_store(
        self, run: RunVerb, supervisor: FakeSupervisor, store: Path, ports: list[str], option: list[str]
    ) -> None:
        (store / "digits" / "1").mkdir()
        assert (
            run("serve", *option, store / "digits", *ports, "--log-verbose", "1", "--set", "digits.threads=1").code == 0
        )
        (chosen,) = launched(supervisor).stores
        assert chosen != store
        assert not chosen.exists()
        assert list(launched(supervisor).overrides) == ["digits"]

    def test_the_store_of_the_working_directory_is_the_default(
        self,
        run: RunVerb,
        supervisor: FakeSupervisor,
        tmp_path: Path,
        ports: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        (tmp_path / "model_repository").mkdir()
        monkeypatch.chdir(tmp_path)
        assert run("serve", *ports).code == 0
        assert launched(supervisor).stores == [Path("model_repository")]

    def test_the_store_may_be_named_by_the_environment(
        self,
        run: RunVerb,
        supervisor: FakeSupervisor,
        store: Path,
        ports: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("GRAPHKILN_MODEL_STORE", str(store))
        assert run("serve", *ports).code == 0
        assert launched(supervisor).stores == [store]

    def test_tritons_flags_are_passed_on_as_typed(
        self, run: RunVerb, supervisor: FakeSupervisor, store: Path, ports: list[str]
    ) -> None:
        run("serve", "--model-store", store, *ports, "--log-verbose", "1")
        assert launched(supervisor).flags.arguments == (*ports, "--log-verbose", "1")

    @pytest.mark.usefixtures("supervisor")
    def test_the_page_is_served_beside_it(
        self, run: RunVerb, store: Path, ports: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[object] = []
        monkeypatch.setattr(launch, "ListeningChild", lambda *given: told.append(given[-1]) or nullcontext())
        (port,) = free_ports(1)
        finished = run("serve", "--model-store", store, *ports, "--page-address", f"127.0.0.1:{port}")
        assert f"page http://127.0.0.1:{port}" in finished.out
        assert [address.port for address in told if isinstance(address, ListenAddress)] == [port]
        assert run("serve", "--model-store", store, *ports, "--page").out.count("page http://127.0.0.1:8003") == 1
        placed = run("serve", "--page", f"127.0.0.1:{port}", "--model-store", store, *ports)
        assert f"page http://127.0.0.1:{port}" in placed.out
        assert len(told) == 3
        assert "page http" not in run("serve", "--model-store", store, *ports).out
        assert len(told) == 3
        assert "unexpected argument" in run("serve", f"127.0.0.1:{port}", "--model-store", store, *ports).err

    def test_the_cache_and_the_replacement_are_passed_on(
        self, run: RunVerb, supervisor: FakeSupervisor, store: Path, tmp_path: Path, ports: list[str]
    ) -> None:
        cache = ("--cache", tmp_path / "cache", "--cache-size", "3G")
        run("serve", "--model-store", store, *ports, *cache, "--replace-onnxruntime", "--replay-interval", "2.5")
        launch = launched(supervisor)
        assert launch.replay_interval_s == 2.5
        assert launch.cache.folder == tmp_path / "cache"
        assert launch.cache.limit_bytes == 3 << 30
        assert launch.replace_onnxruntime

    def test_by_default_nothing_is_replaced_or_overridden(
        self, run: RunVerb, supervisor: FakeSupervisor, store: Path, ports: list[str]
    ) -> None:
        run("serve", "--model-store", store, *ports)
        assert not launched(supervisor).replace_onnxruntime
        assert launched(supervisor).overrides == {}
        assert launched(supervisor).replay_interval_s == 600

    def test_for_ever_is_as_long_as_the_systems_calls_take(
        self, run: RunVerb, supervisor: FakeSupervisor, store: Path, ports: list[str]
    ) -> None:
        words = ("--cache=off", "--load-deadline=inf", "--replay-interval=inf")
        assert run("serve", "--model-store", store, *ports, *words).code == 0
        assert launched(supervisor).load_deadline_s == launched(supervisor).replay_interval_s == 1e6

    def test_settings_of_models_go_before_engines(
        self, run: RunVerb, supervisor: FakeSupervisor, store: Path, ports: list[str]
    ) -> None:
        run(
            *("serve", "--model-store", store, *ports),
            *("--enable-openvino", "digits", "--enable-tensorrt=resnet"),
            *("--set", "digits.precision=bf16", "--set=digits.session.a.b=c=d"),
        )
        assert launched(supervisor).overrides == {
            "digits": [
                Override("precision", "bf16", "--set"),
                Override("session.a.b", "c=d", "--set"),
                Override("engine", "openvino", "--enable-openvino"),
            ],
            "resnet": [Override("engine", "tensorrt", "--enable-tensorrt")],
        }

    def test_one_engine_may_be_named_twice(
        self, run: RunVerb, supervisor: FakeSupervisor, store: Path, ports: list[str]
    ) -> None:
        twice = ("--enable-openvino=digits",) * 2
        assert run("serve", "--model-store", store, *ports, *twice).code == 0
        assert {override.value for override in launched(supervisor).overrides["digits"]} == {"openvino"}


class TestExit:
    def test_the_servers_code_is_the_commands_with_a_word(
        self, run: RunVerb, supervisor: FakeSupervisor, store: Path, ports: list[str]
    ) -> None:
        supervisor.code = 3
        finished = run("serve", "--model-store", store, *ports)
        assert finished.code == 3
        assert "tritonserver ended with code 3" in finished.err

    def test_a_clean_end_says_nothing(
        self, run: RunVerb, supervisor: FakeSupervisor, store: Path, ports: list[str]
    ) -> None:
        assert supervisor.code == 0
        assert run("serve", "--model-store", store, *ports).err == ""


class TestTable:
    def test_every_version_is_a_row(
        self, run: RunVerb, supervisor: FakeSupervisor, store: Path, ports: list[str]
    ) -> None:
        status = instance_status(engine="onnxruntime", precision="bf16", threads=4, load_ms=1234.5)
        supervisor.states = [
            ModelState(model="digits", version="3", state="READY", reason="", status=status),
            ModelState(model="other", version="1", state="READY", reason="", status=None),
        ]
        lines = run("serve", "--model-store", store, *ports).out.splitlines()
        ours = next(line for line in lines if "digits" in line)
        for cell in ("3", "onnxruntime on cpu", "4 threads", "bf16"):
            assert cell in ours
        assert "1234 ms" in ours
        other = [cell.strip() for cell in next(line for line in lines if "other" in line).split("│")[1:-1]]
        assert other == ["other", "1", "ready", "-", "-", "-"]

    def test_a_model_that_is_not_ready_is_shown_with_its_reason(
        self, run: RunVerb, supervisor: FakeSupervisor, store: Path, ports: list[str]
    ) -> None:
        reason = "[no markup] the graph is damaged"
        supervisor.states = [ModelState(model="bad", version="1", state="UNAVAILABLE", reason=reason, status=None)]
        out = run("serve", "--model-store", store, *ports).out
        assert "unavailable" in out
        assert f"bad 1: {reason}" in out

    def test_it_fits_80_columns_whatever_the_reason(
        self, run: RunVerb, supervisor: FakeSupervisor, store: Path, ports: list[str]
    ) -> None:
        reason = "/a/long/" + "folder/" * 30 + "model.onnx is cut short"
        supervisor.states = [
            ModelState(
                model="a-model-with-a-rather-long-name", version="20261122", state="REFUSED", reason=reason, status=None
            ),
            ModelState(model="m", version="1", state="READY", reason="", status=instance_status(engine="onnxruntime")),
        ]
        lines = run("serve", "--model-store", store, *ports).out.splitlines()
        assert max(len(line) for line in lines if line[:1] in "│┃┏└") <= 80
        assert any(reason in line for line in lines)

    def test_an_instance_of_a_model_that_is_not_ready_has_no_time(
        self, run: RunVerb, supervisor: FakeSupervisor, store: Path, ports: list[str]
    ) -> None:
        status = instance_status(load_ms=1234.5)
        supervisor.states = [ModelState(model="m", version="3", state="UNLOADING", reason="", status=status)]
        out = run("serve", "--model-store", store, *ports).out
        assert "unloading" in out
        assert "1234 ms" not in out

    def test_no_model_is_said(self, run: RunVerb, supervisor: FakeSupervisor, store: Path, ports: list[str]) -> None:
        assert supervisor.states == []
        out = run("serve", "--model-store", store, *ports).out
        assert "no model is loaded" in out
        assert "precision" not in out

    @pytest.mark.usefixtures("supervisor")
    def test_the_addresses_are_those_that_this_machine_reaches(self, run: RunVerb, store: Path) -> None:
        http, grpc, metrics = free_ports(3)
        ports = (f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}")
        out = run("serve", "--model-store", store, *ports).out
        assert f"serving HTTP 127.0.0.1:{http}, gRPC 127.0.0.1:{grpc}, metrics 127.0.0.1:{metrics}" in " ".join(
            out.split()
        )

    @pytest.mark.usefixtures("supervisor")
    def test_a_service_that_is_switched_off_is_not_listed(self, run: RunVerb, store: Path, ports: list[str]) -> None:
        assert "metrics" not in run("serve", "--model-store", store, *ports, "--allow-metrics=false").out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--set", "precision"], ["--set precision: no model is named", "--set MODEL.KEY=VALUE"]),
        (["--set", "digts.precision=bf16"], ["there is no such model", "'digits'"]),
        (["--set", "digits.precision"], ["a value is missing"]),
        (["--set", "digits.precison=bf16"], ["unknown key 'precison'", "'precision'"]),
        (["--enable-openvino", "resnt"], ["--enable-openvino resnt: there is no such model", "'resnet'"]),
        (
            ["--enable-openvino=digits", "--enable-tensorrt=digits"],
            ["both --enable-openvino and --enable-tensorrt name 'digits'"],
        ),
        (["--http-prt=9"], ["'--http-prt'", "'--http-port'"]),
        (["models"], ["unexpected argument 'models'", "--model-store models"]),
    ],
)
def test_a_mistake_is_one_line_and_starts_nothing(
    run: RunVerb, supervisor: FakeSupervisor, store: Path, words: list[str], expected: list[str]
) -> None:
    finished = run("serve", "--model-store", store, *words)
    assert finished.code == 2
    assert finished.out == ""
    for text in expected:
        assert text in finished.err
    assert len(finished.err.strip().splitlines()) == 1
    assert supervisor.launch is None


@pytest.mark.parametrize(("name", "word"), [("nowhere", "is missing"), ("file", "is not a folder")])
def test_a_store_must_be_a_folder(
    run: RunVerb, supervisor: FakeSupervisor, tmp_path: Path, name: str, word: str
) -> None:
    (tmp_path / "file").touch()
    finished = run("serve", "--model-store", tmp_path / name)
    assert finished.code == 2
    assert word in finished.err
    assert "--model-store DIR" in finished.err
    assert supervisor.launch is None


def test_a_busy_port_is_told_before_anything_starts(
    run: RunVerb, supervisor: FakeSupervisor, store: Path, ports: list[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        finished = run("serve", "--model-store", store, *ports[1:], f"--http-port={port}", "--http-address=127.0.0.1")
    assert finished.code == 2
    assert f"port {port} (HTTP) is in use" in finished.err
    assert supervisor.launch is None


class TestAccess:
    def test_own_commands_find_the_key_while_it_serves(
        self, run: RunVerb, supervisor: FakeSupervisor, store: Path
    ) -> None:
        assert run("serve", "--model-store", store, *port_flags()).code == 0
        assert supervisor.launch is not None
        assert supervisor.found_key == supervisor.launch.access.http_headers[HTTP_HEADER] != ""
        assert find_key("localhost", int(supervisor.launch.flags.values["http-port"])) == ""

    def test_a_key_file_is_made_once(
        self, run: RunVerb, supervisor: FakeSupervisor, store: Path, tmp_path: Path
    ) -> None:
        keys = []
        for _ in range(2):
            run("serve", "--model-store", store, "--admin-key-file", tmp_path / "key", *port_flags())
            keys.append(supervisor.found_key)
        assert keys[0] == keys[1] == (tmp_path / "key").read_text().strip()

    @pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
    def test_open_on_purpose_on_a_public_address_is_said_loudly(
        self, run: RunVerb, supervisor: FakeSupervisor, store: Path, host: str, warned: bool
    ) -> None:
        finished = run("serve", "--model-store", store, "--host", host, "--admin-key-file", "off", *port_flags())
        assert ("DANGER: whoever reaches" in finished.err) is warned
        assert supervisor.launch is not None
        assert supervisor.launch.access.arguments == ()

    def test_the_environment_names_the_host(
        self, run: RunVerb, supervisor: FakeSupervisor, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GRAPHKILN_HOST", "0.0.0.0")
        assert "DANGER" not in run("serve", "--model-store", store, *port_flags()).err
        assert supervisor.launch is not None
        assert {each.host for each in supervisor.launch.flags.listen_addresses()} == {"0.0.0.0"}


def port_flags() -> list[str]:
    """Ports that nobody holds."""
    return [f"--{name}={port}" for name, port in zip(PORTS, free_ports(3), strict=True)]


# How far models are, on a terminal and in a log.


def row(activity: str, seconds: float, model: str = "m") -> LoadProgress:
    return LoadProgress(model=model, version=2, activity=activity, seconds=seconds)


def test_a_log_has_a_line_for_each_activity_of_a_slow_model(capsys: pytest.CaptureFixture[str]) -> None:
    steps = [("lowering", 0.2), ("lowering", 1.1), ("lowering", 1.2), ("proving onnxruntime on cpu", 2.0)]
    with LoadDisplay(live=False) as display:
        for step in (*steps, ("ready", 2.5), ("ready", 2.5)):
            display.show([row(*step), row("ready", 0.1, model="fast")])
    assert capsys.readouterr().err.splitlines() == [
        "graphkiln: m version 2: lowering",
        "graphkiln: m version 2: proving onnxruntime on cpu",
        "graphkiln: m version 2: ready in 2.5 s",
    ]


def test_the_next_start_begins_anew(capsys: pytest.CaptureFixture[str]) -> None:
    display = LoadDisplay(live=False)
    for _ in range(2):
        display.show([row("lowering", 5)])
        display.close()
    assert capsys.readouterr().err.count("m version 2: lowering") == 2


def test_a_terminal_has_a_table_that_goes_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_display, "_REFRESH_S", -1)
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "80"}.items():
        monkeypatch.setenv(name, value)
    with LoadDisplay(live=True) as display:
        display.show([])
        display.show([row("lowering", 0.1)])
        display.show([row("ready", 3.21), row("lowering", 0.5, model="[odd]")])
    shown = capsys.readouterr().err
    for words in ("lowering", "3.2", "[odd]"):
        assert words in shown
    assert "\x1b[2K" in shown, "erased"


# `--log-format`: ours and tritonserver's.

app = typer.Typer()


@app.command()
def verb(number: Annotated[int, typer.Option()] = 0, log_format: LogFormatOption = "text") -> None:
    typer.echo(f"{log_format} {number} {os.environ.get(LOG_FORMAT_VARIABLE, '')}")


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """How often standard error was made JSON."""
    calls: list[None] = []
    monkeypatch.setenv(LOG_FORMAT_VARIABLE, "text")  # so that it is as before afterwards
    monkeypatch.setattr(module, "log_as_json", lambda: calls.append(None))
    return calls


@pytest.mark.parametrize(("value", "flags"), [("text", []), ("json", []), ("ISO8601", ["--log-format=ISO8601"])])
@pytest.mark.usefixtures("wrapped")
def test_tritonserver_gets_its_own(value: str, flags: list[str]) -> None:
    assert tritons_flags(value) == flags


def test_json_begins_before_other_options_are_read_and_is_handed_on(wrapped: list[None]) -> None:
    done = CliRunner().invoke(app, ["--number", "many", "--log-format", "json"])
    assert (done.exit_code, len(wrapped)) == (2, 1)
    assert CliRunner().invoke(app, ["--log-format", "json"]).output == "json 0 json\n"


def test_the_environment_chooses_too(wrapped: list[None]) -> None:
    assert CliRunner().invoke(app, [], env={LOG_FORMAT_VARIABLE: "json"}).exit_code == 0
    assert len(wrapped) == 1


def test_text_is_left_alone(wrapped: list[None]) -> None:
    assert CliRunner().invoke(app, []).output == "text 0 text\n"
    assert not wrapped


def test_another_format_is_refused_with_those_that_there_are(wrapped: list[None]) -> None:
    done = CliRunner().invoke(app, ["--log-format", "xml"])
    assert done.exit_code == 2
    assert "'xml' is not one of text, json, default, ISO8601" in " ".join(done.output.replace("│", "").split())
    assert not wrapped
