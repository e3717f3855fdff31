"""From a saved job to an ONNX graph: inputs and outputs, weights, checks of every value, third-party translators."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import onnx_ir
import pytest
from translating import run_model

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.oneflow import translation as registry
from graphkiln_converters.oneflow.building import BY_PROTO_NAME, Op, Value
from graphkiln_converters.oneflow.mlir import parse
from graphkiln_converters.oneflow.translation import (
    GROUP,
    built_in_translators,
    find_translators,
    order_by_signature,
    read_state,
    translate,
)

T, INTEGERS = "tensor<2x3xf32>", "tensor<2x3xsi64>"


def job(body: str, returns: str, *, arguments: str = f"%a: {T}", types: str = T) -> str:
    return f"oneflow.job @G({arguments}) -> ({types}) {{\n{body}\noneflow.return {returns} : {types}\n}}"


def translated(text: str, folder: Path = Path("nowhere")) -> onnx_ir.Model:
    return translate(parse(text), folder)


def save(folder: Path, name: str, array: AnyArray, kind: str = "kFloat") -> None:
    (folder / name).mkdir()
    (folder / name / "out").write_bytes(array.tobytes())
    dims = " ".join(f"dim: {dim}" for dim in array.shape)
    (folder / name / "meta").write_text(f"shape {{ {dims} }} data_type: {kind}")


X = np.array([[-1, 2, -3], [4, -5, 6]], "f4")
RELU = f'%r = "oneflow.relu"(%a) {{op_name = "r"}} : ({T}) -> {T}'


class TestInputsAndOutputs:
    def test_are_named_by_number(self) -> None:
        model = translated(job(RELU, "%r"))
        assert [value.name for value in model.graph.inputs] == ["INPUT_0"]
        assert [value.name for value in model.graph.outputs] == ["OUTPUT_0"]
        np.testing.assert_array_equal(run_model(model, {"INPUT_0": X})[0], np.maximum(X, 0))

    def test_a_value_returned_twice_gives_two_outputs(self) -> None:
        outputs = run_model(translated(job(RELU, "%r, %r", types=f"{T}, {T}")), {"INPUT_0": X})
        np.testing.assert_array_equal(outputs[0], outputs[1])
        assert len(outputs) == 2

    def test_an_input_can_be_returned(self) -> None:
        (output,) = run_model(translated(job("", "%a")), {"INPUT_0": X})
        np.testing.assert_array_equal(output, X)

    def test_an_input_of_unknown_size_is_refused(self) -> None:
        with pytest.raises(ConversionError, match=r"input 0 has the type tensor<\?x3xf32>, with a dynamic size"):
            translated(job("", "%a", arguments="%a: tensor<?x3xf32>", types="tensor<?x3xf32>"))

    def test_a_boolean_input_is_recognized_by_its_type_number(self) -> None:
        """OneFlow's bool is si8 in MLIR."""
        one = "tensor<2xsi8>"
        text = job(
            f'%i = "oneflow.input"(%a) {{data_type = 12 : i32, op_name = "i"}} : ({one}) -> {one}',
            "%i",
            arguments=f"%a: {one}",
            types=one,
        )
        assert translated(text).graph.inputs[0].dtype == onnx_ir.DataType.BOOL

    def test_an_unsupported_element_type_is_refused(self) -> None:
        with pytest.raises(ConversionError, match="element type i4"):
            translated(job("", "%a", arguments="%a: tensor<2xi4>", types="tensor<2xi4>"))

    @pytest.mark.parametrize(
        "operation",
        [
            f'%x = "oneflow.input"(%a, %a) {{op_name = "x"}} : ({T}, {T}) -> {T}',
            f'%x, %y = "oneflow.output"(%a) {{op_name = "x"}} : ({T}) -> ({T}, {T})',
            f'%x = "oneflow.variable"(%a) {{op_name = "x"}} : ({T}) -> {T}',
        ],
    )
    def test_input_output_and_variable_operations_with_other_operands_are_refused(self, operation: str) -> None:
        with pytest.raises(ConversionError, match=r"line 2: \w+ has \d operands and \d results, expected \d and 1"):
            translated(job(operation, "%x"))

    def test_outputs_are_in_the_order_of_the_signature(self) -> None:
        names = ("_G_1_output.0.0.2_12", "_G_1_output.0.0.0_3", "_G_1_output.0.0.1_4")
        lines = [f'%{i} = "oneflow.output"(%a) {{op_name = "{name}"}} : ({T}) -> {T}' for i, name in enumerate(names)]
        text = job("\n".join(lines), "%0, %1, %2", types=", ".join([T] * 3))
        assert order_by_signature(parse(text))[1] == ["%1", "%2", "%0"]


