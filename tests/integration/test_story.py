"""`graphkiln story` with a small trained model: all steps, the report in a browser, interruptions, errors."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import signal
import statistics
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import story_model
import torch
from browsing import CHROMIUM, browse
from PIL import Image
from running import COMMAND, run_command
from safetensors.torch import save_file

from graphkiln.story.digits import split_digits
from graphkiln_backend.engines import hardware
from graphkiln_backend.graph.decoding import decode
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import load_sample

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

SOURCE = f"python:{Path(story_model.__file__)}:net"
CHAIN = ["eager", "static", "reduced", "parallel", "compiled", "served"]

# Precisions that this CPU has no instructions for: they may be slower than fp32, or refused with a reason.
SLOW_HERE = {
    key
    for key, is_slow in (
        ("int8", hardware.saturates_products_of_bytes()),
        ("mixed", bool(hardware.missing_instructions(Precision.BF16))),
    )
    if is_slow
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    training, _ = split_digits()
    spec = decode(Preprocess, story_model.PREPROCESS)
    pixels = torch.from_numpy(np.stack([load_sample(jpeg, spec) for jpeg in training.jpegs]))
    path = tmp_path_factory.mktemp("weights") / "digits.safetensors"
    save_file(story_model.trained(pixels, torch.from_numpy(training.targets)), path)
    return path


def arguments(weights: Path, *more: str, seconds: float = 1.0, source: str = SOURCE) -> list[str]:
    model = ["--model", source, "--image-size", str(story_model.IMAGE_SIZE), "--weights", str(weights)]
    return ["story", *model, "--preprocess", json.dumps(story_model.PREPROCESS), "--seconds", str(seconds), *more]


def run_story(folder: Path, weights: Path, *more: str, **facts: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, *arguments(weights, *more, **facts)],
        env={**os.environ, "XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert not leftovers(folder), "a story leaves no process behind"
    return done


def leftovers(folder: Path) -> list[str]:
    """Find remaining workers and servers of a story by their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("XDG_CACHE_HOME") == str(folder):
                found.append(" ".join(process.cmdline()))
    return found


@pytest.fixture(scope="module")
def whole(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The `--json` output of a complete story."""
    folder = tmp_path_factory.mktemp("story")
    done = run_story(folder, weights, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def reported(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The `--json` output and the report of the steps without a server."""
    folder = tmp_path_factory.mktemp("reported")
    done = run_story(folder, weights, "--json", "--html", str(folder / "report.html"), "--only", "static")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), folder / "report.html"


