"""Strings, numbers and shaped types as MLIR writes them."""

from __future__ import annotations

import struct

import pytest

from graphkiln_converters.oneflow.job import Opaque, TensorType
from graphkiln_converters.oneflow.mlir import read_number, read_shaped_type, read_string


@pytest.mark.parametrize(
    ("literal", "content"),
    [
        ('""', ""),
        ('"plain"', "plain"),
        (r'"\"\\\n\t"', '"\\\n\t'),
        (r'"\41\7a"', "Az"),
        (r'"\5C\22"', '\\"'),
        (r'"m.first-conv2d_0"', "m.first-conv2d_0"),
    ],
)
def test_strings(literal: str, content: str) -> None:
    assert read_string(literal) == content


class TestNumbers:
    @pytest.mark.parametrize(
        ("literal", "type_name", "number"),
        [
            ("12", "si32", 12),
            ("-12", "", -12),
            ("+3", "i64", 3),
            ("0xff", "i32", 255),
            ("1", "f32", 1.0),
            ("1e2", "", 100.0),
            ("1.5", "", 1.5),
            ("-2.5E-1", "f64", -0.25),
            ("0xBF80", "bf16", -1.0),
            ("0xC000", "f16", -2.0),
        ],
    )
    def test_values_and_types(self, literal: str, type_name: str, number: float) -> None:
        found = read_number(literal, type_name)
        assert found == number
        assert type(found) is type(number)

    @pytest.mark.parametrize("type_name", ["f16", "bf16", "f32", "f64"])
    def test_as_many_bits_as_the_type_has(self, type_name: str) -> None:
        digits = {"f16": 4, "bf16": 4, "f32": 8, "f64": 16}[type_name]
        assert read_number("0x" + "0" * digits, type_name) == 0.0
        with pytest.raises(ValueError, match=f"has more bits than {type_name}"):
            read_number("0x1" + "0" * digits, type_name)

    def test_hexadecimal_letters_are_no_exponent(self) -> None:
        assert read_number("0x1E5", "") == 0x1E5

    def test_bits_of_an_f64(self) -> None:
        bits = struct.unpack("<Q", struct.pack("<d", 0.1))[0]
        assert read_number(f"0x{bits:X}", "f64") == 0.1

    @pytest.mark.parametrize(("literal", "type_name"), [("1.5", "si32"), ("1e3", "i64"), ("2.", "ui8")])
    def test_no_fractions_of_integers(self, literal: str, type_name: str) -> None:
        with pytest.raises(ValueError, match=f"is no {type_name}"):
            read_number(literal, type_name)


class TestShapedTypes:
    @pytest.mark.parametrize(
        ("literal", "type_"),
        [
            ("tensor<f32>", TensorType((), "f32")),
            ("tensor<0xf32>", TensorType((0,), "f32")),
            ("tensor<2x3x224x224xbf16>", TensorType((2, 3, 224, 224), "bf16")),
            ("vector<4xi32>", TensorType((4,), "i32")),
            ("tensor<?x8xui8>", TensorType((None, 8), "ui8")),
            ("tensor< 2xf64, #encoding>", TensorType((2,), "f64")),
        ],
    )
    def test_shapes(self, literal: str, type_: TensorType) -> None:
        assert read_shaped_type(literal) == type_

    @pytest.mark.parametrize("literal", ["tensor<*xf32>", "memref<2xf32>", "tensor<2xcomplex>x", "tensor<>"])
    def test_forms_that_oneflow_does_not_use(self, literal: str) -> None:
        assert read_shaped_type(literal) == Opaque(literal)

    @pytest.mark.parametrize("text", ["tensor<f32>", "tensor<2x?xsi64>", "tensor<1x2xi1>"])
    def test_are_printed_as_they_are_read(self, text: str) -> None:
        assert str(read_shaped_type(text)) == text
