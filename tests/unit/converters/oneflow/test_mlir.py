"""Parsing MLIR: attributes, types, errors with line and column, and damaged text."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.oneflow.mlir import (
    Job,
    Opaque,
    Operation,
    TensorType,
    parse,
)

JOB = """module {
  oneflow.job @G(%arg0: tensor<2x3xf32>) -> tensor<2x3xf32> {
    %0 = "oneflow.relu"(%arg0) {ATTRIBUTES} : (tensor<2x3xf32>) -> tensor<2x3xf32>
    oneflow.return %0 : tensor<2x3xf32>
  }
}
"""


def attribute(text: str) -> Any:
    return parse(JOB.replace("ATTRIBUTES", f"a = {text}")).operations[0].attributes["a"]


class TestAttributes:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("2 : i32", 2),
            ("-3 : si64", -3),
            ("0x1F : i32", 31),
            ("7", 7),
            ("true", True),
            ("false", False),
            ("1.000000e-05 : f64", 1e-5),
            ("9.99999974E-6 : f32", 9.99999974e-6),
            ("-2.5", -2.5),
            ("3 : f32", 3.0),
            ("0x7F800000 : f32", math.inf),
            ("0xFF800000 : f32", -math.inf),
            ("0x7FF0000000000000 : f64", math.inf),
            ("0x3F80 : bf16", 1.0),
            ("0x3C00 : f16", 1.0),
            ('"text"', "text"),
            (r'"a \"quoted\" \\ back\0Aslash"', 'a "quoted" \\ back\nslash'),
            ('"with : type" : !oneflow.text', "with : type"),
            ('"@0:0, {not} <parsed> -> here // nor a comment"', "@0:0, {not} <parsed> -> here // nor a comment"),
            ("[]", []),
            ("[1 : si32, 2 : si32]", [1, 2]),
            ('["@0:0", "@1:0"]', ["@0:0", "@1:0"]),
            ("[[1], [2, 3]]", [[1], [2, 3]]),
            ("{}", {}),
            ('{b = 1 : i32, c, "d e" = [true]}', {"b": 1, "c": True, "d e": [True]}),
            ("dense<[1, 1, 0, 0]> : vector<4xi32>", [1, 1, 0, 0]),
            ("dense<1> : vector<3xi32>", [1, 1, 1]),
            ("dense<[[1, 2], [3, 4]]> : tensor<2x2xi64>", [1, 2, 3, 4]),
            ("dense<> : tensor<0xi64>", []),
            ("dense<true> : vector<2xi1>", [True, True]),
            ("array<i64: 1, 2, 3>", [1, 2, 3]),
            ("array<i32>", []),
            ("@symbol", "symbol"),
            ("tensor<2x?x4xf16>", TensorType((2, None, 4), "f16")),
            ("tensor<f32>", TensorType((), "f32")),
            ("vector<4xsi8>", TensorType((4,), "si8")),
            ("f32", Opaque("f32")),
            ("(i32, f32) -> i1", Opaque("")),
            ("#sbp.parallel<[] -> [[#sbp.B]]>", Opaque("#sbp.parallel")),
            ("#sbp.parallel<[#sbp.S<0>, #sbp.P] -> [[#sbp.S<1>]]>", Opaque("#sbp.parallel")),
            ("#alias", Opaque("#alias")),
            ('#other.one<"a string", {b = 1}, (c), 2 * 3 + d?> : i64', Opaque("#other.one")),
            ("affine_map<(d0, d1) -> (d0 + d1)>", Opaque("affine_map")),
            ("!oneflow.type<[1, 2]>", Opaque("!oneflow.type")),
            ("unit", Opaque("unit")),
        ],
    )
    def test_every_kind_of_attribute(self, text: str, value: Any) -> None:
        found = attribute(text)
        assert found == value
        assert type(found) is type(value)

    def test_an_attribute_without_a_value_is_true(self) -> None:
        assert parse(JOB.replace("ATTRIBUTES", "inplace, other = 1")).operations[0].attributes == {
            "inplace": True,
            "other": 1,
        }


class TestForms:
    def test_optional_parts_of_operations(self) -> None:
        job = parse(
            """module attributes {a.b = "c"} {
  oneflow.job @"quoted name"(%arg0: tensor<2xf32> {x.y}, %arg1: tensor<2xsi64>) -> (tensor<2xf32>, tensor<2xsi64>)
      attributes {more} {
    "oneflow.nothing"() : () -> ()
    %0:2 = "oneflow.two"(%arg0, %arg1) : (tensor<2xf32>, tensor<2xsi64>) -> (tensor<2xf32>, tensor<2xsi64>)
    %y, %indice = "theirs.pool"(%0#0) <{k = 2 : i32}> {s = 1 : i32} : (tensor<2xf32>) -> (tensor<2xf32>, tensor<2xsi64>)
    oneflow.return %y, %0#1 : tensor<2xf32>, tensor<2xsi64> loc("here")
  } loc(unknown)
}
#loc = loc("file":1:2)
"""
        )
        assert list(job.arguments) == ["%arg0", "%arg1"]
        nothing, two, pool = job.operations
        assert nothing == Operation(
            kind="nothing", operands=(), results=(), attributes={}, operand_types=(), result_types=(), line=4
        )
        assert two.results == ("%0#0", "%0#1")
        assert pool.kind == "theirs.pool"
        assert pool.attributes == {"k": 2, "s": 1}
        assert pool.result_types[1] == TensorType((2,), "si64")
        assert job.returns == ("%y", "%0#1")

    def test_comments_and_a_job_without_module(self) -> None:
        job = parse(
            "// made by hand\noneflow.job @G() -> tensor<f32> {\n"
            '  %c = "oneflow.constant"() : () -> tensor<f32> // one\n  oneflow.return %c : tensor<f32>\n}'
        )
        assert [each.kind for each in job.operations] == ["constant"]


class TestErrors:
    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ("oneflow.return", "oneflow.retrun", r"line 4, column 5: expected .*found 'oneflow.retrun"),
            ("{ATTRIBUTES}", "{a = }", r"line 3, column 37: expected .*found '} :"),
            ("{ATTRIBUTES}", '{a = "open}', r"line 3, column 37"),
            (") -> tensor<2x3xf32>\n", ") -> \n", "line 3, column 10: 'oneflow.return' is not a tensor"),
            ("(%arg0) ", "(%arg1) ", "line 3: relu takes %arg1, which is not defined before it"),
            ("return %0", "return %1", "the graph returns %1, which is not defined"),
            ("%0 =", "%arg0 =", "%arg0 is defined twice"),
            ("(%arg0) ", "(%arg0, %arg0) ", r"line 3, column 10: 2 operands but 1 types"),
            ("%0 =", "%0, %1 =", r"line 3, column 14: 2 results but 1 types"),
            ("%0 =", "%0:99999999 =", "'99999999' is not a valid number"),
            ("(tensor<2x3xf32>) ->", "(!oneflow.list) ->", "'!oneflow.list' is not a tensor"),
            ("{ATTRIBUTES}", "{a = 0x1FFFFFFFF : f32}", "has more bits than f32"),
            ("{ATTRIBUTES}", "{a = 1.5 : i32}", r"'1\.5' is not a number of type i32"),
            ("module {", "modul {", "line 1, column 1"),
        ],
    )
    def test_errors_name_line_and_column(self, old: str, new: str, message: str) -> None:
        with pytest.raises(ConversionError, match=message):
            parse(JOB.replace(old, new, 1).replace("ATTRIBUTES", ""))

    @pytest.mark.parametrize("text", ["", "module {", "module {\n}", "\0", "{" * 5000, "[" * 100_000, '"' * 999])
    def test_text_without_a_graph_is_refused(self, text: str) -> None:
        with pytest.raises(ConversionError):
            parse(text)


TEXT = JOB.replace(
    "ATTRIBUTES",
    'b = [1 : si32], c = "d", e = dense<[1]> : vector<1xi32>, f = #sbp.parallel<[] -> [[#sbp.B]]>, g = 1.0e-5 : f64',
)
PIECES = st.sampled_from(
    ["<", ">", "(", ")", "{", "}", "[", "]", '"', ",", ":", "=", "->", "-", "%0", "@", "#", "!", "dense", "true", "0x",
     "9" * 30, "tensor<", "xf32>", "\n", "//", "\\", "oneflow.return", "\u00e9", "\0"]
)  # fmt: skip


class TestFuzz:
    """Any text gives a graph or a ConversionError."""

    def parsed(self, text: str) -> None:
        try:
            assert isinstance(parse(text), Job)
        except ConversionError:
            return

    @settings(max_examples=300, deadline=None)
    @given(place=st.integers(0, len(TEXT)), length=st.integers(0, 40), piece=PIECES | st.text(max_size=5))
    def test_a_piece_replaced(self, place: int, length: int, piece: str) -> None:
        self.parsed(TEXT[:place] + piece + TEXT[place + length :])

    @settings(max_examples=100, deadline=None)
    @given(st.lists(PIECES, max_size=60))
    def test_pieces_alone(self, pieces: list[str]) -> None:
        self.parsed(" ".join(pieces))

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, len(TEXT) - 1), st.characters()), min_size=1, max_size=5))
    def test_characters_changed(self, changes: list[tuple[int, str]]) -> None:
        text = list(TEXT)
        for place, character in changes:
            text[place] = character
        self.parsed("".join(text))

    def test_cut_anywhere(self) -> None:
        for end in range(len(TEXT)):
            self.parsed(TEXT[:end])
