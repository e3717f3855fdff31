"""`graphkiln explain` and `lower`: settings with origins, the plan, the session, the cache, measured nodes."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zoo
from commands import BreakOutputs, RunVerb, table_rows, words
from lowered import add_unrunnable

from graphkiln.cli.lower import measure_model, open_artifact_cache, read_deployment
from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines import hardware
from graphkiln_backend.engines.compute_limit import limit_computing
from graphkiln_backend.graph.errors import LoweringError, RepositoryError, ServerSetupError
from graphkiln_backend.graph.graph_costs import NODE_TIMES_FILE, NodeTimes
from graphkiln_backend.graph.manifest import Conversion, Manifest
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering import deployment
from graphkiln_backend.lowering.deployment import Deployment
from graphkiln_backend.server import installation

GPU = hardware.Gpu(name="NVIDIA H200", compute_capability="9.0", driver="570.0")
COLUMNS = ("batch", 3)


@pytest.fixture
def model(digits: Path, tmp_path: Path) -> Path:
    """The example classifier."""
    return shutil.copytree(digits, tmp_path / "store" / "digits")


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A model of two versions without manifest and configuration."""
    for version in (1, 2):
        zoo.add(tmp_path / "store", "m", zoo.scale(COLUMNS), version=version)
    return tmp_path / "store" / "m"


