"""Labels files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.labels import check_count, count_classes, labels_text, read_labels
from graphkiln_backend.graph.signature import Dim, Signature, TensorSpec


def signature(*shape: Dim) -> Signature:
    return Signature(inputs=(), outputs=(TensorSpec(name="y", dtype=DType.FP32, shape=shape),))


@pytest.mark.parametrize(
    ("content", "labels"),
    [
        (b"", ()),
        (b"a", ("a",)),
        (b"a\nb\n", ("a", "b")),
        (b"a\r\nb\r\n", ("a", "b")),
        (b"a\n\nb\n", ("a", "", "b")),
        (b"a\n\n", ("a", "")),
        (b"\xef\xbb\xbfa\n", ("a",)),
        ("a\x0cb\u2028c\n".encode(), ("a\x0cb\u2028c",)),  # str.splitlines would make three of it
    ],
)
def test_a_label_is_a_line(tmp_path: Path, content: bytes, labels: tuple[str, ...]) -> None:
    (tmp_path / "labels.txt").write_bytes(content)
    assert read_labels(tmp_path / "labels.txt") == labels


@pytest.mark.parametrize("labels", [(), ("a",), ("a", ""), ("", ""), ("größe", "a b", "a:b")])
def test_are_read_as_they_were_written(tmp_path: Path, labels: tuple[str, ...]) -> None:
    (tmp_path / "labels.txt").write_text(labels_text(labels))
    assert read_labels(tmp_path / "labels.txt") == labels


@pytest.mark.parametrize("label", ["a\nb", "a\r", "\x00", "a\u2028b", "\x1b[1m"])
def test_a_label_that_would_be_two_lines(label: str) -> None:
    with pytest.raises(ManifestError, match="label of class 1 holds a control character"):
        labels_text(["a", label])


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="No such file"):
        read_labels(tmp_path / "labels.txt")
    (tmp_path / "labels.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ManifestError, match="not UTF-8"):
        read_labels(tmp_path / "labels.txt")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ManifestError, match="it is a pipe"):
        read_labels(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("shape", "classes"),
    [(("batch", 3), 3), ((1, 3), 3), (("batch",), None), (("batch", "n"), None), (("batch", 3, 8, 8), None)],
)
def test_classes_of_an_output(shape: tuple[Dim, ...], classes: int | None) -> None:
    assert count_classes(signature(*shape)) == classes


def test_one_for_each_class() -> None:
    check_count(("a", "b"), signature("batch", 2), "f")
    check_count((), signature("batch", 2), "f")
    check_count(("a", "b", "c"), signature("batch", "n"), "f")
    assert count_classes(Signature(inputs=(), outputs=())) is None
    for labels in (("a",), ("a", "b", "c")):
        with pytest.raises(ManifestError, match=f"f has {len(labels)} labels, but output 'y' has 2 classes"):
            check_count(labels, signature("batch", 2), "f")
