"""Execute the programs of a documentation page in order, in a folder, with real servers."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import manual
from running import Server, Serving, free_ports

_TIMEOUT_S = 900
_READY_WITHIN_S = 300
# Commands whose exit code depends on the machine: on a busy one no p99 may be proven.
_EXIT_CODES = {"tune": (0, 1), "doctor": (0, 1)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A command that was run.

    Attributes:
        command: Command as on the page.
        printed: Its output, of both streams.
        seconds: Duration; of a server, until it was ready.
    """

    command: str
    printed: str
    seconds: float


@dataclass
class Walkthrough:
    """A reader in a folder.

    Attributes:
        folder: Working folder of the commands.
        edits: Text of a page -> faster replacement.
        steps: Commands that were run.
    """

    folder: Path
    edits: Mapping[str, str] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    server: Server | None = None

    def __enter__(self) -> Walkthrough:
        self._stack = ExitStack()
        self._background: list[tuple[str, float, subprocess.Popen[str]]] = []
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for _, _, process in self._background:
            process.kill()
            process.wait()
        self._stack.close()

    def bring(self, repository: Path, *names: str) -> Walkthrough:
        """Copy folders of the checkout, which the reader of a guide has."""
        for name in names:
            shutil.copytree(repository / name, self.folder / name)
        return self

    def follow(self, page: Path) -> None:
        """Run all blocks of a page in order."""
        for block in manual.blocks(page):
            self.do(block)
        self.wait()

    def do(self, block: manual.Block) -> None:
        """Write the file of a block, or run its program or commands."""
        if block.title:
            file = self.folder / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
        elif block.language == "python":
            self._execute(block.place, [sys.executable, "-c", self._moved(block.text)], (0,))
        elif block.language == "bash":
            for command in block.commands:
                self.run(command)

    def run(self, command: str) -> None:
        """Run a command; a server and a command with `&` continue in the background."""
        done = self._edited(command)
        if done.startswith("graphkiln serve "):
            self._serve(command, shlex.split(done)[2:])
        elif done.endswith(" &"):
            shell = self._shell(done.removesuffix(" &"))
            started = subprocess.Popen(
                shell,
                cwd=self.folder,
                env=self._environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            self._background.append((command, time.monotonic(), started))
        elif done == "graphkiln models":
            self._until_newest_are_ready()
            self._execute(command, self._shell(done), (0,))
        else:
            verb = done.split()[1] if done.startswith("graphkiln ") else ""
            self._execute(command, self._shell(done), _EXIT_CODES.get(verb, (0,)))

    def wait(self) -> None:
        """Wait for the commands in the background, which must succeed."""
        while self._background:
            command, begun, process = self._background.pop()
            printed, _ = process.communicate(timeout=_TIMEOUT_S)
            assert process.returncode == 0, f"{command}\n{printed}"
            self.steps.append(Step(command=command, printed=printed, seconds=time.monotonic() - begun))

    def printed(self, pattern: str) -> bool:
        """Search the output of all steps for a pattern."""
        return any(re.search(pattern, step.printed) for step in self.steps)

    def _serve(self, command: str, arguments: list[str]) -> None:
        self._stack.close()
        self._store = self.folder / arguments[arguments.index("--model-store") + 1]
        self._store_is_loaded = "--model-control-mode=explicit" not in arguments
        begun, (page_port,) = time.monotonic(), free_ports(1)
        given = [f"--page-address=127.0.0.1:{page_port}" if word == "--page" else word for word in arguments]
        self.server = self._stack.enter_context(Serving(self.folder, *given, cwd=self.folder))
        self.server.wait_ready()
        self.steps.append(Step(command=command, printed=self.server.log, seconds=time.monotonic() - begun))

    def _until_newest_are_ready(self) -> None:
        """Wait for the newest version of each model, as a reader who repeats the command."""
        deadline, missing = time.monotonic() + _READY_WITHIN_S, self._newest()
        while missing:
            assert time.monotonic() < deadline, f"not ready: {missing}\n{self.server and self.server.log}"
            listed = self._executed(self._shell("graphkiln models --json 2>/dev/null")).stdout
            states = json.loads(listed) if listed.startswith("[") else []
            missing -= {(each["name"], each["version"]) for each in states if each["state"] == "READY"}

    def _newest(self) -> set[tuple[str, str]]:
        """Name and newest version of each model in the served store; empty in explicit mode."""
        versions = [
            path for path in self._store.glob("*/[1-9]*") if path.is_dir() and not path.parent.name.startswith(".")
        ]
        newest: dict[str, int] = {}
        for path in versions:
            newest[path.parent.name] = max(int(path.name), newest.get(path.parent.name, 0))
        return {(name, str(number)) for name, number in newest.items()} if self._store_is_loaded else set()

    def _execute(self, command: str, words: list[str], codes: tuple[int, ...]) -> None:
        begun = time.monotonic()
        finished = self._executed(words)
        log = self.server.log[-2000:] if self.server else ""
        assert finished.returncode in codes, f"{command}\nended with {finished.returncode}:\n{finished.stdout}\n{log}"
        self.steps.append(Step(command=command, printed=finished.stdout, seconds=time.monotonic() - begun))

    def _executed(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=self.folder, env=self._environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip

    def _shell(self, command: str) -> list[str]:
        return ["bash", "-euo", "pipefail", "-c", self._moved(command)]

    def _edited(self, command: str) -> str:
        for shown, done in self.edits.items():
            command = command.replace(shown, done)
        return command.replace(".venv/bin/graphkiln ", "graphkiln ")

    def _moved(self, text: str) -> str:
        """Replace the ports of the page by those of the server."""
        if not self.server:
            return text
        ports = {"8000": self.server.http_port, "8001": self.server.grpc_port, "8002": self.server.metrics_port}
        return re.sub(r"(localhost|127\.0\.0\.1):(800[012])", lambda found: f"127.0.0.1:{ports[found[2]]}", text)

    def _environment(self) -> dict[str, str]:
        """Environment of the commands: this installation, a separate cache, no downloads of models."""
        return {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(self.folder / ".cache"),
            "HF_HUB_OFFLINE": "1",
            "RAY_AUTH_TOKEN": "0" * 64,  # otherwise Ray writes one into the home folder
            "COLUMNS": "120",
            **({"GRAPHKILN_URL": self.server.url} if self.server else {}),
        }
