"""`--log-format`: ours and tritonserver's."""

from __future__ import annotations

import os
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from graphkiln.cli import serve as module
from graphkiln.cli.serve import LogFormatOption, tritons_flags
from graphkiln_backend.triton.environment import LOG_FORMAT_VARIABLE

app = typer.Typer()


@app.command()
def verb(number: Annotated[int, typer.Option()] = 0, log_format: LogFormatOption = "text") -> None:
    typer.echo(f"{log_format} {number} {os.environ.get(LOG_FORMAT_VARIABLE, '')}")


@pytest.fixture(autouse=True)
def wrapped(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """How often standard error was made JSON."""
    calls: list[None] = []
    monkeypatch.setenv(LOG_FORMAT_VARIABLE, "text")  # so that it is as before afterwards
    monkeypatch.setattr(module, "log_as_json", lambda: calls.append(None))
    return calls


@pytest.mark.parametrize(("value", "flags"), [("text", []), ("json", []), ("ISO8601", ["--log-format=ISO8601"])])
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