class TestWeights:
    VARIABLE = f'%w = "oneflow.variable"() {{op_name = "w"}} : () -> {T}'
    ADD = f'%r = "oneflow.add_n2"(%a, %w) {{op_name = "r"}} : ({T}, {T}) -> {T}'

    def test_are_read_from_the_folder(self, tmp_path: Path) -> None:
        save(tmp_path, "w", 10 * X)
        model = translated(job(f"{self.VARIABLE}\n{self.ADD}", "%r"), tmp_path)
        np.testing.assert_array_equal(run_model(model, {"INPUT_0": X})[0], 11 * X)

    @pytest.mark.parametrize(
        ("array", "kind", "found"),
        [
            (np.zeros((3, 2), "f4"), "kFloat", r"FP32 \[3, 2\]"),
            (np.zeros((2, 3), "f8"), "kDouble", r"FP64 \[2, 3\]"),
            (np.zeros((2, 3), "i4"), "kInt32", r"INT32 \[2, 3\]"),
        ],
    )
    def test_weights_of_another_model_are_refused(self, tmp_path: Path, array: AnyArray, kind: str, found: str) -> None:
        save(tmp_path, "w", array, kind)
        with pytest.raises(ConversionError, match=rf"'w' is {found}, but line 2 .* expects tensor<2x3xf32>") as caught:
            translated(job(f"{self.VARIABLE}\n{self.ADD}", "%r"), tmp_path)
        assert "different models" in caught.value.hint


class TestChecks:
    def test_a_result_of_another_shape_is_refused(self) -> None:
        other = "tensor<3x3xf32>"
        text = job(f'%r = "oneflow.relu"(%a) {{op_name = "r"}} : ({T}) -> {other}', "%r", types=other)
        with pytest.raises(ConversionError, match=r"line 2: .*relu 'r' has the shape \[2, 3\], OneFlow's has \[3, 3\]"):
            translated(text)

    def test_a_result_of_another_type_is_refused(self) -> None:
        text = job(f'%r = "oneflow.relu"(%a) {{op_name = "r"}} : ({T}) -> {INTEGERS}', "%r", types=INTEGERS)
        with pytest.raises(ConversionError, match=r"has the type FLOAT, OneFlow's has si64"):
            translated(text)

    def test_an_untranslated_result_may_be_declared_but_not_used(self) -> None:
        image, small = "tensor<1x1x4x4xf32>", "tensor<1x1x2x2xf32>"
        attributes = 'op_name = "p", kernel_size = [2 : si32, 2 : si32], stride = [2 : si32, 2 : si32]'
        attributes += ", padding = [0 : si32, 0 : si32], dilation = [1 : si32, 1 : si32]"
        pool = f'%y, %i = "oneflow.max_pool_2d"(%a) {{{attributes}}} : ({image}) -> ({small}, tensor<1x1x2x2xsi64>)'
        assert translated(job(pool, "%y", arguments=f"%a: {image}", types=small)).graph.outputs
        with pytest.raises(ConversionError, match="the graph returns %i, which the translation"):
            translated(job(pool, "%i", arguments=f"%a: {image}", types="tensor<1x1x2x2xsi64>"))
        used = f'{pool}\n%z = "oneflow.identity"(%i) {{}} : (tensor<1x1x2x2xsi64>) -> tensor<1x1x2x2xsi64>'
        with pytest.raises(ConversionError, match="line 3: identity takes %i, which the translation"):
            translated(job(used, "%z", arguments=f"%a: {image}", types="tensor<1x1x2x2xsi64>"))

    @pytest.mark.parametrize("error", [IndexError("no such"), KeyError("k"), ValueError("v"), OverflowError("o")])
    def test_an_error_in_a_translator_names_the_operation(
        self, error: Exception, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fails(_: Op) -> Value:
            raise error

        monkeypatch.setattr(registry, "built_in_translators", lambda: {"relu": fails})
        with pytest.raises(ConversionError, match="line 2: relu 'r': operands and attributes are not as expected"):
            translated(job(RELU, "%r"))


# State tensors as flow.save writes them: a folder each, with elements in `out`, type and shape in `meta`.


@pytest.mark.parametrize("kind", BY_PROTO_NAME)
def test_elements_of_every_type_are_memory_mapped_read_only(tmp_path: Path, kind: str) -> None:
    array = np.array([[0, 1, 2], [3, 0, 5]]).astype(BY_PROTO_NAME[kind].numpy)
    save(tmp_path, "t", array, kind)
    tensor = read_state(tmp_path, "t")
    assert tensor.dtype is BY_PROTO_NAME[kind]
    loaded = tensor.load()
    np.testing.assert_array_equal(loaded, array)
    assert isinstance(loaded, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        loaded[0] = 1


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1)])
def test_scalars_and_empty_tensors(tmp_path: Path, shape: tuple[int, ...]) -> None:
    save(tmp_path, "t", np.ones(shape, "f8"), "kDouble")
    assert read_state(tmp_path, "t").load().shape == shape


