"""`graphkiln doctor`: table, JSON document and exit code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commands import RunVerb
from running import free_ports, run_command

from graphkiln.doctor import examination
from graphkiln.doctor.examination import Examination, Finding, Level, Request


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """Fake findings after one that contains the request."""
    findings: list[Finding] = []

    def examine(request: Request) -> Examination:
        asked = Finding(check="asked", subject=str([str(path) for path in request.stores]), message=str(request))
        return Examination(findings=(asked, *findings))

    monkeypatch.setattr(examination, "examine", examine)
    return findings


@pytest.mark.parametrize(
    ("level", "code", "summary"),
    [
        (Level.OK, 0, "errors: 0, warnings: 0: `graphkiln serve` would start"),
        (Level.WARNING, 0, "errors: 0, warnings: 1"),
        (Level.ERROR, 1, "errors: 1, warnings: 0"),
    ],
)
def test_table_and_exit_code(run: RunVerb, found: list[Finding], level: Level, code: int, summary: str) -> None:
    found.append(Finding(check="ports", subject="port 8000", level=level, message="[bold]in use[/bold]", hint="look"))
    finished = run("doctor")
    assert finished.code == code
    for text in ("port 8000: [bold]in use[/bold]", "-> look", summary):
        assert text in finished.out


def test_table_fits_80_columns(run: RunVerb, found: list[Finding]) -> None:
    found.append(Finding(check="models", subject="/a" * 100, level=Level.ERROR, message="wörd " * 50, hint="h" * 200))
    lines = run("doctor").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.count("h") for line in lines) >= 200


def test_json(run: RunVerb, found: list[Finding]) -> None:
    found.append(Finding(check="ports", subject="x", level=Level.ERROR, message="in use", facts={"port": 1}))
    finished = run("doctor", "--json")
    assert finished.code == 1
    document = json.loads(finished.out)
    assert (document["schema"], document["level"]) == (1, "error")
    assert document["findings"][1]["facts"] == {"port": 1}


@pytest.mark.usefixtures("found")
def test_options(run: RunVerb, tmp_path: Path) -> None:
    printed = run("doctor", "--json", "--model-store", tmp_path, "--cache", "off", "--http-port=9", "--grpc-port=8").out
    message = json.loads(printed)["findings"][0]["message"]
    assert "cache='off', host='127.0.0.1', arguments=('--http-port=9', '--grpc-port=8')" in message
    assert str(tmp_path) in message


@pytest.mark.usefixtures("found")
def test_default_store(run: RunVerb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert json.loads(run("doctor", "--json").out)["findings"][0]["subject"] == "[]"
    (tmp_path / "model_repository").mkdir()
    assert json.loads(run("doctor", "--json").out)["findings"][0]["subject"] == "['model_repository']"


def test_broken_machine(tmp_path: Path, digits: Path) -> None:
    """An untrusted cache, an empty graph and a broken package are findings without tracebacks."""
    shutil.copytree(digits, tmp_path / "store" / "digits")
    (tmp_path / "store" / "digits" / "1" / "model.onnx").write_bytes(b"")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    (tmp_path / "packaging.py").write_text("raise OSError('a package that is broken')\n")
    ports = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), free_ports(3), strict=True)]
    options = ("--model-store", tmp_path / "store", "--cache", tmp_path / "cache", *ports)
    finished = run_command("doctor", "--json", *options, env={"PYTHONPATH": str(tmp_path)})
    assert finished.returncode == 1, finished.stderr
    assert "Traceback" not in finished.stderr
    found = {(each["check"], each["subject"]): each for each in json.loads(finished.stdout)["findings"]}
    assert found["packages", "the check itself"]["message"] == "failed: OSError: a package that is broken"
    assert found["cache", "artifact cache"]["level"] == "warning"
    assert found["models", "digits 1"]["level"] == "error"
    assert found["engines", "onnxruntime"]["level"] == "ok"
