"""`graphkiln models`, `load`, `unload` and `health`, and the connection options of all verbs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import FakeClient, RunVerb, table_rows

import graphkiln_client
from graphkiln.cli import models as verbs
from graphkiln.cli.connection import ConnectionOptions
from graphkiln_backend.graph.errors import ConnectionFailed, ServerError
from graphkiln_client import Health, ServedModel

READY = ServedModel(name="digits", version="2", state="READY", reason="")
FAILED = ServedModel(name="cats", version="1", state="UNAVAILABLE", reason="[/bold] no such file")
NEVER = ServedModel(name="dogs", version="", state="", reason="")
LOADING = Health(
    live=True,
    ready=False,
    server="triton 2.51.0",
    not_ready=(ServedModel(name="cats", version="1", state="LOADING", reason="in a minute"),),
)


class TestModels:
    def test_table_and_json(self, run: RunVerb, client: FakeClient) -> None:
        client.served = (READY, FAILED, NEVER)
        assert table_rows(run("models").out) == [
            ["digits", "2", "READY", ""],
            ["cats", "1", "UNAVAILABLE", "[/bold] no such file"],
            ["dogs", "-", "not loaded", ""],
        ]
        assert json.loads(run("models", "--json").out)[1] == {
            "name": "cats", "version": "1", "state": "UNAVAILABLE", "reason": "[/bold] no such file",
        }  # fmt: skip
        assert client.open == 0
        client.served = ()
        assert run("models").out == "the server has no models\n"

    @pytest.mark.parametrize(("served", "code"), [((READY,), 0), ((READY, FAILED), 1), ((NEVER,), 1), ((), 0)])
    def test_exit_code(self, run: RunVerb, client: FakeClient, served: tuple[ServedModel, ...], code: int) -> None:
        client.served = served
        assert (run("models").code, run("models", "--json").code) == (code, code)

    def test_a_replaced_version_is_no_failure(self, run: RunVerb, client: FakeClient) -> None:
        old = [replace(READY, version=version, state="UNLOADED") for version in ("9", "10")]
        client.served = (*old, READY, replace(READY, version="11"))
        finished = run("models")
        assert finished.code == 0
        assert finished.out.count("UNLOADED") == finished.out.count("replaced by version 11") == 2
        client.served = (old[0],)
        assert run("models").code == 1, "nothing of it serves"

    def test_candidates_of_ended_rollouts_are_left_out(self, run: RunVerb, client: FakeClient) -> None:
        rows = [("cats", "READY", ""), ("cats.candidate", "UNLOADED", "")]
        client.served = tuple(ServedModel(name=name, version="1", state=state, reason=why) for name, state, why in rows)
        finished = run("models")
        assert (finished.code, "candidate" in finished.out) == (0, False)
        client.served = (ServedModel(name="cats.candidate", version="1", state="UNAVAILABLE", reason="no memory"),)
        assert run("models").code == 1

    def test_long_reason_is_wrapped(self, run: RunVerb, client: FakeClient) -> None:
        client.served = (ServedModel(name="n" * 30, version="1", state="UNAVAILABLE", reason="no room left " * 40),)
        assert max(map(len, run("models").out.splitlines())) <= 80


class TestLoad:
    def test_versions_that_are_served_are_printed(self, run: RunVerb, client: FakeClient) -> None:
        client.served = (READY, replace(READY, name="other"))
        assert run("load", "digits").out == "digits: version 2 ready\n"
        assert run("unload", "digits").out == "digits: unloading\n"
        assert client.changed == [("load", "digits"), ("unload", "digits")]
        assert client.open == 0

    def test_unload_of_an_unknown_model(self, run: RunVerb, client: FakeClient) -> None:
        client.served = (READY,)
        finished = run("unload", "digit")
        assert (finished.code, client.changed) == (2, [])
        assert "the server has no model 'digit' (did you mean 'digits'?)" in finished.err

    @pytest.mark.parametrize(
        ("model", "message"), [("digit", "did you mean 'digits'?"), ("digits", "it cannot be loaded")]
    )
    def test_load_that_fails(
        self, run: RunVerb, client: FakeClient, monkeypatch: pytest.MonkeyPatch, model: str, message: str
    ) -> None:
        def fail(_: str) -> None:
            raise ServerError("it cannot be loaded")

        client.served = (READY,)
        monkeypatch.setattr(client, "load", fail)
        finished = run("load", model)
        assert finished.code
        assert message in finished.err


class Clock:
    """A clock that only `sleep` advances."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += 1