@pytest.fixture
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four cores and no GPU."""
    monkeypatch.setattr(deployment, "usable_cores", lambda: 4)
    monkeypatch.setattr(hardware, "gpus", tuple)


def add_parameters(model: Path, **parameters: str) -> None:
    lines = (f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items())
    with (model / "config.pbtxt").open("a") as file:
        file.write("\n".join(lines))


def planned(run: RunVerb, model: Path, *options: object) -> Any:
    """JSON of `explain --plan-only`."""
    finished = run("explain", model, "--plan-only", "--json", "--cache=off", *options)
    assert finished.code == 0, finished.err
    return json.loads(finished.out)


class TestVersion:
    def test_a_model_is_its_newest_version(
        self, bare: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(bare)
        for path, version in ((bare, "2"), (bare / "1", "1"), (Path(), "2"), (Path("1"), "1")):
            assert read_deployment(path, None, cache).version.graph_path == bare / version / "model.onnx"

    def test_a_graph_of_oneflow_is_converted_once(
        self, bare: Path, cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from graphkiln_converters.importers.oneflow import OneFlowImporter

        converted: list[Path] = []

        def convert(_: OneFlowImporter, saved: Path, target: Path) -> None:
            converted.append(saved)
            (target / "model.onnx").write_bytes(zoo.scale(("batch", 7)).SerializeToString())

        monkeypatch.setattr(OneFlowImporter, "convert", convert)
        (bare / "3" / "model").mkdir(parents=True)
        (bare / "3" / "model" / "model.mlir").write_text("module {}")
        for _ in range(2):
            graph = read_deployment(bare, None, cache).version.graph_path
        assert graph.is_relative_to(cache.folder)
        assert converted == [bare / "3" / "model"]
        assert not (bare / "3" / "model.onnx").exists()

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (shutil.rmtree, "model 'm' has no version folder"),
            (lambda folder: (folder / "model.onnx").write_bytes(b"PK"), r"m/2/model\.onnx .* damaged or cut short"),
            (lambda folder: (folder / "model.onnx").unlink(), r"there is no model\.onnx in .*m/2"),
        ],
    )
    def test_a_version_that_cannot_be_read(
        self, run: RunVerb, bare: Path, spoil: Callable[[Path], None], message: str
    ) -> None:
        for version in ("1", "2"):
            spoil(bare / version)
        finished = run("explain", bare, "--cache=off")
        assert finished.code == 2
        assert re.search(message, finished.err)


@pytest.mark.usefixtures("_four_cores")
class TestMachine:
    @pytest.mark.parametrize(
        ("group", "gpus", "expected"),
        [
            ("", (), ("cpu", 2)),  # two instances of the drop-in backend share four cores
            ("instance_group { count: 4 }", (), ("cpu", 1)),
            ("instance_group { kind: KIND_GPU gpus: [1] }", (), ("gpu:1", 4)),
            ("", (GPU,), ("gpu:0", 4)),
            ("instance_group { kind: KIND_CPU }", (GPU,), ("cpu", 2)),
        ],
    )
    def test_instances_run_where_triton_places_them(
        self, run: RunVerb, bare: Path, monkeypatch: pytest.MonkeyPatch, *, group: str, gpus: Any, expected: Any
    ) -> None:
        monkeypatch.setattr(hardware, "gpus", lambda: gpus)
        (bare / "config.pbtxt").write_text(group)
        (config, *_) = planned(run, bare)["candidates"]
        assert (config["device"], config["threads"]) == expected

    def test_models_of_other_backends_are_refused(
        self, run: RunVerb, bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (bare / "config.pbtxt").write_text('backend: "tensorflow"')
        assert "model 'm' uses the backend 'tensorflow'" in run("explain", bare).err
        (tmp_path / "backends" / "onnxruntime").mkdir(parents=True)
        found = installation.Installation(
            binary=tmp_path, backends=tmp_path / "backends", caches=tmp_path, stub=tmp_path, libraries=()
        )
        monkeypatch.setattr(installation, "find_installation", lambda: found)
        (bare / "config.pbtxt").write_text('backend: "onnxruntime"')
        assert "uses the backend 'onnxruntime'" in run("explain", bare).err
        (bare / "config.pbtxt").write_text("")
        assert planned(run, bare)["candidates"][0]["threads"] == 4  # ours: one instance

    def test_no_triton_is_needed(self, run: RunVerb, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail() -> installation.Installation:
            raise ServerSetupError("there is no tritonserver")

        monkeypatch.setattr(installation, "find_installation", fail)
        (bare / "config.pbtxt").write_text('backend: "onnxruntime"')
        assert planned(run, bare)["candidates"]


class TestPlan:
    def test_values_and_origins_of_settings(self, run: RunVerb, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            pytest.fail("a session is built")

        monkeypatch.setattr(Deployment, "build", fail)
        add_parameters(model, engine="openvino", fallback="openvino:fp32, onnxruntime", self_test="off", threads="1")
        options = ("--plan-only", "--set", "threads=3", "--set", "precision=fp16", "--cache=off")
        finished = run("explain", model, *options)
        rows = {row[0]: row[1:] for row in table_rows(finished.out)}
        assert rows["engine"] == ["openvino", "parameters.engine"]
        assert rows["precision"] == ["fp16", "--set"]
        assert rows["threads"] == ["3", "--set"]  # before that of the file
        assert rows["self_test"] == ["off", "parameters.self_test"]
        assert all(len(line) <= 80 for line in finished.out.splitlines() if line.startswith(("│", "┃")))
        settings = planned(run, model, "--set", "threads=3")["settings"]
        assert settings["threads"] == {"value": "3", "origin": "--set"}
        assert settings["precision"]["origin"] is None

    def test_sessions_and_rejections(self, run: RunVerb, model: Path) -> None:
        add_parameters(model, xrt="oneflow")
        options = ("--set", "engine=openvino", "--set", "fallback=onnxruntime", "--cache=off")
        out = run("explain", model, "--plan-only", *options).out
        assert "1. openvino on cpu, " in out
        assert "2. onnxruntime on cpu, " in out
        assert "rejected: engine onnxruntime of parameters.xrt: --set requests openvino" in out

    def test_notes_of_the_conversion(self, run: RunVerb, model: Path) -> None:
        path = model / "1" / "manifest.json"
        note = "rate of int8 to that of fp32: 0.50x with onnxruntime"
        conversion = Conversion(
            recipe={}, precision=Precision.INT8, passes=(), output_errors={}, graph_bytes=1, seconds=1.0, notes=(note,)
        )
        replace(Manifest.read(path), conversion=conversion).write(path)
        assert f"conversion: {note}" in run("explain", model, "--plan-only", "--cache=off").out.splitlines()
        assert planned(run, model)["conversion"] == [note]

    def test_image_model(self, run: RunVerb, model: Path, tmp_path: Path) -> None:
        assert "images" not in planned(run, model)
        add_parameters(model, accept_images="true")
        shown = run("explain", model, "--plan-only", "--cache=off").out
        assert re.search(r"^images: JPEG, PNG, .* by digits\.images, decoded in \d processes of \d+", shown, re.M)
        assert planned(run, model)["images"].startswith("JPEG, PNG, ")
        zoo.add(tmp_path / "store", "cats", zoo.scale(COLUMNS), "")
        add_parameters(tmp_path / "store" / "cats", accept_images="true")
        refused = planned(run, tmp_path / "store" / "cats")["images"]
        assert refused.startswith("not accepted: parameters: accept_images of 'cats': the model has no preprocessing")


class TestSeat:
    @pytest.fixture
    def backends(self, tmp_path: Path) -> Path:
        """A backend directory with a C++ backend of empty files."""
        folder = tmp_path / "backends" / "onnxruntime"
        folder.mkdir(parents=True)
        (folder / "libtriton_onnxruntime.so").touch()
        (folder / "libonnxruntime.so.1.23.0").touch()
        return folder.parent

    def test_backend_and_version(self, run: RunVerb, model: Path, backends: Path) -> None:
        options = ("--plan-only", "--cache=off", "--backend-directory", backends)
        lines = run("explain", model, *options).out.splitlines()
        assert "seat: native (Triton's C++ onnxruntime backend, ONNX Runtime 1.23.0)" in lines
        document = planned(run, model, "--backend-directory", backends, "--set", "seat=native")
        assert document["settings"]["seat"] == {"value": "native", "origin": "--set"}
        assert document["seat"] == {
            "native": True,
            "reason": "Triton's C++ onnxruntime backend, ONNX Runtime 1.23.0",
            "requested": True,
        }

    @pytest.mark.parametrize("seat", ["auto", "native"])
    def test_rewrites_that_break_the_graph(
        self, run: RunVerb, model: Path, backends: Path, break_outputs: BreakOutputs, seat: str
    ) -> None:
        options = ("--cache=off", "--backend-directory", backends, "--set", f"seat={seat}")
        assert "fail the proof" not in run("explain", model, *options).out
        break_outputs(lambda _, rewrites: rewrites)
        lines = run("explain", model, *options).out.splitlines()
        instead = "they are off there, too" if seat == "native" else "graphkiln computes the version"
        assert f"note: if ONNX Runtime's rewrites fail the proof in the native seat, {instead}" in lines

    def test_reason_against_it(self, run: RunVerb, model: Path, bare: Path, backends: Path) -> None:
        assert planned(run, model)["seat"]["reason"] == "Triton's C++ onnxruntime backend is not installed"
        lines = run("explain", bare, "--plan-only", "--cache=off", "--backend-directory", backends).out.splitlines()
        assert "seat: python: no golden samples: version 2 cannot be proven" in lines

    def test_refused_request(self, run: RunVerb, model: Path, backends: Path) -> None:
        options = ("--set=seat=native", "--set=engine=openvino", "--backend-directory", backends)
        refused = run("explain", model, *options)
        assert (refused.code, refused.out) == (2, "")
        assert "--set of 'digits' is native, but the engine openvino is graphkiln's" in words(refused.err)

    def test_models_of_the_backend_are_not_ours(self, run: RunVerb, bare: Path, backends: Path) -> None:
        (bare / "config.pbtxt").write_text('backend: "onnxruntime"')
        assert "uses the backend 'onnxruntime'" in run("explain", bare, "--backend-directory", backends).err


class TestSession:
    def test_placement_and_proof(self, run: RunVerb, model: Path) -> None:
        lines = run("explain", model, "--set", "threads=1", "--cache=off").out.splitlines()
        assert "serves: onnxruntime on cpu" in lines
        assert any(re.fullmatch(r"ran: \d+ nodes on CPUExecutionProvider; products: 5 in fp32", line) for line in lines)
        assert any(re.fullmatch(r"self-test: fp32 on onnxruntime: .* - PASS", line) for line in lines)
        built = json.loads(run("explain", model, "--json", "--cache=off").out)["session"]
        assert built["placement"]["products"] == {"fp32": 5}
        assert built["self_test"]["verdict"].endswith("PASS")

    def test_auto_compares_precisions(self, run: RunVerb, model: Path) -> None:
        """The measurement is shown for any choice."""
        finished = run("explain", model, "--set", "engine=auto", "--set", "precision=bf16", "--cache=off")
        assert finished.code == 0, finished.err
        reason = r"^because: (requested by --set|baseline that bf16 must beat), .*; the fastest"
        assert re.search(reason, finished.out, re.MULTILINE)
        assert re.search("bf16 was measured |this CPU has no instructions for bf16", finished.out)

    def test_fallback_and_skipped_self_test(self, run: RunVerb, model: Path) -> None:
        settings = [f"--set={each}" for each in ("engine=tensorrt", "fallback=onnxruntime", "self_test=off")]
        explained = run("explain", model, *settings, "--cache=off").out
        lowered = run("lower", model, *settings, "--cache=off")
        fallback = "tensorrt on cpu: tensorrt serves gpu:N, not cpu"
        skipped = "self_test: off: the golden samples were not replayed"
        for line in (f"rejected: {fallback}", "serves: onnxruntime on cpu", "self-test: none", f"note: {skipped}"):
            assert line in explained
        assert f"graphkiln: {fallback}" in lowered.err
        assert f"graphkiln: {skipped}" in lowered.err
        assert "tensorrt" not in lowered.out
        assert "PASS" not in lowered.out

    def test_graph_that_does_not_run_on_zeros(self, run: RunVerb, tmp_path: Path) -> None:
        folder = add_unrunnable(tmp_path / "store")
        (folder.parent / "config.pbtxt").write_text("max_batch_size: 0")
        finished = run("explain", folder, "--cache=off")
        assert finished.code == 0, finished.err
        assert "ran: unknown: no golden samples, and the graph does not run on zeros" in finished.out

    def test_what_cannot_be_lowered(self, run: RunVerb, model: Path, tmp_path: Path) -> None:
        refused = run("explain", model, "--set", "precision=int8", "--cache=off")
        assert (refused.code, refused.out) == (1, "")
        refused = run("explain", zoo.add(tmp_path / "other", "newer", zoo.scale(COLUMNS, opset=99)), "--cache=off")
        assert refused.code == 1
        assert "1. onnxruntime on cpu" in refused.out  # the plan
        assert "onnxruntime on cpu: " in refused.err

    def test_a_graph_that_computes_without_end_is_given_up(self, run: RunVerb, tmp_path: Path) -> None:
        model = zoo.add(tmp_path / "store", "endless", zoo.endless()).parent
        finished = run("lower", model, "--cache=off", "--compute-limit=0.3")
        assert finished.code == 1
        assert "--compute-limit" in finished.err


class TestCache:
    def entries(self, folder: Path) -> list[str]:
        with ArtifactCache(folder) as opened:
            return sorted(str(item.path) for item in opened.entries())

    def test_the_second_time_builds_nothing(self, run: RunVerb, model: Path, tmp_path: Path) -> None:
        folder = tmp_path / "cache"
        finished = run("lower", model, "--cache", folder)
        assert finished.code == 0, finished.err
        placement, verdict, seconds = finished.out.splitlines()
        assert re.fullmatch(r"onnxruntime on cpu: \d+ nodes on CPUExecutionProvider; products: 5 in fp32", placement)
        assert verdict.endswith("PASS")
        assert re.fullmatch(r"ready in \d+\.\d s", seconds)
        built = self.entries(folder)
        assert built
        assert "compiling for onnxruntime on cpu" in finished.err
        again = run("lower", model, "--cache", folder, "--json")
        document = json.loads(again.out)
        assert (document["engine"], document["placement"]["precision"]) == ("onnxruntime", "fp32")
        assert document["seconds"] > 0
        assert self.entries(folder) == built
        assert "compiling" not in again.err

    def test_what_cannot_be_built_keeps_nothing(self, run: RunVerb, model: Path, tmp_path: Path) -> None:
        finished = run("lower", model, "--cache", tmp_path / "cache", "--set", "engine=tensorrt")
        assert (finished.code, finished.out) == (1, "")
        kept = [Path(entry).name for entry in self.entries(tmp_path / "cache")]
        assert [name for name in kept if not name.startswith("facts-")] == []  # facts of the file are no artifact

    def test_off_is_a_temporary_cache(self) -> None:
        with suppress(RepositoryError), open_artifact_cache("off") as cache:
            assert not cache.lasting
            assert cache.folder.is_dir()
            raise RepositoryError("also when the command fails")
        assert not cache.folder.exists()

    def test_commands_evict_no_entry(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            with open_artifact_cache(str(tmp_path)) as cache:
                cache.get("test", name, {"name": name}, lambda folder: (folder / "large").write_bytes(bytes(1 << 20)))
                entries = len(cache.entries())
        assert entries == 2


class TestMeasure:
    SPLIT = ("--cache=off", "--set=parallel=pipeline=2")

    def test_measured_times_are_planned_by(self, run: RunVerb, model: Path) -> None:
        assert "costs: measured" not in run("explain", model, "--plan-only", *self.SPLIT).out
        found = run("lower", model, "--measure", *self.SPLIT)
        assert found.code == 0, found.err
        path = model / "1" / NODE_TIMES_FILE
        assert f"nodes for batches of 1 and 32: {path}" in found.err.replace("\n", "")
        plan = words(run("explain", model, "--plan-only", *self.SPLIT).out)
        assert "costs: measured by onnxruntime" in plan
        assert "by measured costs" in plan
        assert len(NodeTimes.read(path).at(1)) > 5

    def test_times_of_another_graph_are_measured_again(self, run: RunVerb, model: Path) -> None:
        path = model / "1" / NODE_TIMES_FILE
        path.write_text(json.dumps({"graph": "another", "runtime": "", "machine": "", "batches": {"1": {"a": 1}}}))
        refused = run("explain", model, "--plan-only", *self.SPLIT)
        assert refused.code == 1
        assert "it was measured of another graph" in refused.err
        with ArtifactCache(model / "cache", lasting=False) as cache, limit_computing(60):
            measure_model(str(model), model, cache)
        assert run("explain", model, "--plan-only", *self.SPLIT).code == 0

    def test_fetched_models_cannot_keep_times(self, model: Path, cache: ArtifactCache) -> None:
        with pytest.raises(LoweringError, match="s3://bucket/digits"):
            measure_model("s3://bucket/digits", model, cache)
        assert not (model / "1" / NODE_TIMES_FILE).exists()
