"""The kinds of sources: one entry says everything that the rest of the converters knows of a kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of source.

    Attributes:
        module: Module in `sources/` that opens it.
        extra: Extra that installs its library.
        files: Suffixes of its files, if it is a single file; empty otherwise.
        takes_weights: `--weights` gives its weights; otherwise the source contains them.
    """

    module: str
    extra: str = "convert"
    files: tuple[str, ...] = ()
    takes_weights: bool = False


# The kinds of `KIND:LOCATION`.
KINDS = {
    "torchvision": Kind(module="torchvision", extra="torchvision", takes_weights=True),
    "timm": Kind(module="timm", extra="timm", takes_weights=True),
    "huggingface": Kind(module="huggingface", extra="huggingface", takes_weights=True),
    "decoder": Kind(module="decoder", extra="huggingface", takes_weights=True),
    "python": Kind(module="python_module", takes_weights=True),
    "oneflow": Kind(module="oneflow_graph"),
    "torchscript": Kind(module="torchscript", files=(".pt", ".pth")),
    "sklearn": Kind(module="sklearn", extra="sklearn", files=(".skops",)),
    "keras": Kind(module="keras", extra="keras", files=(".keras",)),
    "mlflow": Kind(module="mlflow", extra="mlflow"),
}
# Suffixes of files that are sources without the name of a kind.
BY_SUFFIX = {
    ".pt2": Kind(module="exported_program", files=(".pt2",)),
    ".onnx": Kind(module="onnx_file", files=(".onnx",)),
    ".skops": KINDS["sklearn"],
    ".keras": KINDS["keras"],
}
FILE_SUFFIXES = tuple(dict.fromkeys(suffix for kind in (*BY_SUFFIX.values(), *KINDS.values()) for suffix in kind.files))
