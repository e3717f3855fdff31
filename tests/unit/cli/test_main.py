"""The command: verbs, help, errors, exit codes and imports."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path

import pytest
from commands import RunVerb
from running import run_command
from typer.main import get_command

from graphkiln.cli import main as command
from graphkiln_backend.graph.errors import GraphkilnError, InvalidInput, ServerError

VERBS = (
    "serve", "convert", "adopt", "verify", "inspect", "openapi", "sign", "keygen", "push", "pull", "explain", "lower",
    "classify", "detect", "segment", "embed", "infer", "models", "load", "unload", "health", "doctor", "bench",
    "score", "replay", "story", "tune", "rollout", "cache",
)  # fmt: skip


class TestHelp:
    def test_help_lists_all_verbs(self, run: RunVerb) -> None:
        finished = run("--help")
        assert finished.code == 0
        listed = finished.out.partition("Commands:\n")[2].splitlines()
        assert finished.out.startswith("Usage: graphkiln [OPTIONS] COMMAND")
        assert [line.split()[0] for line in listed] == list(VERBS)
        too_long = [line for line in listed if line.endswith("...")]
        assert not too_long, "too long for one line"

    @pytest.mark.parametrize("verb", VERBS)
    def test_help_of_a_verb(self, run: RunVerb, verb: str) -> None:
        finished = run(verb, "--help")
        assert finished.code == 0
        assert f"Usage: graphkiln {verb}" in finished.out
        assert max(map(len, finished.out.splitlines())) <= 80
        assert "…" not in finished.out, "a name or an address is cut off"

    def test_no_verb_shows_help(self, run: RunVerb) -> None:
        finished = run()
        assert "Commands:" in finished.out + finished.err

    def test_summaries_are_those_of_the_verbs(self) -> None:
        verbs = get_command(command.application(command.VERBS)).commands  # type: ignore[attr-defined]
        summaries = {verb: each.get_short_help_str(80) for verb, each in verbs.items()}
        assert summaries == {verb: summary for verb, (_, summary) in command.VERBS.items()}

    def test_help_has_no_heavy_imports(self) -> None:
        """`graphkiln --help` answers in under 0.15 s on an idle machine."""
        program = (
            "import sys; sys.argv = ['graphkiln', '--help']\n"
            "from graphkiln.cli.main import main\n"
            "try: main()\n"
            "except SystemExit: pass\n"
            "print(*sys.modules, file=sys.stderr)"
        )
        loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stderr
        heavy = {
            "numpy", "PIL", "torch", "onnx", "onnx_ir", "onnxruntime", "openvino", "psutil", "aiohttp", "grpc",
            "tritonclient", "rich.markdown", "markdown_it", "pydantic", "yaml", "jinja2", "sklearn", "graphkiln.story",
            "graphkiln_converters", "graphkiln.cli.serve", "graphkiln_backend.triton",
        }  # fmt: skip
        assert not heavy & set(loaded.split())

    def test_completion_knows_the_options_of_verbs(self) -> None:
        asked = {"_GRAPHKILN_COMPLETE": "complete_bash", "COMP_WORDS": "graphkiln health --wa", "COMP_CWORD": "2"}
        completed = subprocess.run(
            [Path(sys.executable).with_name("graphkiln")],
            env=os.environ | asked,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert "--wait" in completed.stdout.split()

    def test_misspelled_verb_is_suggested(self, run: RunVerb) -> None:
        assert "Did you mean 'classify'?" in run("clasify").err


def test_command_imports_only_its_verb() -> None:
    program = (
        "import sys; sys.argv = ['graphkiln', 'health', '--help']\n"
        "from graphkiln.cli.main import VERBS, main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*{each for each, _ in VERBS.values() if f'graphkiln.cli.{each}' in sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert "Usage: graphkiln health" in done.stdout
    assert done.stderr.split() == ["models"]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InvalidInput("no image", hint="name one"), 2, "graphkiln: no image (name one)\n"),
        (GraphkilnError("[red]text[/]"), 1, "graphkiln: [red]text[/]\n"),
        (ServerError("\x1b[2Jgone\r\nsecond"), 1, "graphkiln: \\x1b[2Jgone\\r\nsecond\n"),
        (PermissionError(13, "Permission denied", "/a/b"), 1, "graphkiln: /a/b: Permission denied\n"),
        (FileNotFoundError(2, "No such file"), 1, "graphkiln: the working folder was deleted: "),
        (MemoryError("for 8 TiB"), 1, "graphkiln: there is not enough memory: for 8 TiB\n"),
    ],
)
def test_error_is_one_line_and_exit_code(
    run: RunVerb, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, line: str
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(command, "application", lambda _: fail)
    finished = run("models")
    assert (finished.code, finished.out) == (code, "")
    assert finished.err.startswith(line)


def test_bugs_raise_and_log_records_are_shown(run: RunVerb, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        logging.getLogger("graphkiln.cache").info("built")
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(command, "application", lambda _: fail)
    with pytest.raises(ZeroDivisionError):
        run("models")
    monkeypatch.setattr(command, "application", lambda _: lambda **_: logging.getLogger("graphkiln.cache").info("two"))
    assert run("lower").err.endswith("graphkiln: two\n")


def test_grpc_verbosity(run: RunVerb, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(command, "application", lambda _: lambda **_: seen.append(os.environ.get("GRPC_VERBOSITY")))
    monkeypatch.setenv("GRPC_VERBOSITY", "debug")
    run("models")
    monkeypatch.delenv("GRPC_VERBOSITY")
    run("models")
    assert seen == ["debug", "NONE"]


def test_python_m() -> None:
    finished = run_command("cache", "list", "--cache", "off")
    assert finished.returncode == 1
    assert finished.stderr.startswith("graphkiln: the cache is off")


def test_warnings_of_pillow_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings are errors in tests."""

    def warn(**_: object) -> None:
        warnings.warn_explicit("large", UserWarning, "Image.py", 1, module="PIL.Image")

    monkeypatch.setattr(command, "application", lambda _: warn)
    command.main()


def test_version(run: RunVerb) -> None:
    finished = run("--version")
    assert (finished.code, finished.out) == (0, f"graphkiln {metadata.version('graphkiln')}\n")


@pytest.mark.parametrize(
    ("reader", "error"), [("full", "graphkiln: [Errno 28] No space left on device\n"), ("gone", "")]
)
def test_failed_output_at_exit(reader: str, error: str) -> None:
    """By default, Python exits with code 120 and prints an ignored exception."""
    program = (
        "from graphkiln.cli import main as command\n"
        "command.application = lambda _: lambda **_: print('lost')\n"
        "command.main()"
    )
    reading, writing = os.pipe()
    os.close(reading)
    with Path("/dev/full").open("wb") as full, os.fdopen(writing, "wb") as pipe:
        ended = subprocess.run(
            [sys.executable, "-c", program],
            stdout=full if reader == "full" else pipe,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert (ended.returncode, ended.stderr) == (1, error)
