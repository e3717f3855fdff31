"""Whether a new version fits the model that it is written into: its configuration, and the versions that are there."""

from __future__ import annotations

from pathlib import Path

from graphkiln_backend.graph.errors import ConversionError, GraphkilnError, RepositoryError
from graphkiln_backend.graph.image_model import CONFIG_LINE, PARAMETER
from graphkiln_backend.graph.image_model import accepts_images as accepts
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.repository.config import ModelConfigProto, complete, read_config
from graphkiln_backend.repository.version import newest_version, read_version_signature


def check_fits(config: Path, signature: Signature, *, accepts_images: bool = False) -> None:
    """Refuses a version that the model's configuration would keep from being served as it is meant to be.

    Args:
        config: The model's config.pbtxt.
        signature: Of the new version.
        accepts_images: Whether the model is to take encoded images.

    Raises:
        ConversionError: The configuration is of another signature, or lets the model take no encoded images.
    """
    try:
        given = read_config(config)
        complete(given, signature, labels_file=None)
        if accepts_images and not _accepts(given):
            raise ConversionError(
                f"{config} was written before and lets the model take no encoded images",
                hint=f"add: {CONFIG_LINE}",
            )
    except RepositoryError as error:
        raise ConversionError(
            f"{config} does not fit the new version: {error.message}",
            hint="choose another --name, or remove what contradicts it from config.pbtxt",
        ) from error


def check_newest_fits(model_folder: Path, config: Path) -> None:
    """Refuses a version that would take the requests of one with another signature.

    Raises:
        ConversionError: The model's newest version contradicts the new one's configuration.
    """
    try:
        newest = newest_version(model_folder)
        signature = read_version_signature(newest)
    except GraphkilnError:  # there is none, or none that could serve
        return
    try:
        complete(read_config(config), signature, labels_file=None)
    except RepositoryError as error:
        raise ConversionError(
            f"version {newest.name} of '{model_folder.name}' has another signature than the new version: "
            f"{error.message}",
            hint="choose another --name: Triton has one signature for all versions of a model",
        ) from error


def _accepts(config: ModelConfigProto) -> bool:
    return PARAMETER in config.parameters and accepts(config.parameters[PARAMETER].string_value)
