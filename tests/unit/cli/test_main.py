"""The command as a whole: its verbs, its help, its errors and exit codes, and what its start imports."""

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

from graphkiln.cli import main as command
from graphkiln_backend.graph.errors import GraphkilnError, InvalidInput, ServerError

VERBS = (
    "serve", "convert", "verify", "inspect", "sign", "keygen", "push", "pull", "explain", "lower", "classify", "detect",
    "segment", "embed", "infer", "models", "load", "unload", "health", "doctor", "bench", "score", "story",
    "tune", "cache",
)  # fmt: skip


def registered() -> dict[str, str]:
    """First lines of the verbs' docstrings, by verb."""
    return {
        verb.name or verb.callback.__name__: str(verb.callback.__doc__).splitlines()[0]
        for verb in command.app.registered_commands
        if verb.callback
    }


class TestHelp:
    def test_lists_every_verb_in_one_line(self, run: RunVerb) -> None:
        finished = run("--help")
        assert finished.code == 0
        listed = finished.out.partition("Commands:\n")[2].splitlines()
        assert finished.out.startswith("Usage: graphkiln [OPTIONS] COMMAND")
        assert [line.split()[0] for line in listed] == list(VERBS)
        too_long = [line for line in listed if line.endswith("...")]
        assert not too_long, "the first line of a docstring does not fit the list"

    @pytest.mark.parametrize("verb", VERBS)
    def test_of_a_verb_says_what_it_does(self, run: RunVerb, verb: str) -> None:
        finished = run(verb, "--help")
        assert finished.code == 0
        assert registered().get(verb, "List, prune and verify").rstrip(".") in " ".join(finished.out.split())
        assert max(map(len, finished.out.splitlines())) <= 80

    def test_without_a_verb_is_the_help(self, run: RunVerb) -> None:
        finished = run()
        assert "Commands:" in finished.out + finished.err

    def test_imports_neither_rich_nor_what_computes(self) -> None:
        """`graphkiln --help` answers in under 0.3 s."""
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
            "tritonclient", "rich.markdown", "markdown_it", "pydantic", "jinja2", "sklearn", "graphkiln.story",
        }  # fmt: skip
        assert not heavy & set(loaded.split())


