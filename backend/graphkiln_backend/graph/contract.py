"""The contract of a version: how images become its input, what its classes are called, and which outputs rank them.

It belongs to the version, not to the model: the next version may have other classes or another preprocessing. Triton
publishes one configuration per model, so that holds the contracts of all versions. A request names the contract that
it was made for, and the server refuses it where another one holds by now: a client never reads the scores of one
version by the labels of another.
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

# The key of config.pbtxt's `parameters` under which the contracts are published, as JSON.
CONTRACTS = "contracts"

# The key under which the digest of each version's graph and weights is published: an object of JSON, by version.
GRAPHS = "graphs"

# The parameter of a request that holds the digest of the contract that it was made for.
REQUEST_PARAMETER = "contract"

_DIGEST_CHARACTERS = 16


@dataclass(frozen=True, kw_only=True)  # without slots: the digest is kept
class Contract:
    """A version's images and classes. None or empty values are not specified.

    Attributes:
        preprocess: How an image becomes the first input.
        labels: Class names by index.
        output: The output whose classes the labels name; empty without labels, and where the task says it.
        ranking: The outputs of an embedded top-k, which hold labels of their own.
        task: What the version answers about an image; None is a classification, or whatever its outputs are.
    """

    preprocess: Preprocess | None = None
    labels: tuple[str, ...] = ()
    output: str = ""
    ranking: Ranking | None = None
    task: Task | None = field(default=None, metadata=OMIT_DEFAULT)

    @property
    def says_something(self) -> bool:
        """True unless every value is empty."""
        return self != Contract()

    @cached_property
    def digest(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the contract.

        Every request holds it, and to compute it takes 3 ms where a contract names a thousand classes.
        """
        return hashlib.sha256(encode_json(self).encode()).hexdigest()[:_DIGEST_CHARACTERS]


@dataclass(frozen=True, kw_only=True, slots=True)
class Contracts:
    """The contracts of a model's versions, as they are published.

    Attributes:
        versions: Digest of the contract by version.
        contracts: Contract by digest: versions that agree share one.
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
            ManifestError: Not JSON, or no contracts; the message names the bad key.
        """
        return decode_json(cls, text, what="the contracts", path=CONTRACTS)

    def to_json(self) -> str:
        """The contracts as one line of JSON."""
        return encode_json(self)

    def find(self, version: str) -> Contract | None:
        """The contract of a version, or None where none is published for it."""
        return self.contracts[self.versions[version]] if version in self.versions else None


class ContractChanged(GraphkilnError):
    """A request was made for another contract than that of the version that it came to.

    Its message is how clients recognize it: Triton carries nothing else of an error.
    """

    triton_code = "INVALID_ARG"
    exit_code = 2
    MARK: ClassVar[str] = "the request was made for another contract"

    def __init__(self) -> None:
        super().__init__(
            f"{self.MARK} than this version's",
            hint="other labels or another preprocessing hold by now: read the configuration again",
        )