def test_unknown_fields_are_ignored(tmp_path: Path) -> None:
    save(tmp_path, "t", np.ones(2, "i1"), "kInt8")
    (tmp_path / "t" / "meta").write_text('shape { dim: 2 } data_type: kInt8 placement: "cpu" memory { kind: 3 }')
    assert read_state(tmp_path, "t").dtype is DType.INT8


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("out", None, "there is no .*t/out"),
        ("meta", None, "there is no .*t/meta"),
        ("out", bytes(23), r"out has 23 bytes, expected 24 for FP32 \[2, 3\]: it is too short"),
        ("out", bytes(25), "it is too long"),
        ("out.tmp", b"", r"out\.tmp is unknown"),
        ("meta", b"", "has no data_type"),
        ("meta", b"data_type: kTensorBuffer", "cannot be read"),
        ("meta", b"shape { dim: two } data_type: kFloat", "cannot be read"),
        ("meta", b"shape { dim: 2", "cannot be read"),
        ("meta", b"shape { dim: -2 dim: -3 } data_type: kFloat", r"has the shape \[-2, -3\]"),
        ("meta", b"shape { dim: 99999999999999999999 } data_type: kFloat", "cannot be read"),
        ("meta", b"\xff\xfe", "cannot be read"),
    ],
)
def test_an_error_names_the_damaged_tensor(tmp_path: Path, file: str, content: bytes | None, message: str) -> None:
    save(tmp_path, "t", np.zeros((2, 3), "f4"))
    if content is None:
        (tmp_path / "t" / file).unlink()
    else:
        (tmp_path / "t" / file).write_bytes(content)
    with pytest.raises(ConversionError, match=f"state tensor 't': .*{message}") as caught:
        read_state(tmp_path, "t")
    assert caught.value.hint


def test_a_missing_tensor_is_refused_with_its_likely_cause(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, hint in (
        ("nowhere", "incomplete"),
        ("file", "incomplete"),
        ("m.ab-FreeEagerTensor-1", "register_buffer()"),
    ):
        with pytest.raises(ConversionError, match=f"'{name}': there is no .*{name}/meta") as caught:
            read_state(tmp_path, name)
        assert hint in caught.value.hint


@pytest.mark.parametrize("name", [".", "..", "../t", "a/t", "/etc", "t/"])
def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    save(tmp_path, "t", np.zeros(1, "f4"))
    with pytest.raises(ConversionError, match="leads out of"):
        read_state(tmp_path, name)


# Translators by the operation's name.


def doubled(op: Op) -> Value:
    return op.emit("Add", op.x, op.x)


@pytest.fixture
def third_party(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """Third-party entry points, to be filled by a test."""
    entries: list[EntryPoint] = []
    monkeypatch.setattr(registry, "entry_points", lambda group: entries if group == GROUP else [])
    monkeypatch.setattr(EntryPoint, "load", lambda _: doubled)
    return entries


def test_unsupported_operations_are_listed_with_their_counts() -> None:
    message = r"2 of 3 kinds of operations cannot be translated: bend \(1 times\), warp \(2 times\)"
    with pytest.raises(ConversionError, match=message) as caught:
        find_translators(["warp", "relu", "bend", "warp"])
    assert GROUP in caught.value.hint


def test_a_third_party_can_add_a_translator(third_party: list[EntryPoint]) -> None:
    third_party.append(EntryPoint(name="theirs.double", value="theirs:doubled", group=GROUP))
    assert find_translators(["theirs.double", "relu"]) == {
        "theirs.double": doubled,
        "relu": built_in_translators()["relu"],
    }


def test_the_guide_states_the_number_of_operations(repository: Path) -> None:
    guide = " ".join((repository / "docs" / "how-to" / "oneflow.md").read_text().split())
    assert f" {len(built_in_translators())} operations are supported" in guide
