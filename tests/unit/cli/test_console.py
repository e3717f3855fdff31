"""Log records on stderr, tables and documents on stdout, reports in files."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphkiln.cli.console import (
    check_html,
    command_line,
    escape_undecodable,
    facts,
    log_to_stderr,
    print_csv,
    print_json,
    print_table,
)
from graphkiln_backend.graph.errors import EngineUnavailable, InvalidInput


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    logger = logging.getLogger("graphkiln")
    level, handlers = logger.level, logger.handlers
    yield
    logger.level, logger.handlers = level, handlers


def test_log_records_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr()
    logging.getLogger("graphkiln.cache").info("built %s in %.1f s", "m/1", 2)
    logging.getLogger("graphkiln.server").warning("100%")
    assert capsys.readouterr() == ("", "graphkiln: built m/1 in 2.0 s\ngraphkiln: 100%\n")


def test_only_own_loggers_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    before = list(logging.getLogger().handlers)
    for _ in range(2):
        log_to_stderr()
    assert logging.getLogger().handlers == before
    logging.getLogger("graphkiln").info("once")
    for name in ("onnx_ir.passes", "onnxscript.version_converter"):
        assert not logging.getLogger(name).isEnabledFor(logging.WARNING)
    assert capsys.readouterr().err == "graphkiln: once\n"


def test_log_on_a_full_disk() -> None:
    program = (
        "import logging; from graphkiln.cli.console import log_to_stderr; log_to_stderr(); "
        "logging.getLogger('graphkiln.server').warning('lost'); print('alive')"
    )
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=full, check=False)
    assert ended.stdout == b"alive\n"


def test_failed_output_raises_once() -> None:
    program = (
        "from graphkiln.cli.console import print_result\n"
        "try:\n    print_result('lost')\nexcept OSError:\n    print_result('also')\n"
    )
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_undecodable_file_names_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="utf-8"))
    escape_undecodable()
    print(os.fsdecode(b"caf\xc3\xa9-\xff"), flush=True)
    assert written.getvalue() == "café-\\udcff\n".encode()


def test_tables_csv_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("a", "b"), [("[red]x[/]", "")])
    assert "[red]x[/]" in capsys.readouterr().out  # text, not markup
    print_table(("a",), [], empty="nothing")
    print_csv(("a", "b"), [("x,y", 1)])
    assert capsys.readouterr().out == 'nothing\na,b\r\n"x,y",1\r\n'
    print_json({"score": math.nan})
    assert json.loads(capsys.readouterr().out) == {"score": None}


# `--html`.


def test_invalid_report_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_html(None)
    check_html(tmp_path / "report.html")
    with pytest.raises(InvalidInput, match="there is no folder"):
        check_html(tmp_path / "none" / "report.html")
    with pytest.raises(InvalidInput, match="is a folder"):
        check_html(tmp_path)
    monkeypatch.setattr("os.access", lambda path, *_, **__: Path(path) != tmp_path)
    with pytest.raises(InvalidInput, match="not writable"):
        check_html(tmp_path / "report.html")


def test_missing_library_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(EngineUnavailable, match=r"graphkiln\[report\]"):
        check_html(tmp_path / "report.html")


def test_command_line_and_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["graphkiln", "bench", "--model", "a b"])
    assert command_line() == "graphkiln bench --model 'a b'"
    monkeypatch.setattr(sys, "argv", ["graphkiln", "bench", "--url", "http://me:s3cret@h:1"])
    assert command_line() == "graphkiln bench --url http://h:1"
    assert list(facts()) == ["this machine", "graphkiln", "date"]
    assert all(facts().values())
