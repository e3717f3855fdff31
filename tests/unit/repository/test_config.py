"""config.pbtxt: parsed, completed from a signature, checked against it, and written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from graphkiln_backend.graph.contract import Contract
from graphkiln_backend.graph.decoding import encode_json
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.signature import ANY_RANK, Signature, TensorSpec
from graphkiln_backend.graph.task import Embedding, Ranking
from graphkiln_backend.repository.config import (
    DEFAULT_MAX_BATCH_SIZE,
    complete,
    complete_dictionary,
    config_text,
    configured_signature,
    guard_batch,
    read_config,
    select_versions,
    write_config,
)
from graphkiln_backend.repository.model_config import ModelConfig


def spec(name: str, *shape: int | str, dtype: DType = DType.FP32) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def signature(*inputs: TensorSpec, outputs: tuple[TensorSpec, ...] = (), optional: Any = ()) -> Signature:
    return Signature(inputs=inputs, outputs=outputs or (spec("y", "batch", 2),), optional_inputs=optional)


IMAGES = signature(spec("x", "batch", 3, "height", "width"))
ROWS = signature(spec("x", "batch", 3))
WHOLE = signature(spec("x", 2, 3), outputs=(spec("y", 2, 2),))
SCALARS = signature(spec("x", "batch"), outputs=(spec("y", "batch"),))
SCALAR = signature(spec("x"), outputs=(spec("y"),))


def completed(text: str, graph: Signature, labels_file: str | None = None) -> Any:
    config = text_format.Parse(text, pb.ModelConfig())
    config.name = config.name or "m"
    complete(config, graph, labels_file=labels_file)
    return config


def dims(tensor: Any) -> list[int]:
    return list(tensor.dims)


class TestReadAndWrite:
    def test_round_trip(self, tmp_path: Path) -> None:
        config = completed("max_batch_size: 8", ROWS, "labels.txt")
        write_config(config, tmp_path / "config.pbtxt")
        assert read_config(tmp_path / "config.pbtxt") == config

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b'name: "m', "config.pbtxt is not a model configuration: 1:7"),
            (b"max_batch_size: 4\nmax_batches: 4", 'is not a model configuration: 2:1 .*"max_batches"'),
            (b"instance_group { kind: KIND_TPU }", "KIND_TPU"),
            (b"\xff\xfe\x00", "is not a model configuration: 'utf-8' codec"),
        ],
    )
    def test_damaged_file(self, tmp_path: Path, content: bytes, words: str) -> None:
        (tmp_path / "config.pbtxt").write_bytes(content)
        with pytest.raises(RepositoryError, match=words):
            read_config(tmp_path / "config.pbtxt")

    def test_byte_order_mark_is_ignored(self, tmp_path: Path) -> None:
        (tmp_path / "config.pbtxt").write_bytes(b"\xef\xbb\xbfmax_batch_size: 4\r\n")
        assert read_config(tmp_path / "config.pbtxt").max_batch_size == 4

    def test_pipe_does_not_block(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "config.pbtxt")
        with pytest.raises(RepositoryError, match=r"cannot read .*config\.pbtxt: it is a pipe"):
            read_config(tmp_path / "config.pbtxt")


class TestCompletion:
    def test_empty_config_of_a_batchable_graph(self) -> None:
        config = completed("", IMAGES, "labels.txt")
        assert config.max_batch_size == DEFAULT_MAX_BATCH_SIZE
        assert config.HasField("dynamic_batching")
        (image,), (scores,) = config.input, config.output
        assert (image.name, image.data_type, dims(image)) == ("x", pb.TYPE_FP32, [3, -1, -1])
        assert (scores.name, dims(scores), scores.label_filename) == ("y", [2], "labels.txt")

    def test_empty_config_of_a_fixed_graph(self) -> None:
        config = completed("", WHOLE)
        assert (config.max_batch_size, dims(config.input[0]), dims(config.output[0])) == (0, [2, 3], [2, 2])
        assert not config.HasField("dynamic_batching")

    def test_written_values_are_kept(self) -> None:
        text = """
            max_batch_size: 16
            input { name: "x" data_type: TYPE_FP32 dims: [3, 224, 224] }
            output { name: "y" label_filename: "mine.txt" }
            dynamic_batching { max_queue_delay_microseconds: 7 }
            instance_group { count: 3 }
        """
        config = completed(text, IMAGES, "labels.txt")
        assert config.max_batch_size == 16
        assert dims(config.input[0]) == [3, 224, 224]  # narrower than the graph is fine
        assert config.output[0].label_filename == "mine.txt"
        assert config.dynamic_batching.max_queue_delay_microseconds == 7
        assert config.instance_group[0].count == 3

    @pytest.mark.parametrize(
        ("text", "graph", "largest"),
        [
            ('input { name: "x" dims: [3] }', ROWS, DEFAULT_MAX_BATCH_SIZE),
            ('input { name: "x" dims: [-1, 3] }', ROWS, 0),  # written with the batch: the user batches
            ('output { name: "y" dims: [-1, 2] }', ROWS, 0),
            ('input { name: "x" }', ROWS, DEFAULT_MAX_BATCH_SIZE),
            ('input { name: "x" dims: [1] reshape { shape: [] } }', SCALARS, DEFAULT_MAX_BATCH_SIZE),
            ('input { name: "x" dims: [-1] }', SCALARS, 0),
        ],
    )
    def test_dims_with_the_batch_disable_batching(self, text: str, graph: Signature, largest: int) -> None:
        assert completed(text, graph).max_batch_size == largest

    @pytest.mark.parametrize("scheduling", ["sequence_batching {}", "ensemble_scheduling {}"])
    def test_other_schedulers_are_kept(self, scheduling: str) -> None:
        config = completed(f"max_batch_size: 8 {scheduling}", ROWS)
        assert not config.HasField("dynamic_batching")

    def test_batched_scalars_are_reshaped(self) -> None:
        """Triton has no scalars: [1] outside, [] inside."""
        config = completed("", SCALARS)
        for tensor in (config.input[0], config.output[0]):
            assert dims(tensor) == [1]
            assert tensor.HasField("reshape")
            assert list(tensor.reshape.shape) == []

    def test_scalar_without_batching(self) -> None:
        config = completed("", SCALAR)
        assert (dims(config.input[0]), config.input[0].HasField("reshape")) == ([1], False)

    def test_size_zero_is_dynamic(self) -> None:
        config = completed("", signature(spec("x", 0, 3), outputs=(spec("y", 2, 0),)))
        assert [dims(config.input[0]), dims(config.output[0])] == [[-1, 3], [2, -1]]

    def test_output_of_unknown_rank(self) -> None:
        config = completed("", signature(spec("x", 3), outputs=(spec("y", ANY_RANK),)))
        assert (dims(config.output[0]), config.max_batch_size) == ([-1], 0)

    def test_input_of_unknown_rank(self) -> None:
        graph = signature(spec("x", ANY_RANK), outputs=(spec("y", ANY_RANK),))
        assert dims(completed('input { name: "x" dims: [ -1, 2 ] }', graph).input[0]) == [-1, 2]
        with pytest.raises(RepositoryError, match="how many dimensions input 'x' has"):
            completed("", graph)

    def test_reshape_is_checked(self) -> None:
        text = 'max_batch_size: 4 input {{ name: "x" dims: [6] reshape {{ shape: [{}] }} }}'
        graph = signature(spec("x", "batch", 2, 3))
        assert dims(completed(text.format("2, 3"), graph).input[0]) == [6]
        with pytest.raises(RepositoryError, match=r"expected \[2, 3\], got \[3, 2\]"):
            completed(text.format("3, 2"), graph)

    def test_fixed_batch_cannot_be_batched(self) -> None:
        with pytest.raises(RepositoryError, match="max_batch_size is 2, but the graph has a fixed batch of 2: x"):
            completed("max_batch_size: 2", WHOLE)

    def test_subset_of_outputs(self) -> None:
        graph = signature(spec("x", "batch", 3), outputs=(spec("y", "batch", 2), spec("z", "batch", 1)))
        config = completed('output { name: "z" }', graph, "labels.txt")
        assert [(tensor.name, dims(tensor)) for tensor in config.output] == [("z", [1])]
        assert config.output[0].label_filename == "labels.txt"

    def test_optional_inputs(self) -> None:
        graph = signature(spec("x", "batch", 3), optional=(spec("bias", 1),))
        assert [tensor.name for tensor in completed("", graph).input] == ["x"]
        config = completed('max_batch_size: 0 input { name: "x" dims: [-1, 3] } input { name: "bias" }', graph)
        assert [(tensor.name, tensor.optional) for tensor in config.input] == [("x", False), ("bias", True)]

    def test_written_labels_are_kept(self) -> None:
        graph = signature(spec("x", "batch", 3), outputs=(spec("y", "batch", 2), spec("z", "batch", 1)))
        text = 'output { name: "y" } output { name: "z" label_filename: "z.txt" }'
        assert [tensor.label_filename for tensor in completed(text, graph, "labels.txt").output] == ["", "z.txt"]


class TestConfiguredSignature:
    """Tensors of graphs that only their backend reads."""

    X = 'input { name: "x" data_type: TYPE_FP32 dims: [3, -1] }'
    Y = 'output { name: "y" data_type: TYPE_INT64 dims: [1] reshape { shape: [] } }'

    @pytest.mark.parametrize("batch", ["", "max_batch_size: 4"])
    def test_dims_become_those_of_the_graph(self, batch: str) -> None:
        config = text_format.Parse(f"{self.X} {self.Y} {batch}", pb.ModelConfig())
        found = configured_signature(config)
        assert found is not None
        first = ("batch",) if batch else ()
        assert found.inputs == (spec("x", *first, 3, f"x.{1 + len(first)}"),)
        assert found.outputs == (spec("y", *first, dtype=DType.INT64),)
        complete(config, found, labels_file=None)  # agrees

    def test_optional_inputs(self) -> None:
        text = f'{self.X} input {{ name: "z" data_type: TYPE_FP32 dims: [1] optional: true }} {self.Y}'
        found = configured_signature(text_format.Parse(text, pb.ModelConfig()))
        assert found is not None
        assert [each.name for each in found.inputs] == ["x"]
        assert [each.name for each in found.optional_inputs] == ["z"]

    @pytest.mark.parametrize(
        "text", [X, Y, X + 'output { name: "y" dims: [1] }', X + 'output { name: "y" data_type: TYPE_FP32 }']
    )
    def test_incomplete_configuration(self, text: str) -> None:
        assert configured_signature(text_format.Parse(text, pb.ModelConfig())) is None


class TestContradictions:
    @pytest.mark.parametrize(
        ("text", "graph", "words"),
        [
            ('input { name: "z" }', ROWS, r"input 'z' is not in the graph of 'm' \(the graph has x FP32\[batch,3\]\)"),
            (
                'output { name: "z" }',
                ROWS,
                r"output 'z' is not in the graph of 'm' \(the graph has y FP32\[batch,2\]\)",
            ),
            (
                'input { name: "x" data_type: TYPE_INT64 }',
                ROWS,
                "data type of input 'x' do not fit the graph: expected TYPE_FP32, got TYPE_INT64",
            ),
            ('input { name: "x" dims: [4] }', ROWS, r"without the batch\) of input 'x' .* expected \[3\], got \[4\]"),
            ('output { name: "y" dims: [2, 1] }', WHOLE, r"dims of output 'y' .* expected \[2, 2\], got \[2, 1\]"),
            ('input { name: "x" dims: [1] }', WHOLE, r"expected \[2, 3\], got \[1\]"),
            ('input { name: "x" dims: [-1, 3] }', WHOLE, r"expected \[2, 3\], got \[-1, 3\]"),
            ("max_batch_size: 4", SCALAR, r"max_batch_size is 4, but tensor x FP32\[\] has no batch dimension"),
            (
                "max_batch_size: 4",
                signature(spec("x", 2, 3), outputs=(spec("y", 5, 2),)),
                r"has no common batch dimension: x FP32\[2,3\], y FP32\[5,2\]",
            ),
            (
                "max_batch_size: 4",
                signature(spec("x", "batch", 3), outputs=(spec("y", 2),)),
                "has no common batch dimension",
            ),
        ],
    )
    def test_contradictions_to_the_graph(self, text: str, graph: Signature, words: str) -> None:
        with pytest.raises(RepositoryError, match=words):
            completed(text, graph)

    def test_missing_input(self) -> None:
        pair = signature(spec("a", "batch", 2), spec("b", "batch", 2))
        with pytest.raises(RepositoryError, match=r"omits inputs of the graph: b FP32\[batch,2\] \(name all inputs"):
            completed('input { name: "a" }', pair)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (
                'batch_input { target_name: "n" data_type: TYPE_FP32 source_input: "x" }',
                "source_input 'x' is not among",
            ),
            ('output { name: "y" dims: [2] } batch_output { target_name: "y" source_input: "x" }', "source_input 'x'"),
            ('sequence_batching { state { input_name: "a" output_name: "b" } }', "state 'a' has no data_type"),
            ("sequence_batching { iterative_sequence: true }", "requests iterative_sequence"),
        ],
    )
    def test_unsupported_provided_tensors(self, text: str, message: str) -> None:
        with pytest.raises(RepositoryError, match=message):
            completed(f"max_batch_size: 4 {text}", ROWS)


class TestProvidedTensors:
    """Control inputs, states and batch inputs are in the graph, and in no request."""

    SEQUENCE = """
        max_batch_size: 4 sequence_batching {
          control_input { name: "go" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } }
          state { input_name: "in" output_name: "out" data_type: TYPE_FP32 dims: [1] }
        }
    """
    STATEFUL = Signature(
        inputs=(spec("x", "batch", 3), spec("go", "batch", 1), spec("in", "batch", 1)),
        outputs=(spec("out", "batch", 1), spec("y", "batch", 3)),
    )
    RAGGED = """
        max_batch_size: 4 input { name: "x" dims: [-1] allow_ragged_batch: true }
        batch_input { kind: BATCH_ELEMENT_COUNT target_name: "n" data_type: TYPE_FP32 source_input: "x" }
        output { name: "y" dims: [-1] }
        batch_output { kind: BATCH_SCATTER_WITH_INPUT_SHAPE target_name: "y" source_input: "x" }
    """
    FLAT = Signature(inputs=(spec("x", "total"), spec("n", "rows")), outputs=(spec("y", "total"),))

    def test_sequence_tensors_are_not_in_requests(self) -> None:
        config = completed(self.SEQUENCE, self.STATEFUL)
        assert [tensor.name for tensor in config.input] == ["x"]
        assert [tensor.name for tensor in config.output] == ["y"]
        assert not config.HasField("dynamic_batching")

    def test_batch_inputs_are_not_in_requests(self) -> None:
        config = completed(self.RAGGED, self.FLAT)
        assert [(tensor.name, dims(tensor)) for tensor in config.input] == [("x", [-1])]
        assert config.input[0].data_type == config.output[0].data_type == pb.DataType.TYPE_FP32

    def test_ragged_input_without_dims(self) -> None:
        config = completed(self.RAGGED.replace('"x" dims: [-1]', '"x"'), self.FLAT)
        assert dims(config.input[0]) == [-1]

    def test_rows_beside_ragged_inputs_need_a_batch_dimension(self) -> None:
        flat = Signature(inputs=(*self.FLAT.inputs, spec("z", 5)), outputs=self.FLAT.outputs)
        with pytest.raises(RepositoryError, match="a fixed batch of 5"):
            completed(self.RAGGED + 'input { name: "z" dims: [5] }', flat)


class TestDictionary:
    """Triton's auto-completion takes what it is handed back: a live dictionary, of which some fields are read."""

    def test_dictionary_is_completed_in_place(self) -> None:
        config: dict[str, Any] = {"name": "m", "max_batch_size": 0, "input": [], "output": [], "version_policy": None}
        complete_dictionary(config, ROWS, labels_file="labels.txt")
        assert config["max_batch_size"] == DEFAULT_MAX_BATCH_SIZE
        assert config["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": ["3"]}]
        expected = {"name": "y", "data_type": "TYPE_FP32", "dims": ["2"], "label_filename": "labels.txt"}
        assert config["output"] == [expected]
        assert config["dynamic_batching"] == {}
        assert config["version_policy"] is None

    def test_response_cache_is_refused(self) -> None:
        with pytest.raises(RepositoryError, match="requests response_cache"):
            completed("response_cache { enable: true }", ROWS)
        completed("response_cache { enable: false }", ROWS)
        config = {"name": "m", "max_batch_size": 0, "input": [], "output": [], "response_cache": {"enable": True}}
        with pytest.raises(RepositoryError, match="requests response_cache"):
            complete_dictionary(config, ROWS, labels_file=None)


