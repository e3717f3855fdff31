"""Typed model configurations with Triton's defaults: devices, instance counts, batch sizes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository.config import parse_json
from graphkiln_backend.repository.model_config import Accelerator, InstanceGroup, ModelConfig


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config.pbtxt"


def from_json(*, has_gpu: bool = False, **fields: Any) -> ModelConfig:
    return ModelConfig.from_protobuf(parse_json(json.dumps(fields)), has_gpu=has_gpu)


class TestReading:
    TEXT = """
        name: "m"
        platform: "onnxruntime_onnx"
        backend: "onnxruntime"
        max_batch_size: 16
        default_model_filename: "net.onnx"
        parameters { key: "precision" value { string_value: "bf16" } }
        parameters { key: "engine" value { string_value: "openvino" } }
        dynamic_batching { preferred_batch_size: [6, 12] }
        instance_group [ { kind: KIND_CPU count: 3 } ]
        optimization {
          graph { level: 1 }
          execution_accelerators {
            gpu_execution_accelerator [
              { name: "tensorrt" parameters { key: "precision_mode" value: "FP16" } }, { name: "cuda" }
            ]
            cpu_execution_accelerator { name: "openvino" }
          }
        }
        model_transaction_policy { decoupled: true }
    """

    def test_all_fields(self, path: Path) -> None:
        path.write_text(self.TEXT)
        assert ModelConfig.read(path, has_gpu=False) == ModelConfig(
            name="m",
            platform="onnxruntime_onnx",
            backend="onnxruntime",
            max_batch_size=16,
            preferred_batch_sizes=(6, 12),
            instance_groups=(InstanceGroup(count=3, device=CPU),),
            parameters={"engine": "openvino", "precision": "bf16"},
            default_model_filename="net.onnx",
            gpu_accelerators=(
                Accelerator(name="tensorrt", parameters={"precision_mode": "FP16"}),
                Accelerator(name="cuda"),
            ),
            cpu_accelerators=(Accelerator(name="openvino"),),
            graph_level=1,
            decoupled=True,
        )


class TestJson:
    """JSON as passed to `initialize`: all fields of Triton, including empty ones."""

    WHOLE: dict[str, Any] = {  # noqa: RUF012 - read only
        "name": "m",
        "platform": "",
        "backend": "graphkiln",
        "runtime": "",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 8,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "format": "FORMAT_NONE", "dims": [3], "optional": False}],
        "output": [{"name": "y", "data_type": "TYPE_FP16", "dims": [2, 5], "label_filename": ""}],
        "optimization": {"priority": "PRIORITY_DEFAULT", "gather_kernel_buffer_threshold": 0},
        "dynamic_batching": {"preferred_batch_size": [4], "max_queue_delay_microseconds": 0},
        "instance_group": [{"name": "m_0", "kind": "KIND_CPU", "count": 2, "gpus": [], "host_policy": ""}],
        "default_model_filename": "model.onnx",
        "parameters": {"engine": {"string_value": "auto"}},
    }

    def test_json_from_triton(self) -> None:
        assert ModelConfig.from_protobuf(parse_json(json.dumps(self.WHOLE)), has_gpu=False) == ModelConfig(
            name="m",
            backend="graphkiln",
            max_batch_size=8,
            preferred_batch_sizes=(4,),
            instance_groups=(InstanceGroup(count=2, device=CPU),),
            parameters={"engine": "auto"},
            default_model_filename="model.onnx",
            row_bytes=3 * 4 + 10 * 2,
            input_ranks={"x": 2},
        )

    def test_unknown_fields_are_ignored(self) -> None:
        assert from_json(name="m", model_telepathy={"enable": True}, instance_group=[{"kind": "KIND_CPU", "aura": 3}])

    @pytest.mark.parametrize("text", ["", "{", "3", '{"max_batch_size": "many"}', '{"instance_group": {"count": 1}}'])
    def test_invalid_json(self, text: str) -> None:
        with pytest.raises(RepositoryError, match="the JSON is not a model configuration"):
            ModelConfig.from_protobuf(parse_json(text), has_gpu=False)


class TestInstances:
    @pytest.mark.parametrize(
        ("backend", "group", "expected"),
        [
            ("graphkiln", {"kind": "KIND_CPU"}, 1),
            ("onnxruntime", {"kind": "KIND_CPU"}, 2),
            ("onnxruntime", {"kind": "KIND_GPU"}, 1),
            ("onnxruntime", {"kind": "KIND_CPU", "count": 5}, 5),
            ("graphkiln", {"kind": "KIND_GPU", "count": 3}, 3),
            ("onnxruntime", {}, 2),
        ],
    )
    def test_instance_count_or_default(self, backend: str, group: dict[str, Any], expected: int) -> None:
        assert from_json(backend=backend, instance_group=[group]).instances == expected

    @pytest.mark.parametrize(("backend", "on_cpu"), [("graphkiln", 1), ("onnxruntime", 2)])
    def test_default_instance_group(self, backend: str, on_cpu: int) -> None:
        assert from_json(backend=backend).instance_groups == (InstanceGroup(count=on_cpu, device=CPU),)
        on_gpu = InstanceGroup(count=1, device=Device.gpu(0))
        assert from_json(backend=backend, has_gpu=True).instance_groups == (on_gpu,)

    @pytest.mark.parametrize(
        ("group", "processes"),
        [
            ({"kind": "KIND_GPU", "count": 2, "gpus": [0, 2, 3]}, 6),
            ({"kind": "KIND_GPU", "count": 2}, 2),
            ({"kind": "KIND_CPU", "count": 2}, 2),
        ],
    )
    def test_count_applies_to_each_gpu(self, group: dict[str, Any], processes: int) -> None:
        config = from_json(instance_group=[group])
        assert (config.instances, config.processes) == (2, processes)
        assert len(config.gpus) == (0 if group["kind"] == "KIND_CPU" else processes)


class TestDevice:
    @pytest.mark.parametrize(
        ("group", "has_gpu", "expected"),
        [
            ({"kind": "KIND_CPU"}, True, CPU),
            ({"kind": "KIND_GPU"}, False, Device.gpu(0)),  # refused by the engine
            ({"kind": "KIND_GPU", "gpus": [2, 0]}, True, Device.gpu(2)),
            ({"kind": "KIND_AUTO"}, True, Device.gpu(0)),
            ({"kind": "KIND_AUTO", "gpus": [1]}, True, Device.gpu(1)),
            ({"kind": "KIND_AUTO"}, False, CPU),
        ],
    )
    def test_device_of_the_first_instance(self, group: dict[str, Any], has_gpu: bool, expected: Device) -> None:
        assert from_json(instance_group=[group], has_gpu=has_gpu).device == expected

    @pytest.mark.parametrize("groups", [["KIND_MODEL"], ["KIND_CPU", "KIND_MODEL"]])
    def test_kind_model_is_refused(self, groups: list[str]) -> None:
        config = from_json(instance_group=[{"kind": kind} for kind in groups])
        with pytest.raises(RepositoryError, match=r"KIND_MODEL is not supported \(use KIND_CPU or KIND_GPU\)"):
            _ = config.device
        assert config.instances == len(groups)  # Triton starts them all the same


class TestBatchSizes:
    @pytest.mark.parametrize(
        ("largest", "preferred", "expected"),
        [(1, (), (1,)), (8, (), (1, 2, 4, 8)), (12, (6,), (1, 2, 4, 6, 8, 12)), (4, (64,), (1, 2, 4))],
    )
    def test_warmup_sizes_with_dynamic_batching(
        self, largest: int, preferred: tuple[int, ...], expected: tuple[int, ...]
    ) -> None:
        assert ModelConfig(max_batch_size=largest, preferred_batch_sizes=preferred).warmup_batch_sizes == expected

    @pytest.mark.parametrize(("largest", "expected"), [(0, (1,)), (1, (1,)), (8, (1, 8))])
    def test_warmup_sizes_without_dynamic_batching(self, largest: int, expected: tuple[int, ...]) -> None:
        assert ModelConfig(max_batch_size=largest).warmup_batch_sizes == expected

    @given(largest=st.integers(0, 5000), preferred=st.lists(st.integers(-5, 6000), max_size=5))
    def test_warmup_sizes_at_most_double(self, largest: int, preferred: list[int]) -> None:
        sizes = ModelConfig(max_batch_size=largest, preferred_batch_sizes=tuple(preferred)).warmup_batch_sizes
        assert list(sizes) == sorted(set(sizes))
        assert (sizes[0], sizes[-1]) == (1, max(1, largest))
        assert all(above <= 2 * below for below, above in pairwise(sizes))
        assert {size for size in preferred if 0 < size <= largest} <= set(sizes)


class TestBytes:
    @staticmethod
    def tensor(dtype: str, *dims: int) -> dict[str, Any]:
        return {"name": "t", "data_type": f"TYPE_{dtype}", "dims": list(dims)}

    @pytest.mark.parametrize(
        ("dtype", "dims", "expected"),
        [
            ("FP32", (3, 5), 60),
            ("FP64", (3, 5), 120),
            ("BF16", (7,), 14),
            ("BOOL", (7,), 7),
            ("INT64", (-1, 5), 40),
            ("FP32", (-1, -1), 4),
            ("STRING", (100,), 0),
            ("INVALID", (100,), 0),  # left out: completed from the graph
        ],
    )
    def test_row_bytes_of_a_tensor(self, dtype: str, dims: tuple[int, ...], expected: int) -> None:
        assert from_json(input=[self.tensor(dtype, *dims)]).row_bytes == expected
        assert from_json(output=[self.tensor(dtype, *dims)]).row_bytes == expected

    def test_row_bytes_of_all_tensors(self) -> None:
        inputs, outputs = [self.tensor("FP32", 3), self.tensor("INT8", 5)], [self.tensor("FP16", 2)]
        assert from_json(input=inputs, output=outputs).row_bytes == 12 + 5 + 4
