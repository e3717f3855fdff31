"""The README's commands and figures, and the cheap ones of the guides; tests/documentation runs whole pages."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import manual
import pytest
from running import START_TIMEOUT_S, Server, free_ports, run_here

pytestmark = pytest.mark.server

LABELS = ("three", "four", "seven", "eight", "nine")
# The digit with the highest score in each scene.
DETECTED = {1: "eight", 2: "one", 3: "one"}

Shown = Callable[[str, str], list[str]]


@pytest.fixture(scope="module")
def readme(repository: Path) -> str:
    return (repository / "README.md").read_text()


@pytest.fixture(scope="module")
def shown(repository: Path) -> Shown:
    """Find the commands of a page that match a pattern, relative to the checkout."""

    def commands(page: str, pattern: str) -> list[str]:
        blocks = [block for block in manual.blocks(repository / page) if block.language in ("bash", "text")]
        return [line for block in blocks for line in block.commands if re.search(pattern, line)]

    return commands


def on_ports_of(server: Server, text: str) -> str:
    """Change the ports of a command to those of a server."""
    return text.replace("localhost:8000", f"127.0.0.1:{server.http_port}").replace(
        "localhost:8001", f"127.0.0.1:{server.grpc_port}"
    )


def run(command: str, cwd: Path, server: Server, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    program, *words = shlex.split(on_ports_of(server, command), comments=True)
    if program.endswith("graphkiln") and not re.search(r"[|<>&;$*]", command):
        return run_here(*words, cwd=cwd, env={"GRAPHKILN_URL": server.url})
    called = f"'{sys.executable}' -m graphkiln.cli "
    text = re.sub(r"(?:\.venv/bin/)?graphkiln (?=[a-z])", called, on_ports_of(server, command), count=1)
    return subprocess.run(
        ["bash", "-c", text],
        cwd=cwd,
        env={**os.environ, "GRAPHKILN_URL": server.url},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )  # fmt: skip


def test_every_command_of_the_readme_is_tested(shown: Shown) -> None:
    quickstart, classify = shown("README.md", r"^(\./|\.venv|graphkiln )")
    assert quickstart == "./scripts/quickstart --keep"
    assert classify == ".venv/bin/graphkiln classify docs/digits --model digits --top-k 3"
    build, start = shown("README.md", "^docker ")
    assert build == "docker build --target triton -t graphkiln-triton ."  # scripts/test-image --triton
    assert start.endswith(':/models:ro" graphkiln-triton')
    assert shown("README.md", "") == [quickstart, classify, build, start]


def test_readme_takes_two_minutes(readme: str) -> None:
    """Two commands, one table, a picture; 200 words a minute, beside figures and links."""
    prose = re.sub(r"^[|`!].*$|\]\([^)]*\)", "", readme, flags=re.MULTILINE)
    assert len(re.findall(r"\w{2,}", prose)) < 450
    assert readme.count("<!-- docs/benchmarks/") == 1


def test_docker_commands_are_those_of_the_image_test(shown: Shown, repository: Path) -> None:
    tested = (repository / "tests" / "image" / "test_image.py").read_text()
    build, start = shown("docs/how-to/serve.md", "^docker ")
    assert "--target cpu" in build
    assert "\nbuild cpu " in (repository / "scripts" / "test-image").read_text()
    assert ":/models:ro" in start
    assert ":/models:ro" in tested


def test_curl_command(shown: Shown, server: Server, repository: Path) -> None:
    (command,) = shown("docs/how-to/serve.md", "^curl")
    finished = run(command, repository, server)
    assert "200 OK" in finished.stderr, finished.stderr


@pytest.mark.parametrize(("page", "count"), [("README.md", 1), ("docs/how-to/requests.md", 2)])
def test_classify_commands(page: str, count: int, shown: Shown, server: Server, repository: Path) -> None:
    commands = shown(page, "graphkiln classify")
    assert len(commands) == count
    for command in commands:
        finished = run(command, repository, server)
        assert finished.returncode == 0, finished.stderr
        assert "seven" in finished.stdout


def test_conversion_commands(shown: Shown, server: Server, repository: Path, tmp_path: Path) -> None:
    (tmp_path / "model_repository").symlink_to(repository / "model_repository")
    commands = shown("docs/how-to/convert.md", "model_repository|models/fast")
    ran = [run(command, tmp_path, server) for command in commands]
    assert [finished.returncode for finished in ran] == [0, 0, 0, 0], [finished.stderr for finished in ran]
    assert "softmax" in ran[0].stdout
    assert ran[1].stdout.count("- PASS") == 2
    assert "4 Conv" in ran[2].stdout
    assert '"CycloneDX"' in (tmp_path / "fast.cdx.json").read_text()


def test_oneflow_commands(shown: Shown, server: Server, repository: Path, tmp_path: Path) -> None:
    (tmp_path / "tests").symlink_to(repository / "tests")
    unpack, convert = shown("docs/how-to/oneflow.md", "-m zipfile|oneflow:")
    assert run(unpack.replace("python", f"'{sys.executable}'", 1), tmp_path, server).returncode == 0
    finished = run(convert, tmp_path, server)
    assert finished.returncode == 0, finished.stderr
    assert "batch sizes 1, 3 - PASS" in " ".join(finished.stdout.replace("\u2502", " ").split())
    assert (tmp_path / "models" / "tokens" / "1" / "model.onnx").is_file()


def test_lowering_commands(shown: Shown, server: Server, repository: Path) -> None:
    commands = shown("docs/how-to/engines.md", "^graphkiln (explain|lower|cache)")[:3]
    ran = [run(command, repository, server) for command in commands]
    assert [finished.returncode for finished in ran] == [0, 0, 0], [finished.stderr for finished in ran]
    assert "serves: " in ran[0].stdout
    assert "products: 5 in fp32" in ran[1].stdout
    assert "digits/1" in ran[2].stdout


@pytest.mark.slow
def test_insufficient_training_writes_nothing(repository: Path, tmp_path: Path) -> None:
    """A hundredth of the steps. `scripts/train-story` runs this in the environment it needs."""
    words = (
        "--model",
        "resnet18",
        "--image-size",
        "32",
        "--effort",
        "0.01",
        "--output",
        str(tmp_path / "w.safetensors"),
    )
    module = "training.train_story"
    finished = subprocess.run(
        [sys.executable, "-m", module, *words], capture_output=True, text=True, timeout=200, check=False
    )
    assert finished.returncode == 1
    assert "nothing written" in finished.stderr
    assert list(tmp_path.iterdir()) == []
    assert f"-m {module}" in (repository / "scripts" / "train-story").read_text()


@pytest.fixture
def _benchmarks(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the benchmark's modules importable."""
    monkeypatch.syspath_prepend(str(repository / "scripts" / "benchmarks"))


