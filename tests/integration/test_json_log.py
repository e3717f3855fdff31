"""`serve --log-format json` on a real server: every line is an object, and a failed request's id leads to its cause."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
import pytest
from running import COMMAND, Server, Serving

ID = 'mine"] \u2028 {"level": "info"}'


def ask(server: Server, value: int, request_id: str) -> int:
    """Look up a number; an index of 10 fails in the instance."""
    tensor = {"name": "INDEX", "shape": [1, 1], "datatype": "INT64", "data": [value]}
    body = json.dumps({"id": request_id, "inputs": [tensor]}).encode()
    try:
        with urlopen(Request(f"{server.url}/v2/models/lookup/infer", body)) as answer:
            return int(answer.status)
    except HTTPError as error:
        return error.code


def records(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log.splitlines()]


def of_request(server: Server, name: str) -> list[dict[str, Any]]:
    return [each for each in records(server) if each.get("request_id") == name]


@pytest.mark.slow
def test_every_line_is_json_with_request_ids(lookup_store: Path, tmp_path: Path) -> None:
    flags = ("--log-format", "json", "--log-info=true", "--log-verbose=1")
    with Serving(tmp_path, "--model-store", lookup_store, *flags) as server:
        server.wait_ready()
        assert ask(server, 3, "good") == 200
        assert ask(server, 10, ID) == 400
        server.wait_until(lambda: bool(of_request(server, ID)))
        server.wait_until(lambda: bool(of_request(server, "good")))  # Triton's own, which log-verbose shows

        children = psutil.Process(server.process.pid).children(recursive=True)
        (instance,) = (each.pid for each in children if "lookup" in " ".join(each.cmdline()))
        os.kill(instance, signal.SIGKILL)
        server.wait_until(lambda: any("restarting the server" in each["message"] for each in records(server)))
        server.wait_ready()
        assert server.stop()[0] == 0

    failures = [each for each in of_request(server, ID) if each["source"] == "graphkiln"]
    assert {(each["model"], each["level"]) for each in failures} == {("lookup", "warning")}
    assert any("request failed: INVALID_ARG: " in each["message"] for each in failures)
    assert {each["source"] for each in of_request(server, "good")} == {"triton"}
    ready = next(each for each in records(server) if each["message"].startswith("version 1 is ready"))
    assert (ready["model"], ready["level"]) == ("lookup", "info")
    assert any(each["message"].startswith("serving HTTP") for each in records(server))
    assert records(server)[-1]["time"] >= records(server)[0]["time"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model-store", "nowhere"), "nowhere"),
        (("--drain", "soon"), "--drain"),
    ],
)
def test_setup_error_is_json(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    command = [*COMMAND, "serve", "--log-format", "json", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    told = [json.loads(line) for line in done.stderr.splitlines()]
    assert any(said in each["message"] for each in told)
    assert done.stdout == ""
