"""The libraries of models, imported once for all conversions."""

from graphkiln_converters.torch_libraries import import_torchvision

torchvision = import_torchvision()

import torch._dynamo  # noqa: E402, F401
import transformers  # noqa: E402, F401

import graphkiln_converters.convert  # noqa: E402
import graphkiln_converters.sources.huggingface  # noqa: E402
import graphkiln_converters.sources.timm  # noqa: E402, F401
