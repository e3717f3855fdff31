"""Libraries of models, imported once for all conversions."""

import importlib

from graphkiln_converters.torch_libraries import import_torchvision

__all__ = ["timm", "torchvision", "transformers"]

torchvision = import_torchvision()
timm = importlib.import_module("timm")  # it imports torchvision
transformers = importlib.import_module("transformers")
for _name in ("convert", "sources.timm", "sources.huggingface", "sources.torchvision"):
    importlib.import_module(f"graphkiln_converters.{_name}")