class TestWholeStory:
    def test_every_step_of_the_chain_is_proven_and_measured(self, whole: dict[str, Any]) -> None:
        steps = {step["key"]: step for step in whole["steps"]}
        for key in CHAIN:
            assert steps[key]["counts"], (steps[key]["refused"], steps[key]["judgment"])
            assert steps[key]["per_second"] > 0
            assert steps[key]["p99_ms"] >= steps[key]["p50_ms"] > 0
            assert steps[key]["memory_mb"] > 10
            assert steps[key]["cores"] > 0
        assert [steps[key]["step"] for key in CHAIN] == [0, 1, 2, 3, 4, 5]
        assert [steps[key]["source"] for key in CHAIN] == ["", "1.25", "2.33", "4.6", "1.6-1.64", ""]
        assert whole["precision"] == "int8" or "int8" in SLOW_HERE

    def test_predictions_match_eager_pytorch(self, whole: dict[str, Any]) -> None:
        for step in whole["steps"]:
            if judged := step["judgment"]:
                assert judged["passed"], step
                assert judged["samples"] == 200
                assert not judged["undecided"], step
                assert judged["right"] > 0.9
                assert judged["interval"][0] < judged["same"] / 200 <= judged["interval"][1]
        steps = {step["key"]: step["judgment"] for step in whole["steps"]}
        assert steps["eager"]["error"] == 0
        assert 0 < steps["reduced"]["error"] < 1e-5
        errors = [steps[key]["error"] for key in ("mixed", "int8") if steps[key] or key not in SLOW_HERE]
        assert errors == sorted(errors)
        assert all(error > 1e-4 for error in errors)  # they really compute in fewer bits
        assert steps["static"]["gradient_error"] < 1e-4

    def test_switches_are_measured(self, whole: dict[str, Any]) -> None:
        steps = {step["key"]: step for step in whole["steps"] if step["switch"]}
        assert set(steps) == {"search", "engine", "mixed", "pad", "add", "int8"}
        assert steps["search"]["refused"] == "cuDNN's search needs a GPU"
        for key in ("engine", "mixed", "pad", "add", "int8"):
            if steps[key]["own"] is None:
                assert key in SLOW_HERE, steps[key]
                assert steps[key]["refused"], steps[key]
                continue
            assert steps[key]["own"] > 0, steps[key]
            assert steps[key]["beside"] == "parallel"
            assert steps[key]["cumulative"] is None

    def test_factors_are_those_of_the_rates(self, whole: dict[str, Any]) -> None:
        steps = {step["key"]: step for step in whole["steps"]}
        for key, factor, before in (("reduced", "own", "static"), ("served", "cumulative", "eager")):
            rates, reference = steps[key]["rounds"], steps[before]["rounds"]
            ratios = [rates[number] / reference[number] for number in rates.keys() & reference.keys()]
            assert steps[key][factor] == pytest.approx(statistics.median(ratios), rel=1e-9)
            assert steps[key]["per_second"] == pytest.approx(statistics.median(rates.values()), rel=1e-9)

    def test_commands_repeat_a_step(self, whole: dict[str, Any], tmp_path: Path) -> None:
        (served,) = [step for step in whole["steps"] if step["key"] == "served"]
        convert = served["commands"][0].replace("/try", f"/{tmp_path.name}")
        done = subprocess.run(
            [*COMMAND, *shlex.split(convert)[1:]], capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "proof" in done.stdout


class TestReport:
    """The report of a real story; tests/integration/test_reports.py covers all kinds of rows and charts."""

    @pytest.mark.skipif(CHROMIUM is None, reason="needs chromium (scripts/test installs it as root on Debian)")
    @pytest.mark.parametrize("width", [1100, 390])
    def test_report_in_a_browser(self, reported: tuple[dict[str, Any], Path], tmp_path: Path, width: int) -> None:
        """Check that charts are not empty and nothing overflows."""
        report = reported[1].read_text()
        shown = browse(
            report, tmp_path, width, {"bars": "#factors rect", "dots": "#latencies .dot", "rows": "#speed tr"}
        )
        measured = [step for step in reported[0]["steps"] if step["per_second"] is not None]
        assert shown.pop("smallest") >= 10, "letters in a chart, in pixels"
        assert shown == {
            "overflow": 0,
            "outside": [],
            "bars": len(measured),
            "dots": len(measured),
            "rows": len(measured) + 1,
            "title": f"{SOURCE}: the acceleration story",
        }
        colors = Image.open(tmp_path / "shot.png").convert("RGB").getcolors(1 << 24)
        assert colors is not None
        assert len(colors) > 20

    def test_report_is_one_file(self, reported: tuple[dict[str, Any], Path]) -> None:
        report = reported[1].read_text()
        assert "https://" not in report
        assert "<link" not in report
        assert "graphkiln convert" in report
        assert reported[0]["facts"]["machine"] in report.replace("&#39;", "'")


class TestInterruption:
    def test_ctrl_c_and_resume(self, weights: Path, tmp_path: Path) -> None:
        more = arguments(weights, "--only", "reduced", "--json", seconds=3)
        process = subprocess.Popen(
            [*COMMAND, *more],
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509 - background runs ignore it
        )
        assert process.stderr
        for line in process.stderr:
            if "images/s" in line:
                process.send_signal(signal.SIGINT)
                break
        printed, errors = process.communicate(timeout=120)
        assert process.returncode == 130, errors
        assert "--resume" in errors
        kept = self.rounds(tmp_path)
        assert 1 <= sum(kept.values()) < 10
        assert {step["key"] for step in json.loads(printed)["steps"] if step["per_second"]} <= {"eager", "reduced"}
        assert not leftovers(tmp_path)

        done = run_story(tmp_path, weights, "--only", "reduced", "--resume", "--json", seconds=3)
        assert done.returncode == 0, done.stderr
        assert "proving" not in done.stderr  # what was proven is not proven again
        assert done.stderr.count("images/s") == 10 - sum(kept.values())
        assert self.rounds(tmp_path) == {"eager": 5, "reduced": 5}

    @staticmethod
    def rounds(folder: Path) -> dict[str, int]:
        (path,) = folder.glob("graphkiln-story/*/record.json")
        return {key: len(seen["rounds"]) for key, seen in json.loads(path.read_text())["seen"].items()}

    def test_progress_display(self, weights: Path, tmp_path: Path) -> None:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [*COMMAND, *arguments(weights, "--only", "reduced", "--json", seconds=5)],
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path), "COLUMNS": "100", "TERM": "xterm"},
            stdout=subprocess.DEVNULL,
            stderr=theirs,
        )
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the end of a terminal is an error on Linux
            while part := os.read(ours, 65536):
                shown += part
        os.close(ours)
        assert process.wait(60) == 0, shown.decode()
        lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode()).splitlines()
        assert any(re.search(r"^.?reduced +\S+ +0:00:0\d .*images/s", line.strip()) for line in lines), lines

    def test_there_is_nothing_to_resume(self, weights: Path, tmp_path: Path) -> None:
        done = run_story(tmp_path, weights, "--resume")
        assert done.returncode == 1
        assert "cannot resume" in done.stderr
        assert "without --resume" in done.stderr


