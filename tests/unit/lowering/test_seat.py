"""The choice between a Python instance and Triton's C++ `onnxruntime` backend, and the configuration for the latter."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
import pytest
import zoo
from onnx import TensorProto, helper, numpy_helper

from graphkiln_backend.engines import hardware
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.manifest import FORMAT_VERSION, MANIFEST_FILE, Conversion, Golden, Manifest, Provenance
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering import seat as module
from graphkiln_backend.lowering.seat import NativeBackend, Seat, choose_seat, find_native_backend, native_config
from graphkiln_backend.lowering.settings import Override
from graphkiln_backend.repository.config import ModelConfigProto, pb
from graphkiln_backend.repository.onnx_file import read_signature
from graphkiln_backend.repository.overlay import complete_config

ROWS = ("batch", 3)
GOLDEN = Golden(file="golden.npz", sha256="0" * 64, samples=1)
NEWEST = NativeBackend(library=Path("libtriton_onnxruntime.so"), version="1.32.0")
ON_GPU = "instance_group { kind: KIND_GPU }"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four cores, exact products of bytes and no GPU."""
    monkeypatch.setattr(hardware, "gpus", tuple)
    monkeypatch.setattr(module, "usable_cores", lambda: 4)
    monkeypatch.setattr(hardware, "saturates_products_of_bytes", lambda: False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = (hardware.Gpu(name="NVIDIA H200", compute_capability="9.0", driver="570.0"),)
    monkeypatch.setattr(hardware, "gpus", lambda: found)


class Case:
    """A model and its configuration, changed by tests."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.versions: list[Path] = []

    def add(self, proto: onnx.ModelProto, text: str = "", **manifest: Any) -> ModelConfigProto:
        """Add a version with a manifest and return the completed configuration."""
        folder = zoo.add(self.store, "m", proto, text, version=len(self.versions) + 1)
        graph = folder / "model.onnx"
        described = Manifest(
            format_version=FORMAT_VERSION,
            graph_file=graph.name,
            sha256=hashlib.sha256(graph.read_bytes()).hexdigest(),
            signature=read_signature(graph),
            preprocess=None,
            labels=None,
            provenance=Provenance(source="a test", command=""),
            verification=(),
            golden=GOLDEN,
        )
        replace(described, **manifest).write(folder / MANIFEST_FILE)
        self.versions.append(folder)
        return complete_config(folder.parent, frozenset({"graphkiln"}), lambda version: version)

    def seat(self, proto: onnx.ModelProto | None = None, text: str = "", *settings: str, **options: Any) -> Seat:
        """Add a version and choose its seat."""
        config = self.add(zoo.scale(ROWS) if proto is None else proto, text)
        return choose_seat(config, self.versions, overrides(*settings), options.get("backend", NEWEST))

    def native(self, text: str = "", *settings: str, **options: Any) -> ModelConfigProto:
        """Add a version and make its configuration for the C++ backend."""
        config = self.add(zoo.scale(ROWS), text)
        return native_config(config, self.versions, overrides(*settings), **options)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path / "store")


def overrides(*settings: str) -> list[Override]:
    return [Override(*text.split("=", 1), "--set") for text in settings]  # type: ignore[call-arg]


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def typed(dtype: int, *dims: int) -> onnx.ModelProto:
    return zoo.identity(("batch", *dims), dtype)


def one_node(operator: str, *weights: onnx.TensorProto) -> onnx.ModelProto:
    node = helper.make_node(operator, ["x", *(tensor.name for tensor in weights)], ["y"])
    proto = zoo.model([node], [zoo.value("x", ROWS)], [zoo.value("y", ROWS)])
    proto.graph.initializer.extend(weights)
    return proto


class MakeBackend(Protocol):
    def __call__(self, name: str, *files: str, content: bytes = b"") -> Path: ...


@pytest.fixture
def make_backend(tmp_path: Path) -> MakeBackend:
    """Makes a backend directory with a C++ backend of empty files."""

    def make(name: str, *files: str, content: bytes = b"") -> Path:
        folder = tmp_path / name
        (folder / "onnxruntime").mkdir(parents=True)
        (folder / "onnxruntime" / "libtriton_onnxruntime.so").write_bytes(content)
        for file in files:
            (folder / "onnxruntime" / file).touch()
        return folder

    return make


def runtime_of(*folders: Path) -> str | None:
    """Version of the runtime of the backend in some folders; None without a backend."""
    found = find_native_backend(folders)
    return found and found.version


class TestBackend:
    def test_version_is_that_of_the_runtime_beside_it(self, make_backend: MakeBackend) -> None:
        folder = make_backend("a", "libonnxruntime.so.1.19.2", "libonnxruntime_providers_shared.so")
        found = find_native_backend([folder])
        library = folder / "onnxruntime" / "libtriton_onnxruntime.so"
        assert found == NativeBackend(library=library, version="1.19.2")

    def test_links_are_followed(self, make_backend: MakeBackend, tmp_path: Path) -> None:
        folder = make_backend("a")
        (tmp_path / "libonnxruntime.so.1.20.1").touch()
        (folder / "onnxruntime" / "libonnxruntime.so").symlink_to(tmp_path / "libonnxruntime.so.1.20.1")
        linked = tmp_path / "linked" / "onnxruntime"
        linked.mkdir(parents=True)
        (linked / "libtriton_onnxruntime.so").symlink_to(folder / "onnxruntime" / "libtriton_onnxruntime.so")
        for each in (folder, tmp_path / "linked"):
            assert runtime_of(each) == "1.20.1"

    def test_version_of_the_symbols(self, make_backend: MakeBackend) -> None:
        folder = make_backend("a", "libonnxruntime.so", content=b"\x7fELF\0OrtGetApiBase\0VERS_1.22.0\0GLIBC_2.34\0")
        assert runtime_of(folder) == "1.22.0"

    def test_unknown_version(self, make_backend: MakeBackend) -> None:
        assert runtime_of(make_backend("a")) == ""

    def test_the_first_folder_with_this_backend_decides(self, make_backend: MakeBackend, tmp_path: Path) -> None:
        first, second = make_backend("a", "libonnxruntime.so.1.19.2"), make_backend("b", "libonnxruntime.so.1.20.1")
        other, python = tmp_path / "c", tmp_path / "d"
        (other / "tensorrt").mkdir(parents=True)
        (python / "onnxruntime").mkdir(parents=True)  # the user's own backend of that name
        assert runtime_of(other, first, second) == "1.19.2"
        assert runtime_of(python, first) is None
        assert runtime_of(other, tmp_path / "missing") is None


class TestAuto:
    def test_a_plain_graph(self, case: Case) -> None:
        seat = case.seat()
        assert (seat.native, str(seat)) == (True, "native (Triton's C++ onnxruntime backend, ONNX Runtime 1.32.0)")

    def test_the_example(self, digits: Path) -> None:
        config = complete_config(digits, frozenset({"graphkiln"}), lambda version: version)
        assert choose_seat(config, [digits / "1"], [], NEWEST).native

    def test_a_rollout_needs_a_python_instance(self, digits: Path) -> None:
        config = complete_config(digits, frozenset({"graphkiln"}), lambda version: version)
        seat = choose_seat(config, [digits / "1"], [], NEWEST, needed="a rollout compares its answers")
        assert str(seat) == "python: a rollout compares its answers"
        native = Override("seat", "native", "--set m.seat=native")
        assert choose_seat(config, [digits / "1"], [native], NEWEST, needed="a rollout compares its answers").native

    def test_no_backend(self, case: Case) -> None:
        assert str(case.seat(backend=None)) == "python: Triton's C++ onnxruntime backend is not installed"

    @pytest.mark.usefixtures("gpu")
    def test_gpu(self, case: Case) -> None:
        assert "not yet run on a GPU" in case.seat(text=ON_GPU).reason

    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            (["engine=openvino"], "engine openvino"),
            (["engine=auto"], "engine: auto"),
            (["precision=bf16"], "from fp32 to bf16"),
            (["streams=2"], "streams"),
            (["parallel=data=2"], "parallel"),
            (["fallback=openvino"], "fallback"),
            (["providers=OpenVINO"], "providers"),
            (["self_test=off"], "self_test"),
            (["session.intra_op.allow_spinning=0"], r"not read session.intra_op.allow_spinning"),
            (["seat=python"], "requested by --set"),
            (["engine=openvino", "xrt=none"], "not valid"),
        ],
    )
    def test_setting_of_graphkiln(self, case: Case, settings: list[str], reason: str) -> None:
        seat = case.seat(None, "", *settings)
        assert not seat.native
        assert reason in seat.reason

    @pytest.mark.parametrize(
        "setting",
        [
            *("engine=onnxruntime", "precision=fp32", "threads=2", "streams=1", "fallback=", "self_test=on"),
            *("execution_mode=1", "session.use_device_allocator_for_initializers=1", "seat=auto", "seat=native"),
        ],
    )
    def test_setting_of_both(self, case: Case, setting: str) -> None:
        assert case.seat(None, "", setting).native

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ('optimization { execution_accelerators { cpu_execution_accelerator { name: "openvino" } } }', "openvino"),
            ('model_operations { op_library_filename: "ops.so" }', "op_library_filename"),
            ("model_transaction_policy { decoupled: true }", "decoupled"),
            ("sequence_batching {}", "sequence_batching"),
            (parameter("EXECUTION_ENV_PATH", "env.tar.gz"), "EXECUTION_ENV_PATH"),
            (parameter("seat", "python"), r"requested by parameters.seat"),
            (parameter("seat", "nativ"), "must be auto, native, python, got 'nativ'"),
            ("instance_group { kind: KIND_MODEL }", "KIND_MODEL"),
        ],
    )
    def test_configuration_of_graphkiln(self, case: Case, text: str, reason: str) -> None:
        seat = case.seat(None, text)
        assert not seat.native
        assert reason in seat.reason

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (lambda config: config.batch_input.add(), "batch_input"),
            (lambda config: config.batch_output.add(), "batch_output"),
            (lambda config: setattr(config.input[0], "allow_ragged_batch", True), "ragged"),
        ],
    )
    def test_batch_tensors(self, case: Case, change: Callable[[Any], Any], reason: str) -> None:
        config = case.add(zoo.scale(ROWS))
        change(config)
        assert reason in choose_seat(config, case.versions, [], NEWEST).reason

    def test_optional_input(self, case: Case) -> None:
        config = case.add(zoo.with_optional_bias())
        assert choose_seat(config, case.versions, [], NEWEST).native
        config.input.add(name="bias", data_type=pb.TYPE_FP32, dims=[3], optional=True)
        assert "optional" in choose_seat(config, case.versions, [], NEWEST).reason

    @pytest.mark.parametrize(
        ("dtype", "dims", "native"),
        [
            (TensorProto.INT64, (3,), False),
            (TensorProto.STRING, (3,), False),
            (TensorProto.BOOL, (3,), False),
            (TensorProto.UINT8, (3,), False),
            (TensorProto.UINT8, (8, 8, 3), True),
            (TensorProto.FLOAT16, (3,), True),
        ],
    )
    def test_inputs_with_bad_values(self, case: Case, dtype: int, dims: tuple[int, ...], native: bool) -> None:
        seat = case.seat(typed(dtype, *dims), "max_batch_size: 8")
        assert seat.native is native
        assert native or "would fail its neighbors" in seat.reason
        assert case.seat(typed(dtype, *dims), "max_batch_size: 1").native

    def test_scalars(self, case: Case) -> None:
        proto = zoo.model(
            [helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)], [zoo.value("x", (3,))], [zoo.value("y", ())]
        )
        assert "'y' is a scalar" in case.seat(proto).reason

    def test_no_golden_samples(self, case: Case) -> None:
        config = case.add(zoo.scale(ROWS), golden=None)
        assert "version 1 cannot be proven" in choose_seat(config, case.versions, [], NEWEST).reason
        (case.versions[0] / MANIFEST_FILE).unlink()
        assert "no golden samples" in choose_seat(config, case.versions, [], NEWEST).reason

    def test_recorded_requests(self, case: Case) -> None:
        config = case.add(zoo.scale(ROWS))
        assert "requests are recorded" in choose_seat(config, case.versions, [], NEWEST, recorded=True).reason
        assert choose_seat(config, case.versions, overrides("seat=native"), NEWEST, recorded=True).native

    def test_every_version_counts(self, case: Case) -> None:
        case.add(zoo.scale(ROWS), golden=None)
        config = case.add(zoo.scale(ROWS))
        assert "version 1" in choose_seat(config, case.versions, [], NEWEST).reason
        assert choose_seat(config, case.versions[1:], [], NEWEST).native
        assert not choose_seat(config, [], [], NEWEST).native

    def test_graph_files_of_other_names(self, case: Case) -> None:
        config = case.add(zoo.scale(ROWS))
        case.add(zoo.scale(ROWS), graph_file="net.onnx")
        (case.versions[1] / "model.onnx").rename(case.versions[1] / "net.onnx")
        assert "different names: model.onnx, net.onnx" in choose_seat(config, case.versions, [], NEWEST).reason

    def test_other_format(self, case: Case) -> None:
        config = case.add(zoo.scale(ROWS), graph_file="model.plan")
        assert "model.plan of version 1 is not an ONNX graph" in choose_seat(config, case.versions, [], NEWEST).reason

    def test_precision_of_the_manifest(self, case: Case) -> None:
        converted = Conversion(
            recipe={}, precision=Precision.FP16, passes=(), output_errors={}, graph_bytes=1, seconds=1.0
        )
        config = case.add(zoo.scale(ROWS), parameter("precision", "fp32"), conversion=converted)
        assert "from fp16 to fp32" in choose_seat(config, case.versions, [], NEWEST).reason

    @pytest.mark.parametrize("file", ["model.onnx", MANIFEST_FILE])
    def test_damaged_file(self, case: Case, file: str) -> None:
        config = case.add(zoo.scale(ROWS))
        (case.versions[0] / file).write_bytes(b"{")
        assert "version 1 cannot be read" in choose_seat(config, case.versions, [], NEWEST).reason

    def test_outputs_that_are_no_tensors(self, case: Case) -> None:
        assert "sequence or a map" in case.seat(zoo.zipped()).reason

    def test_products_of_bytes(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        quantized = one_node("QuantizeLinear")
        assert case.seat(quantized).native
        monkeypatch.setattr(hardware, "saturates_products_of_bytes", lambda: True)
        assert "saturates" in case.seat(quantized).reason
        assert Case(case.store / "other").seat().native

    def test_weights_of_4_bits(self, case: Case) -> None:
        assert "4 bits" in case.seat(one_node("MatMulNBits")).reason

    def test_loops(self, case: Case) -> None:
        assert "may not end" in case.seat(zoo.endless()).reason

    def test_weights_of_16_bits(self, case: Case) -> None:
        """A CPU computes fp16 in fp32 in both seats; bf16 only OpenVINO computes."""
        half = numpy_helper.from_array(np.ones(3, np.float16), "w")
        assert case.seat(one_node("Add", half)).native
        brain = helper.make_tensor("w", TensorProto.BFLOAT16, [3], [1.0, 1.0, 1.0])
        assert "bf16" in Case(case.store / "other").seat(one_node("Add", brain)).reason

    @pytest.mark.parametrize(
        ("needed", "version", "reason"),
        [
            ((21, 10, 5), "1.19.2", ""),
            ((19, 9, 3), "1.15.0", ""),
            ((20, 9, 4), "1.17.1", ""),
            ((22, 10, 5), "1.19.2", "the graph's opset 22 is newer than ONNX Runtime 1.19.2, which reads up to 21"),
            ((21, 11, 5), "1.19.2", "the graph's IR version 11"),
            ((19, 9, 4), "1.16.3", "the graph's opset of ai.onnx.ml 4"),
            ((21, 10, 5), "1.17.1", "opset 21"),
            ((28, 14, 5), "1.40.0", ""),
            ((29, 14, 5), "2.0.1", "which reads up to 28"),
            ((17, 8, 3), "1.9.0", "ONNX Runtime 1.9.0 may be too old"),
            ((17, 8, 3), "", "an unknown version may be too old"),
        ],
    )
    def test_newer_graph(self, case: Case, needed: tuple[int, int, int], version: str, reason: str) -> None:
        proto = zoo.scale(ROWS)
        proto.opset_import.add(domain="ai.onnx.ml")
        proto.opset_import[0].version, proto.ir_version, proto.opset_import[1].version = needed
        seat = case.seat(proto, backend=replace(NEWEST, version=version))
        assert seat.native is not bool(reason)
        assert reason in seat.reason


class TestNative:
    @pytest.mark.usefixtures("gpu")
    @pytest.mark.parametrize(
        "text",
        [
            ON_GPU,
            ON_GPU + parameter("engine", "auto"),
            ON_GPU + parameter("precision", "tf32"),
            ON_GPU
            + "optimization { execution_accelerators { gpu_execution_accelerator { "
            + 'name: "tensorrt" parameters { key: "precision_mode" value: "FP16" } } } }',
        ],
    )
    def test_gpu(self, case: Case, text: str) -> None:
        assert case.seat(None, text, "seat=native").native

    def test_engine_auto(self, case: Case) -> None:
        assert case.seat(None, "", "seat=native", "engine=auto").native

    def test_unknown_version(self, case: Case) -> None:
        assert case.seat(None, "", "seat=native", backend=replace(NEWEST, version="")).native

    def test_settings_of_graphkiln_are_refused(self, case: Case) -> None:
        with pytest.raises(RepositoryError, match="--set of 'm' is native, but the engine openvino") as caught:
            case.seat(None, "", "seat=native", "engine=openvino")
        assert "leave seat out" in caught.value.hint

    def test_missing_backend(self, case: Case) -> None:
        with pytest.raises(RepositoryError, match=r"parameters.seat of 'm' is native, but .* not installed") as caught:
            case.seat(text=parameter("seat", "native"), backend=None)
        assert "--backend-directory" in caught.value.hint

    def test_command_line_before_configuration(self, case: Case) -> None:
        assert not case.seat(None, parameter("seat", "native"), "seat=python").native


def keys(config: ModelConfigProto) -> dict[str, str]:
    return {key: config.parameters[key].string_value for key in config.parameters}


def accelerators(config: ModelConfigProto) -> list[tuple[str, dict[str, str]]]:
    found = config.optimization.execution_accelerators
    both = (*found.gpu_execution_accelerator, *found.cpu_execution_accelerator)
    return [(each.name, dict(each.parameters)) for each in both]


class TestConfiguration:
    def test_defaults_of_graphkiln(self, case: Case) -> None:
        config = case.native()
        assert (config.name, config.backend, config.platform) == ("m", "onnxruntime", "")
        assert config.default_model_filename == "model.onnx"
        assert [(group.kind, group.count) for group in config.instance_group] == [(pb.ModelInstanceGroup.KIND_CPU, 1)]
        found = keys(config)
        assert found == {
            "execution_mode": "0",
            "intra_op_thread_count": "4",
            "inter_op_thread_count": "1",
            "enable_mem_arena": "1",
            "enable_mem_pattern": "0",
        }
        assert not config.HasField("optimization")

    def test_the_rest_is_kept(self, case: Case) -> None:
        text = (
            "max_batch_size: 16 dynamic_batching { preferred_batch_size: 8 } version_policy { all {} } "
            "optimization { graph { level: 1 } } "
            'model_warmup { name: "w" batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: 3 '
            "zero_data: true } } } "
        )
        config = case.add(zoo.scale(ROWS), text)
        before = pb.ModelConfig.FromString(config.SerializeToString())
        native = native_config(config, case.versions, [])
        assert config == before
        for field in ("backend", "parameters", "instance_group", "default_model_filename"):
            for each in (before, native):
                each.ClearField(field)
        assert native == before

    def test_settings(self, case: Case) -> None:
        text = (
            parameter("threads", "3")
            + parameter("execution_mode", "1")
            + parameter("enable_mem_pattern", "1")
            + parameter("memory.enable_memory_arena_shrinkage", "cpu:0")
            + parameter("session.use_device_allocator_for_initializers", "1")
            + parameter("cudnn_conv_algo_search", "1")
            + parameter("seat", "auto")
            + parameter("execute_delay_ms", "1")
            + parameter("preprocess", "kept")
        )
        found = keys(case.native(text, "enable_mem_arena=0"))
        assert found == {
            "execution_mode": "1",
            "intra_op_thread_count": "3",
            "inter_op_thread_count": "3",
            "enable_mem_arena": "0",
            "enable_mem_pattern": "1",
            "memory.enable_memory_arena_shrinkage": "cpu:0",
            "session.use_device_allocator_for_initializers": "1",
            "preprocess": "kept",
        }

    def test_cores_are_shared_by_the_instances(self, case: Case) -> None:
        config = case.native('instance_group { count: 2 rate_limiter { priority: 2 } } instance_group { name: "b" }')
        groups = [(group.kind, group.count, group.rate_limiter.priority) for group in config.instance_group]
        cpu = pb.ModelInstanceGroup.KIND_CPU
        assert groups == [(cpu, 2, 2), (cpu, 1, 0)]
        assert keys(config)["intra_op_thread_count"] == "1"
        assert keys(case.native("instance_group { count: 2 }", cores=8))["intra_op_thread_count"] == "4"

    def test_unused_accelerator_of_a_cpu(self, case: Case) -> None:
        text = 'optimization { execution_accelerators { cpu_execution_accelerator { name: "openvino" } } }'
        assert not accelerators(case.native(text, "engine=onnxruntime"))

    @pytest.mark.usefixtures("gpu")
    def test_cuda(self, case: Case) -> None:
        text = (
            parameter("gpu_mem_limit", "1000")
            + parameter("layout", "nhwc")
            + parameter("conv_search", "heuristic")
            + "optimization { execution_accelerators { gpu_execution_accelerator { "
            + 'name: "cuda" parameters { key: "cudnn_conv_use_max_workspace" value: "0" } } } }'
        )
        config = case.native(text)
        assert [group.kind for group in config.instance_group] == [pb.ModelInstanceGroup.KIND_GPU]
        options = {"use_tf32": "0", "prefer_nhwc": "1", "cudnn_conv_use_max_workspace": "0"}
        assert accelerators(config) == [("cuda", options)]
        found = keys(config)
        assert (found["gpu_mem_limit"], found["cudnn_conv_algo_search"]) == ("1000", "1")
        assert accelerators(case.native("", "precision=tf32")) == [("cuda", {"use_tf32": "1"})]

    @pytest.mark.usefixtures("gpu")
    def test_tensorrt(self, case: Case) -> None:
        text = (
            "optimization { execution_accelerators { gpu_execution_accelerator [ "
            '{ name: "tensorrt" parameters { key: "precision_mode" value: "FP16" } }, '
            '{ name: "cuda" parameters { key: "use_tf32" value: "1" } } ] } }'  # only the first one is used
        )
        cuda = ("cuda", {"use_tf32": "0"})
        assert accelerators(case.native(text)) == [("tensorrt", {"precision_mode": "FP16"}), cuda]
        assert accelerators(case.native(text, "engine=onnxruntime")) == [cuda]


def test_imports_no_runtime() -> None:
    """The supervisor, which decides, stays small."""
    code = (
        "import sys, graphkiln_backend.lowering.seat\n"
        "heavy = {'numpy', 'onnx', 'onnxruntime', 'openvino', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
