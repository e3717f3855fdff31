"""Import torchvision even if its compiled operators are missing or built for another PyTorch.

torchvision declares `nms` in its compiled part only, and cannot be imported without it. Classifiers do not use it.
"""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from types import ModuleType

import torch

# Declarations of a library live as long as this object.
_DECLARED: list[torch.library.Library] = []


def prepare_torchvision() -> None:
    """Import torchvision if it is installed, so that later imports find it."""
    if find_spec("torchvision"):
        with suppress(ImportError, RuntimeError):  # the importing library reports the error
            import_torchvision()


def import_torchvision() -> ModuleType:
    """Import torchvision.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
        for name in ("nms", "qnms"):
            schema = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            library.define(schema)  # type: ignore[no-untyped-call]
        _DECLARED.append(library)
        import torchvision
    module: ModuleType = torchvision
    return module
