"""Labels files: a class name a line, as Triton reads them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.files import TEXT_LIMIT, read_bytes
from graphkiln_backend.graph.signature import Signature

_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


def read_labels(path: Path) -> tuple[str, ...]:
    """The labels of a file. Lines end with a line feed and nothing else, as in Triton.

    Raises:
        ManifestError: The file cannot be read, or is not UTF-8.
    """
    try:
        text = read_bytes(path, TEXT_LIMIT).decode("utf-8-sig")
    except OSError as error:
        raise ManifestError(f"cannot read labels from {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ManifestError(f"cannot read labels from {path}: they are not UTF-8: {error}") from error
    return tuple(_lines(text))


def _lines(text: str) -> list[str]:
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines if lines[-1] else lines[:-1]


def labels_text(labels: Sequence[str]) -> str:
    """The content of a labels file.

    Raises:
        ManifestError: A label would not be one line of it.
    """
    for index, label in enumerate(labels):
        if _CONTROL.search(label):
            raise ManifestError(
                f"the label of class {index} holds a control character: {label[:80]!r}", hint="a label is one line"
            )
    return "".join(f"{label}\n" for label in labels)


def count_classes(signature: Signature) -> int | None:
    """Number of classes that the first output scores, `[batch, classes]`; None for any other output."""
    shape = signature.outputs[0].shape if signature.outputs else ()
    last = shape[-1] if len(shape) == 2 else None
    return last if isinstance(last, int) else None


def check_count(labels: Sequence[str], signature: Signature, origin: object) -> None:
    """Refuses labels that are not one for each class.

    Raises:
        ManifestError: Their number is another.
    """
    classes = count_classes(signature)
    if classes is not None and labels and len(labels) != classes:
        raise ManifestError(
            f"{origin} has {len(labels)} labels, but output '{signature.outputs[0].name}' has {classes} classes",
            hint="one line for each class, in the order of the output",
        )
