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


def test_no_problems(run: RunVerb, found: list[Finding]) -> None:
    found.append(Finding(check="ports", subject="HTTP port 8000", message="free"))
    finished = run("doctor")
    assert finished.code == 0
    assert "HTTP port 8000: free" in finished.out
    assert "would start" in finished.out


def test_warnings_are_exit_code_0(run: RunVerb, found: list[Finding]) -> None:
    found.append(Finding(check="cache", subject="x", level=Level.WARNING, message="is odd", hint="look at it"))
    finished = run("doctor")
    assert finished.code == 0
    assert "-> look at it" in finished.out
    assert "errors: 0, warnings: 1" in finished.out


def test_errors_are_exit_code_1(run: RunVerb, found: list[Finding]) -> None:
    found.append(Finding(check="ports", subject="x", level=Level.ERROR, message="[bold]in use[/bold]"))
    finished = run("doctor")
    assert finished.code == 1
    assert "[bold]in use[/bold]" in finished.out
    assert "errors: 1, warnings: 0" in finished.out


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


def test_options(run: RunVerb, found: list[Finding], tmp_path: Path) -> None:
    assert found == []

    printed = run("doctor", "--json", "--model-store", tmp_path, "--cache", "off", "--http-port=9", "--grpc-port=8").out
    message = json.loads(printed)["findings"][0]["message"]
    assert "cache='off', host='127.0.0.1', arguments=('--http-port=9', '--grpc-port=8')" in message
    assert str(tmp_path) in message


def test_default_store(run: RunVerb, found: list[Finding], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found == []
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
    finished = run_command(
        "doctor",
        "--json",
        "--model-store",
        tmp_path / "store",
        "--cache",
        tmp_path / "cache",
        *ports,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert finished.returncode == 1, finished.stderr
    assert "Traceback" not in finished.stderr
    found = {(each["check"], each["subject"]): each for each in json.loads(finished.stdout)["findings"]}
    assert found["packages", "the check itself"]["message"] == "failed: OSError: a package that is broken"
    assert found["cache", "artifact cache"]["level"] == "warning"
    assert found["models", "digits 1"]["level"] == "error"
    assert found["engines", "onnxruntime"]["level"] == "ok"