class TestGradient:
    def test_gradient_stays_in_every_graph(self, weights: Path, tmp_path: Path) -> None:
        source = SOURCE.replace(":net", ":unpadded")
        more = ("--gradient", "--only", "static,parallel,compiled,served", "--json")
        done = run_story(tmp_path, weights, *more, source=source)
        assert done.returncode == 0, done.stderr
        steps = {step["key"]: step for step in json.loads(done.stdout)["steps"]}
        for key in ("static", "reduced", "parallel", "compiled", "served"):
            assert steps[key]["counts"], (steps[key]["refused"], steps[key]["judgment"])
            assert steps[key]["judgment"]["gradient_error"] is not None


class TestWrongAnswers:
    def test_changed_predictions_do_not_count(
        self, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Corrupt the predictions of one variant; the policy must reject it, and the chain continues without it."""
        from graphkiln.story import runner
        from graphkiln.story.variants import StoryRequest, this_platform

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        request = StoryRequest(
            source=SOURCE, image_size=32, weights=weights, gradient=False, samples=None,
            preprocess=story_model.PREPROCESS,
        )  # fmt: skip
        story = runner.StoryRunner(request, this_platform(), resume=False, report=lambda _: None)
        honest = runner.judge

        def spoiled(reference: Any, found: Any, limits: Any, **facts: Any) -> Any:
            worse = type(found)(scores=found.scores[:, ::-1].copy()) if limits.name == "other-engine" else found
            return honest(reference, worse if story.record.seen else found, limits, **facts)

        monkeypatch.setattr(runner, "judge", spoiled)
        story.run(1.0, ["reduced"])
        assert not story.proven
        reduced = next(step for step in story.document()["steps"] if step["key"] == "reduced")
        assert not reduced["counts"]
        assert reduced["own"] is None


class TestMistakes:
    @pytest.mark.parametrize(
        ("words", "code", "story"),
        [
            (["--model", "torchvision:resnet9000"], 2, "torchvision has no model 'resnet9000'"),
            (["--model", "nonsense"], 2, "'nonsense' is not a source"),
            (["--model", "torchvision:resnet18", "--weights", "no.pth"], 2, "there is no file no.pth"),
            (["--model", "torchvision:resnet18", "--html", "no/such/report.html"], 2, "there is no folder no/such"),
            (["--model", "torchvision:resnet18", "--preprocess", "{"], 2, "--preprocess is not JSON"),
            (
                ["--model", "torchvision:resnet18", "--preprocess", '{"resise": 3}'],
                2,
                "unknown key 'preprocess.resise'",
            ),
            (["--model", "torchvision:resnet18", "--samples", "no/images"], 2, "has 0 JPEGs"),
            (["--model", "torchvision:resnet18", "--only", "reduced,nonsense"], 2, "unknown step 'nonsense'"),
            (["--model", SOURCE, "--image-size", "32"], 2, "has no preprocess spec"),
        ],
    )
    def test_errors_are_one_line(self, tmp_path: Path, words: list[str], code: int, story: str) -> None:
        done = run_command("story", *words, cwd=tmp_path, env={"XDG_CACHE_HOME": str(tmp_path)})
        assert (done.returncode, done.stdout) == (code, "")
        assert story in done.stderr
        assert "Traceback" not in done.stderr

    def test_unusable_samples_folder(self, weights: Path, tmp_path: Path) -> None:
        (tmp_path / "cache").write_text("a file")
        done = run_story(tmp_path / "cache", weights, "--only", "static")
        assert done.returncode == 1
        assert "cannot write to" in done.stderr
        assert "Traceback" not in done.stderr

    def test_saved_graph_is_refused(self, digits: Path, tmp_path: Path) -> None:
        done = run_command("story", "--model", digits / "1" / "model.onnx", env={"XDG_CACHE_HOME": str(tmp_path)})
        assert done.returncode == 2
        assert "needs a PyTorch model" in done.stderr