class TestHealth:
    @pytest.fixture(autouse=True)
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        fake = Clock()
        monkeypatch.setattr(verbs, "time", fake)
        return fake

    @pytest.mark.parametrize(
        ("state", "message"),
        [
            (LOADING, "cats 1 is LOADING: in a minute"),
            (Health(live=True, ready=False), "nowhere.test:8000 responds, but is not"),
            (ConnectionFailed("no server at nowhere.test:8000"), "graphkiln: no server at nowhere.test:8000"),
        ],
    )
    def test_unready_server_gives_reasons(self, run: RunVerb, client: FakeClient, state: Any, message: str) -> None:
        client.healths = [state]
        finished = run("health")
        assert (finished.code, finished.out) == (1, "")
        assert message in finished.err

    def test_wait_until_ready(self, run: RunVerb, client: FakeClient, clock: Clock) -> None:
        client.healths = [ConnectionFailed("not yet"), LOADING, LOADING, *client.healths]
        finished = run("health", "--wait", "10")
        assert (finished.code, finished.out) == (0, "ready\n")
        assert clock.slept == 3
        first, second = finished.err.splitlines()  # each reason once
        assert first == "graphkiln: waiting: not yet"
        assert second.endswith("responds, but cats 1 is LOADING: in a minute")

    @pytest.mark.parametrize(
        ("options", "seconds", "timeout_s"), [([], 0, 5), (["--wait", "2"], 2, 2), (["--wait", "60"], 60, 5)]
    )
    def test_wait_and_requests_are_limited(
        self, run: RunVerb, client: FakeClient, clock: Clock, *, options: list[str], seconds: float, timeout_s: float
    ) -> None:
        client.healths = [LOADING]
        assert run("health", *options).code == 1
        assert clock.now == pytest.approx(100 + seconds, abs=0.06)
        assert client.connected[0].timeout == timeout_s

    def test_json_has_state_and_reasons(self, run: RunVerb, client: FakeClient) -> None:
        client.healths.insert(0, LOADING)
        finished = run("health", "--json")
        assert finished.code == 1
        assert json.loads(finished.out)["not_ready"] == [
            {"name": "cats", "version": "1", "state": "LOADING", "reason": "in a minute"}
        ]
        finished = run("health", "--json")
        assert (finished.code, json.loads(finished.out)["ready"]) == (0, True)


class TestConnection:
    def test_options_reach_the_connection(
        self, run: RunVerb, client: FakeClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client.served = (READY,)
        options = ("--url", "grpcs://h", "--admin-key-file", "a", "--client-cert", "c", "--client-key", "k")
        expected = ConnectionOptions(
            url="grpcs://h",
            admin_key_file=Path("a"),
            client_cert=Path("c"),
            client_key=Path("k"),
            header=["A: b", "C:d"],
        )
        for verb, timeout_s in (("load", 600.0), ("unload", 30.0), ("models", 30.0), ("health", 5.0)):
            run(verb, *(["digits"] if "load" in verb else []), *options, "--header", "A: b", "--header", "C:d")
            assert client.connected[-1] == replace(expected, timeout=timeout_s)
        monkeypatch.setenv("GRAPHKILN_URL", "http://elsewhere:9")
        run("models")
        assert client.connected[-1].url == "http://elsewhere:9"

    def test_arguments_of_the_client(self, run: RunVerb, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        class Connected(Exception):
            """Ends the command after the connection."""

        made: list[dict[str, Any]] = []

        def connect(**arguments: Any) -> None:
            made.append(arguments)
            raise Connected

        monkeypatch.setattr(graphkiln_client, "Client", connect)
        (tmp_path / "key").write_text("secret\n")
        headers = [f"--header={text}" for text in ("Authorization: Bearer a:b=c", "X-Empty:", " spaced :  text ")]
        files = ("--ca-file", "ca.pem", "--client-cert", "c", "--client-key", "k")
        for words in ((), ("--url", "grpcs://h:1", *headers, "--admin-key-file", tmp_path / "key", *files)):
            with pytest.raises(Connected):
                run("load", "m", *words)
        nothing = {"headers": {}, "ca_file": None, "client_cert": None, "client_key": None, "admin_key": ""}
        assert made == [
            {"url": "http://localhost:8000", "timeout_s": 600.0, **nothing},
            {
                "url": "grpcs://h:1", "timeout_s": 600.0, "admin_key": "secret",
                "headers": {"Authorization": "Bearer a:b=c", "X-Empty": "", "spaced": "text"},
                "ca_file": Path("ca.pem"), "client_cert": Path("c"), "client_key": Path("k"),
            },
        ]  # fmt: skip

    @pytest.mark.parametrize(
        "verb", ["bench", "classify", "detect", "embed", "segment", "health", "infer", "load", "models", "unload"]
    )
    def test_verbs_with_connection_options(self, run: RunVerb, verb: str) -> None:
        shown = run(verb, "--help").out
        for option in ("--url", "--header", "--ca-file", "--client-cert", "--client-key"):
            assert option in shown
        assert ("--admin-key-file" in shown) is (verb in {"health", "load", "models", "unload"})
        assert ("--timeout" in shown) is (verb not in {"health", "models"})
