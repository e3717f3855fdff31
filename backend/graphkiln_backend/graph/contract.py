"""The contract of a version: preprocessing, labels, and the outputs that rank the classes.

Each version has its own contract, because the next one may have other classes or another preprocessing. Triton
publishes one configuration per model, which contains the contracts of all versions. A request names its contract, and
graphkiln's instances refuse it if the version has another one. Behind Triton's other backends, the client compares the
contract of the version that the response names. So it never combines the scores of one version with the labels of
another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from graphkiln_backend.graph.decoding import OMIT_DEFAULT, decode_json, encode_json
from graphkiln_backend.graph.errors import GraphkilnError, ManifestError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Ranking, Task

# Key in config.pbtxt's `parameters` of the contracts, as JSON.
CONTRACTS = "contracts"

# Key of the digests of each version's graph and weights: a JSON object by version.
GRAPHS = "graphs"

# Request parameter with the digest of the contract.
REQUEST_PARAMETER = "contract"

# Request parameter of clients that name a version, with its number: Triton does not tell an instance whether a request
# named one, and no rollout may answer such a request by another version.
PINNED_PARAMETER = "pinned_version"

_DIGEST_CHARACTERS = 16


@dataclass(frozen=True, kw_only=True)  # without slots, because the digest is cached
class Contract:
    """Images and classes of a version. None or empty values are unspecified.

    Attributes:
        preprocess: Preprocessing of an image to the first input.
        labels: Class names by index.
        output: Output that the labels belong to; empty without labels, or if the task names it.
        ranking: Outputs of an embedded top-k, with labels.
        task: Image task; None for classification, or models without a task.
    """

    preprocess: Preprocess | None = None
    labels: tuple[str, ...] = ()
    output: str = ""
    ranking: Ranking | None = None
    task: Task | None = field(default=None, metadata=OMIT_DEFAULT)

    @property
    def is_specified(self) -> bool:
        """True if any value is specified."""
        return self != Contract()

    @cached_property
    def digest(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the contract.

        Cached, because every request contains it, and computing it takes 3 ms for a thousand classes.
        """
        return hashlib.sha256(encode_json(self).encode()).hexdigest()[:_DIGEST_CHARACTERS]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contracts:
    """The published contracts of a model's versions.

    Attributes:
        versions: Digest of the contract by version.
        contracts: Contract by digest; equal contracts are shared.
    """

    versions: dict[str, str] = field(default_factory=dict)
    contracts: dict[str, Contract] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for version, digest in self.versions.items():
            if digest not in self.contracts:
                raise ManifestError(f"{CONTRACTS}: the contract {digest} of version {version} is missing")

    @classmethod
    def of(cls, versions: Mapping[str, Contract]) -> Contracts:
        """Collect the contracts of versions."""
        digests = {version: contract.digest for version, contract in versions.items()}
        return cls(versions=digests, contracts={contract.digest: contract for contract in versions.values()})

    @classmethod
    def from_json(cls, text: str) -> Contracts:
        """Parse published contracts.

        Raises:
            ManifestError: Not JSON, or not contracts; the message names the bad key.
        """
        return decode_json(cls, text, what="the contracts", path=CONTRACTS)

    def to_json(self) -> str:
        """Encode as one line of JSON."""
        return encode_json(self)

    def find(self, version: str) -> Contract | None:
        """The contract of a version, or None if none is published."""
        return self.contracts[self.versions[version]] if version in self.versions else None


class ContractChanged(GraphkilnError):
    """The contract of a request differs from that of the version that received it.

    Clients recognize it by its message, because Triton transfers only the text of an error.
    """

    triton_code = "INVALID_ARG"
    exit_code = 2
    MARK: ClassVar[str] = "the request was made for another contract"

    def __init__(self) -> None:
        super().__init__(
            f"{self.MARK} than this version's",
            hint="other labels or another preprocessing hold by now: read the configuration again",
        )
