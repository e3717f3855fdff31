"""Opens models of transformers: their weights, or random ones, and what it says of those that it cannot open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from graphkiln_backend.graph.errors import ConversionError, GraphkilnError


@contextmanager
def opened(location: str) -> Iterator[None]:
    """Translates what transformers says of a model that it cannot open.

    Args:
        location: As the user wrote it.

    Raises:
        ConversionError: It is not there, is none that transformers knows, needs a library that is not installed, or
            brings code of its own.
    """
    try:
        yield
    except GraphkilnError:
        raise
    except ImportError as error:
        hint = "pip install 'graphkiln[timm]'" if "timm" in str(error) else "install the library that it names"
        raise ConversionError(f"transformers cannot open '{location}': {_reason(error)}", hint=hint) from error
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ConversionError(
                f"'{location}' brings code of its own, which is not run", hint="wrap the model: python:FILE:FACTORY"
            ) from error
        raise ConversionError(
            f"transformers cannot open '{location}': {_reason(error)}",
            hint="name a folder with config.json, or an id of the hub (needs the internet)",
        ) from error


def _reason(error: Exception) -> str:
    """The first line that says anything; what it says of an installation with pip is left to our own hint."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].partition(" You can install")[0] if lines else type(error).__name__


def is_without_weights(location: str) -> bool:
    """Whether it is a folder that holds a configuration alone."""
    folder = Path(location)
    return folder.is_dir() and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin"))


def create(location: str, config: Any, factory: Any, *, complete: bool = False) -> Any:
    """A model of transformers as it is exported, with the weights of its folder, or random ones where it has none.

    Args:
        location: The folder, or a hub's id.
        config: Of the model.
        factory: The class, or one of transformers' that finds the class (`AutoModel`).
        complete: Whether a weight that is not there is an error; transformers makes it random.

    Raises:
        ConversionError: One is not there.
    """
    config._attn_implementation = "eager"  # noqa: SLF001 - transformers' switch; fused attention is opaque to export
    if is_without_weights(location):
        torch.manual_seed(0)
        make = getattr(factory, "_from_config", None) or factory.from_config
        return make(config)
    model, found = factory.from_pretrained(
        location, config=config, dtype=torch.float32, trust_remote_code=False, weights_only=True,
        output_loading_info=True,
    )  # fmt: skip
    if complete and (missing := sorted(found["missing_keys"])):
        raise ConversionError(
            f"'{location}' lacks {len(missing)} of the model's weights, such as {missing[0]}",
            hint="name a folder that the whole model was saved to: they would be random",
        )
    return model
