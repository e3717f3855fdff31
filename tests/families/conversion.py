"""Convert one architecture in a separate process, so that its peak memory is that of the conversion.

The architecture is built by its library's functions, and its weights are passed as a file (a folder for transformers):
the reference of the served graph is independent of our sources.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
import warnings
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from architectures import Architecture

_LIMIT_S = 540
_BATCH = 3
_TOKENS = 11
_OUTPUTS = ("logits", "last_hidden_state", "pooler_output")
_PROCESSES = multiprocessing.get_context("forkserver")
# The libraries are imported once; each conversion is a fork of that process.
_PROCESSES.set_forkserver_preload(["preloaded"])


def convert(architecture: Architecture, folder: Path) -> dict[str, float]:
    """Convert into `folder/store/NAME`, and save eager PyTorch's outputs in `folder/NAME.npz`.

    Returns:
        `seconds` of the conversion, `mib` of memory at its peak, `imported` MiB before it.
    """
    measured: dict[str, float] = _in_a_process(architecture, _converted, architecture, folder)
    return measured


def own_error(architecture: Architecture) -> float:
    """Error of PyTorch's fp32 beside its fp64 on the same images, in the worse memory format."""
    error: float = _in_a_process(architecture, _own_error, architecture)
    return error


def _in_a_process(architecture: Architecture, function: Callable[..., Any], *arguments: Any) -> Any:
    _import_libraries()
    receiver, sender = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_send, args=(sender, function, *arguments), daemon=True)
    process.start()
    sender.close()
    try:
        assert receiver.poll(_LIMIT_S), f"{architecture} was not converted in {_LIMIT_S} s"
        measured = receiver.recv()
    except EOFError:
        process.join(10)
        measured = f"the process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()
        receiver.close()
    assert not isinstance(measured, str), measured
    return measured


def _import_libraries() -> None:
    """Start the process that all conversions fork; it imports `preloaded` from its path."""
    with mock.patch.dict(os.environ, PYTHONPATH=str(Path(__file__).parent)):
        forkserver.ensure_running()


def _send(sender: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    warnings.simplefilter("ignore")  # of the libraries, about initial weights
    try:
        sender.send(function(*arguments))
    except BaseException as error:
        sender.send(f"{type(error).__name__}: {error}")
        raise


def _converted(architecture: Architecture, folder: Path) -> dict[str, float]:
    from graphkiln_converters.convert import convert as convert_recipe
    from graphkiln_converters.recipe_file import read_recipe

    imported = _peak_mib()
    options = _eager(architecture, folder)
    values = {"name": architecture.name, "model_store": str(folder / "store"), **options}
    begun = time.perf_counter()
    convert_recipe(read_recipe(None, values, []), command=f"convert {architecture}")
    return {"seconds": time.perf_counter() - begun, "mib": _peak_mib(), "imported": imported}


def _own_error(architecture: Architecture) -> float:
    import torch

    torch.manual_seed(7)
    module = _module(architecture).eval()
    _make_decisive(module)
    (image,) = map(torch.from_numpy, _feeds(architecture).values())
    with torch.inference_mode():
        found = [
            module(image.contiguous(memory_format=each)) for each in (torch.contiguous_format, torch.channels_last)
        ]
        exact = module.double()(image.double())
    return max(float(torch.linalg.norm(each - exact) / torch.linalg.norm(exact)) for each in found)


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _eager(architecture: Architecture, folder: Path) -> dict[str, Any]:
    """Run the eager module and save its outputs; return options of the conversion."""
    import torch

    torch.manual_seed(7)
    module = _module(architecture).eval()
    _make_decisive(module)
    feeds = _feeds(architecture)
    with torch.inference_mode():
        returned = module(**{name: torch.from_numpy(array) for name, array in feeds.items()})
    outputs = (
        [returned] if isinstance(returned, torch.Tensor) else [returned[key] for key in _OUTPUTS if key in returned]
    )
    arrays = {f"INPUT_{i}": array for i, array in enumerate(feeds.values())}
    arrays |= {f"OUTPUT_{i}": tensor.numpy() for i, tensor in enumerate(outputs)}
    np.savez(folder / f"{architecture.name}.npz", **arrays)
    if architecture.library == "transformers":
        module.save_pretrained(folder / architecture.name)
        return {"source": f"huggingface:{folder / architecture.name}"}
    torch.save(module.state_dict(), folder / f"{architecture.name}.pth")
    side = architecture.side
    return {
        "source": str(architecture), "weights": str(folder / f"{architecture.name}.pth"), "shape": [f"3x{side}x{side}"]
    }  # fmt: skip


def _module(architecture: Architecture) -> Any:
    from preloaded import timm, torchvision, transformers

    if architecture.library == "timm":
        return timm.create_model(architecture.name)
    if architecture.library == "torchvision":
        return torchvision.models.get_model(architecture.name, weights=None)
    kind = getattr(transformers, architecture.name)
    return kind(kind.config_class(**dict(architecture.config)))


def _make_decisive(module: Any) -> None:
    """Vary constant tensors, such as branches that are initialized with zero, so that they affect the outputs."""
    import torch

    for tensor in (*module.parameters(), *module.buffers()):
        if (
            tensor.is_floating_point()
            and tensor.dim()
            and tensor.numel() > 1
            and bool((tensor == tensor.flatten()[0]).all())
        ):
            tensor.data += 0.1 * torch.rand_like(tensor)


def _feeds(architecture: Architecture) -> dict[str, Any]:
    generator = np.random.default_rng(3)
    if architecture.side:
        name = "pixel_values" if architecture.library == "transformers" else "x"
        shape = (_BATCH, 3, architecture.side, architecture.side)
        return {name: generator.standard_normal(shape).astype(np.float32)}
    ids = generator.integers(3, 99, (_BATCH, _TOKENS))
    mask = np.ones_like(ids)
    mask[1, -4:] = 0
    return {"input_ids": ids, "attention_mask": mask}