def test_a_command_imports_its_own_verb_alone() -> None:
    program = (
        "import sys; sys.argv = ['graphkiln', 'health', '--help']\n"
        "from graphkiln.cli.main import VERBS, main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*(verb for verb in VERBS if f'graphkiln.cli.{VERBS[verb]}' in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert "Usage: graphkiln health" in done.stdout
    assert done.stderr.split() == ["health"]


class TestMistakes:
    @pytest.mark.parametrize(
        ("words", "named"),
        [
            (["nonsense"], "nonsense"),
            (["--nonsense"], "--nonsense"),
            (["models", "load", "unload", "--nonsense"], "--nonsense"),
            (["models", "load", "unload", "extra"], "extra"),
            (["cache", "nonsense"], "nonsense"),
            (["bench", "--model", "m", "--duration", "long"], "--duration"),
        ],
    )
    def test_of_the_command_line_are_named(self, run: RunVerb, words: list[str], named: str) -> None:
        finished = run(*words)
        assert finished.code == 2
        assert finished.out == ""
        assert finished.err.splitlines()[-1].startswith("Error: ")
        assert named in finished.err.splitlines()[-1]


class TestErrors:
    def raising(self, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
        def fail(**_: object) -> None:
            raise error

        monkeypatch.setattr(command, "application", lambda _: fail)

    @pytest.mark.parametrize(
        ("error", "code", "line"),
        [
            (ServerError("busy"), 1, "graphkiln: busy"),
            (InvalidInput("no image", hint="name one"), 2, "graphkiln: no image"),
            (GraphkilnError("[red]text[/]"), 1, "graphkiln: [red]text[/]"),
        ],
    )
    def test_of_ours_are_one_line_and_a_code(
        self, run: RunVerb, monkeypatch: pytest.MonkeyPatch, error: GraphkilnError, code: int, line: str
    ) -> None:
        self.raising(monkeypatch, error)
        finished = run("models")
        assert finished.code == code == error.exit_code
        assert finished.out == ""
        assert finished.err.startswith(line)
        assert len(finished.err.splitlines()) == 1
        assert error.hint in finished.err if error.hint else True

    def test_of_others_are_not_hidden(self, run: RunVerb, monkeypatch: pytest.MonkeyPatch) -> None:
        self.raising(monkeypatch, ZeroDivisionError("a bug"))
        with pytest.raises(ZeroDivisionError):
            run("models")

    def test_what_packages_log_is_shown(self, run: RunVerb, monkeypatch: pytest.MonkeyPatch) -> None:
        def log(**_: object) -> None:
            logging.getLogger("graphkiln.cache").info("built")

        monkeypatch.setattr(command, "application", lambda _: log)
        assert run("lower").err == "graphkiln: built\n"


@pytest.mark.parametrize(("given", "kept"), [(None, "NONE"), ("debug", "debug")])
def test_grpc_logs_nothing_unless_it_is_asked_to(
    run: RunVerb, monkeypatch: pytest.MonkeyPatch, given: str | None, kept: str
) -> None:
    seen: list[str | None] = []
    monkeypatch.setenv("GRPC_VERBOSITY", given or "removed at once")
    if given is None:
        monkeypatch.delenv("GRPC_VERBOSITY")
    monkeypatch.setattr(command, "application", lambda _: lambda **_: seen.append(os.environ.get("GRPC_VERBOSITY")))
    run("models")
    assert seen == [kept]


def test_python_m_is_the_same_command() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "graphkiln.cli", "cache", "list", "--cache", "off"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 1
    assert finished.stderr.startswith("graphkiln: the cache is off")


class TestWhatTheMachineSays:
    """One line, not a traceback."""

    @pytest.mark.parametrize(
        ("error", "line"),
        [
            (PermissionError(13, "Permission denied", "/a/b"), "graphkiln: /a/b: Permission denied\n"),
            (OSError("no words"), "graphkiln: no words\n"),
            (FileNotFoundError(2, "No such file or directory"), "graphkiln: the working folder is no longer there: "),
            (MemoryError(), "graphkiln: there is not enough memory\n"),
            (MemoryError("for 8 TiB"), "graphkiln: there is not enough memory: for 8 TiB\n"),
            (ServerError("\x1b[2Jgone\r\nsecond"), "graphkiln: \\x1b[2Jgone\\r\nsecond\n"),
        ],
    )
    def test_in_one_line(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, line: str
    ) -> None:
        def fail(**_: object) -> None:
            raise error

        monkeypatch.setattr(command, "application", lambda _: fail)
        with pytest.raises(SystemExit) as caught:
            command.main()
        assert caught.value.code == 1
        assert capsys.readouterr().err.startswith(line)


def test_what_pillow_says_to_programmers_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an image of 100 million pixels, a warning of its own, with the path of its code. In tests it is an error."""

    def warn(**_: object) -> None:
        warnings.warn_explicit("large", UserWarning, "Image.py", 1, module="PIL.Image")

    monkeypatch.setattr(command, "application", lambda _: warn)
    command.main()


def test_the_version(run: RunVerb) -> None:
    finished = run("--version")
    assert (finished.code, finished.out) == (0, f"graphkiln {metadata.version('graphkiln')}\n")


@pytest.mark.parametrize(
    ("reader", "said"), [("full", "graphkiln: [Errno 28] No space left on device\n"), ("gone", "")]
)
def test_output_that_cannot_be_written_at_the_end(reader: str, said: str) -> None:
    """Python's own way is a code of 120, and two lines about an exception that is ignored."""
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
    assert (ended.returncode, ended.stderr) == (1, said)