class TestText:
    def test_committed_config_is_reproduced(self, digits: Path) -> None:
        manifest = Manifest.read(digits / "1" / "manifest.json")
        text = config_text(
            "digits",
            manifest.signature,
            max_batch_size=32,
            labels_file=None,
            contract=Contract(preprocess=manifest.preprocess),
        )
        assert (digits / "config.pbtxt").read_text() == text

    def test_preprocess_ranking_and_task_are_published(self) -> None:
        preprocess = Preprocess(resize=(8, 8), crop=None)
        ranking = Ranking(scores="y", indices="z")
        task = Embedding(vectors="y")
        contract = Contract(preprocess=preprocess, ranking=ranking, task=task)
        text = config_text("m", ROWS, max_batch_size=8, labels_file=None, contract=contract)
        published = text_format.Parse(text, pb.ModelConfig()).parameters
        values = {parameter.string_value for parameter in published.values()}
        assert values == {preprocess.to_json(), ranking.to_json(), encode_json(task)}
        assert not text_format.Parse(
            config_text("m", ROWS, max_batch_size=8, labels_file=None), pb.ModelConfig()
        ).parameters

    @pytest.mark.parametrize(
        ("graph", "largest", "warmed"),
        [(ROWS, 8, True), (SCALARS, 8, True), (IMAGES, 8, False), (WHOLE, 0, False)],
    )
    def test_warmup_needs_known_sizes(self, graph: Signature, largest: int, warmed: bool) -> None:
        text = config_text("m", graph, max_batch_size=largest, labels_file=None)
        samples = text_format.Parse(text, pb.ModelConfig()).model_warmup
        assert bool(samples) == warmed
        for sample in samples:
            assert sample.batch_size == 1
            assert sample.inputs["x"].zero_data
            assert list(sample.inputs["x"].dims) == list(text_format.Parse(text, pb.ModelConfig()).input[0].dims)