@pytest.mark.usefixtures("_benchmarks")
def test_benchmark_all_writes_the_page_and_the_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two instant benchmarks: `all` saves both as JSON and writes page and tables from that."""
    import benchmark
    import reporting

    stubs = {name: (lambda *_: [{"set-up": "one", "ratio": 1.5}], f"what {name} is") for name in ("first", "second")}
    monkeypatch.setattr(benchmark, "BENCHMARKS", stubs)
    monkeypatch.setattr(reporting, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(reporting, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(reporting, "MARKED", (tmp_path / "README.md",))
    (tmp_path / "README.md").write_text("a\n<!-- docs/benchmarks/first.json: ratio, set-up -->\nold\n<!-- end -->\nb\n")
    monkeypatch.setattr(sys, "argv", ["benchmark", "all", "--rounds", "2"])
    benchmark.main()
    page = (tmp_path / "page.md").read_text()
    assert "## first: what first is\n\n    scripts/benchmark first --rounds 2 --seconds 3\n" in page
    assert "| set-up | ratio |\n| --- | ---: |\n| one | 1.5 |" in page
    assert "commit" in page
    table = "| ratio | set-up |\n| ---: | --- |\n| 1.5 | one |\n"
    begin = "a\n<!-- docs/benchmarks/first.json: ratio, set-up -->\n"
    assert (tmp_path / "README.md").read_text() == f"{begin}{table}<!-- end -->\nb\n"


@pytest.mark.usefixtures("_benchmarks")
def test_figures_are_those_of_the_results(repository: Path) -> None:
    """Tables of pages are generated from JSON."""
    import reporting

    for page in reporting.MARKED:
        text = page.read_text()
        assert reporting.fill_tables(text) == text
    assert all("<!-- docs/benchmarks/" in page.read_text() for page in reporting.MARKED)
    assert reporting.render_page() == (repository / "docs" / "benchmarks.md").read_text()


def test_serve_command_is_the_one_of_the_tests(shown: Shown) -> None:
    """`running.Serving` starts exactly this, with free ports added."""
    first, *_ = shown("docs/how-to/serve.md", "^graphkiln serve")
    assert first == "graphkiln serve --model-store model_repository"


def test_python_example(server: Server, repository: Path) -> None:
    program = next(
        block.text for block in manual.blocks(repository / "docs/how-to/requests.md") if block.language == "python"
    )
    assert len(program.strip().splitlines()) <= 12
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", on_ports_of(server, program)],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert "label='seven'" in finished.stdout
    for label in LABELS:
        assert re.search(rf"{label}\.png: {label} 0\.\d", finished.stdout)


def test_every_named_path_exists(repository: Path) -> None:
    named = {
        path
        for page in ("README.md", "CONTRIBUTING.md")
        for path in re.findall(
            r"`((?:scripts|model_repository|docs|backend|client|converters|tests)/[\w/-]*)`",
            (repository / page).read_text(),
        )
    }
    assert len(named) > 5
    assert [path for path in sorted(named) if not (repository / path).exists()] == []


@pytest.mark.slow
def test_quickstart_from_a_fresh_copy_in_a_path_with_spaces_twice(repository: Path, tmp_path: Path) -> None:
    """A copy of the tracked files, another working directory, a new virtual environment."""
    copy = tmp_path / "a fresh copy"
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=repository, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for name in filter(None, tracked):
        if (repository / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(repository / name, copy / name)
    for attempt in range(2):
        begun = time.monotonic()
        finished = subprocess.run(
            [str(copy / "scripts" / "quickstart")],
            cwd=tmp_path,
            env={**os.environ, "PYTHON": sys.executable},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        print(f"quickstart, attempt {attempt + 1}: {time.monotonic() - begun:.1f} s")
        assert finished.returncode == 0, finished.stderr
        for label in LABELS:
            assert f"{label}.png" in finished.stdout
        assert "ms" in finished.stdout
        assert all(re.search(rf"│ {scene}\.png +│ {label}", finished.stdout) for scene, label in DETECTED.items())
        for words in ("serving model_repository", "waiting until", "classifying", "finding", "stopping", "done"):
            assert words in finished.stderr
        assert ("making a virtual environment" in finished.stderr) == (attempt == 0)


def test_quickstart_keeps_serving_until_it_is_stopped(repository: Path, tmp_path: Path) -> None:
    """`--keep` uses the usual ports, which the test replaces."""
    ports = free_ports(4)
    script = (repository / "scripts" / "quickstart").read_text()
    moved = script
    for usual, free in (
        ("ports=(8000 8001 8002)", f"ports=({ports[0]} {ports[1]} {ports[2]})"),
        ("page=(--page)", f"page=(--page 127.0.0.1:{ports[3]})"),
    ):
        assert usual in moved
        moved = moved.replace(usual, free)
    copy = repository / "scripts" / f".quickstart-{ports[0]}"
    copy.write_text(moved)
    copy.chmod(0o755)
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen([str(copy), "--keep"], stdout=file, stderr=file, cwd=tmp_path)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while "still serving" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
        assert "stopped" in log.read_text()
    finally:
        process.terminate()  # where it did not come so far
        process.wait(60)
        copy.unlink()


@pytest.mark.parametrize(("arguments", "code", "words"), [(["--help"], 0, "--keep"), (["--kep"], 2, "--kep")])
def test_quickstart_help_and_unknown_option(repository: Path, arguments: list[str], code: int, words: str) -> None:
    finished = subprocess.run(
        [str(repository / "scripts" / "quickstart"), *arguments], capture_output=True, text=True, check=False
    )
    assert finished.returncode == code
    assert words in finished.stdout + finished.stderr
