"""What a server publishes about the version that answers: it can change from one request to the next.

A client that addresses no version gets the newest one, and a version can be replaced while the client runs. What was
read of one version must not be used for the response of another: each request names the contract that it was made for,
and each response the version that it comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graphkiln_backend.graph.contract import Contract, ContractChanged
from graphkiln_backend.graph.errors import ClientError, InvalidInput
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Ranking, Task
from graphkiln_client.metadata import (
    ModelInfo,
    has_labels,
    published_contracts,
    published_ranking,
    published_spec,
    published_task,
)

Labels = tuple[str, ...]


class StaleVersion(Exception):
    """What was read does not hold for the version that answers.

    Args:
        answered: That version; empty where the server does not say.
    """

    def __init__(self, answered: str = "") -> None:
        super().__init__(answered)
        self.answered = answered


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedVersion:
    """What is published about a version.

    Attributes:
        model: The model's name.
        version: Its number; empty where the server does not say.
        is_pinned: Whether every request names this version.
        metadata: The model's metadata.
        config: Its configuration.
        contract: What the version says of its images and classes; None where the server publishes it of no version.
        labels: By output, as the classification extension returned them.
    """

    model: str
    version: str
    is_pinned: bool
    metadata: Mapping[str, Any]
    config: Mapping[str, Any]
    contract: Contract | None
    labels: dict[str, Labels] = field(default_factory=dict, compare=False)

    @property
    def digest(self) -> str:
        """What a request names, so that the server refuses it where another contract holds; empty for nothing."""
        return self.contract.digest if self.contract else ""

    @property
    def preprocess(self) -> Preprocess:
        """How an image becomes the input.

        Raises:
            InvalidInput: The server does not say.
            ProtocolError: It cannot be read.
        """
        said = self.contract.preprocess if self.contract else None
        return said or published_spec(self.model, self.config)

    @property
    def ranking(self) -> Ranking | None:
        """The outputs of an embedded top-k, or None.

        Raises:
            ProtocolError: It cannot be read.
        """
        said = self.contract.ranking if self.contract else None
        return said or published_ranking(self.model, self.config)

    @property
    def task(self) -> Task | None:
        """What the version answers about an image; None where the server does not say.

        Raises:
            ProtocolError: It cannot be read.
        """
        said = self.contract.task if self.contract else None
        return said or published_task(self.model, self.config)

    def known_labels(self, output: str) -> Labels | None:
        """The labels of an output; None where the classification extension must be asked."""
        if self.contract and self.contract.labels and self.contract.output == output:
            return self.contract.labels
        return self.labels.get(output) if has_labels(self.config, output) else ()

    def check(self, answered: str) -> None:
        """Checks that a response comes from this version.

        Raises:
            StaleVersion: It comes from another.
        """
        if self.version and answered and self.version != answered and not self.is_pinned:
            raise StaleVersion(answered)


async def read_served_version(info: ModelInfo, answered: str) -> ServedVersion:
    """Reads what is published about the version that is addressed, or else the one that will answer.

    Args:
        info: The model.
        answered: The version that answered last; empty for none.

    Raises:
        InvalidInput: The version that is addressed is none.
        ClientError: The request failed, or what is published cannot be read.
    """
    metadata, config = await info.metadata(), await info.config()
    version = info.version or answered or newest_version(metadata)
    contracts = published_contracts(info.name, config)
    if contracts and info.version:
        _check_number(info, metadata)
    return ServedVersion(
        model=info.name,
        version=version,
        is_pinned=bool(info.version),
        metadata=metadata,
        config=config,
        # A version that is not among them was loaded since: it refuses the empty contract, and all is read again.
        contract=contracts.find(version) or Contract() if contracts and version else None,
    )


def _check_number(info: ModelInfo, metadata: Mapping[str, Any]) -> None:
    """Refuses what Triton takes for a version by its first digits (`01`, `1/x`): no contract is published under it."""
    text = info.version
    if not (text.isascii() and text.isdecimal()) or (text.startswith("0") and text != "0"):
        served = ", ".join(_versions(metadata))
        raise InvalidInput(f"'{text}' is no version of '{info.name}'", hint=f"they are numbers: {served}")


def is_contract_changed(error: ClientError) -> bool:
    """Whether a server refused a request because it was made for another contract."""
    return ContractChanged.MARK in error.message


def newest_version(metadata: Mapping[str, Any]) -> str:
    """The version that a server with several prefers. Source: Triton's version policy."""
    return max(filter(str.isdecimal, _versions(metadata)), key=int, default="")


def _versions(metadata: Mapping[str, Any]) -> list[str]:
    versions = metadata.get("versions")
    return [str(version) for version in versions] if isinstance(versions, list) else []