# The versions that a policy selects.


@pytest.mark.parametrize(
    ("policy", "selected"),
    [
        ("", [10]),
        ("version_policy { latest { } }", [10]),
        ("version_policy { latest { num_versions: 2 } }", [9, 10]),
        ("version_policy { latest { num_versions: 7 } }", [1, 9, 10]),
        ("version_policy { all { } }", [1, 9, 10]),
        ("version_policy { specific { versions: [9, 1, 4] } }", [1, 9]),
        ("version_policy { specific { } }", []),
    ],
)
def test_version_policies(tmp_path: Path, policy: str, selected: list[int]) -> None:
    (tmp_path / "config.pbtxt").write_text(policy)
    assert select_versions(read_config(tmp_path / "config.pbtxt"), [10, 1, 9]) == selected


# The dimension that keeps a request of 2^32 rows from breaking a batch of others.


def guarded(text: str) -> list[list[int] | None]:
    """The reshape of each input."""
    config = text_format.Parse(text, pb.ModelConfig())
    guard_batch(config)
    return [list(tensor.reshape.shape) if tensor.HasField("reshape") else None for tensor in config.input]


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        ("dims: [3, 224, 224]", [1, 3, 224, 224]),
        ("dims: [-1, 3]", [1, -1, 3]),
        ("dims: [1, 32, 32]", None),
        ("dims: [4] reshape { shape: [2, 2] }", [1, 2, 2]),
        ("dims: [4] reshape { shape: [1, 4] }", [1, 4]),
        ("dims: [1] reshape { }", [1]),
        ("dims: [1] reshape { } optional: true", []),
    ],
)
def test_guard_adds_a_dimension_to_batched_inputs(tensor: str, expected: list[int] | None) -> None:
    text = f'max_batch_size: 8 input {{ name: "x" data_type: TYPE_FP32 {tensor} }}'
    assert guarded(text) == [expected]
    config = ModelConfig.from_protobuf(text_format.Parse(text, pb.ModelConfig()), has_gpu=False)
    assert set(config.input_ranks) == {"x"}


def test_guard_ignores_models_without_batching() -> None:
    assert guarded('input { name: "x" dims: [3] }') == [None]


def test_guarded_config_fits_its_graph() -> None:
    spec = TensorSpec(name="x", dtype=DType.FP32, shape=("batch", 3))
    signature = Signature(inputs=(spec,), outputs=(TensorSpec(name="y", dtype=DType.FP32, shape=("batch",)),))
    config = pb.ModelConfig(name="m", max_batch_size=8)
    for _ in range(2):
        complete(config, signature, labels_file=None)
        guard_batch(config)
    assert list(config.input[0].reshape.shape) == [1, 3]
    assert ModelConfig.from_protobuf(config, has_gpu=False).input_ranks == {"x": 3}


# Triton's messages come without gRPC, and are those of the whole package.

PROGRAM = """
import sys
from graphkiln_backend.repository.config import pb
assert "grpc" not in sys.modules and "asyncio" not in sys.modules
import tritonclient.grpc
assert tritonclient.grpc.model_config_pb2 is pb
tritonclient.grpc.service_pb2.ModelConfigResponse(config=pb.ModelConfig(name="m"))
"""


def test_protobuf_is_imported_without_grpc() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=120)
