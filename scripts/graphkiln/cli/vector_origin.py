"""Which version of which model made vectors: only vectors of one origin can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphkiln_backend.graph.errors import InvalidInput, ManifestError

if TYPE_CHECKING:
    from graphkiln_client import Client, Model
    from graphkiln_client.encoded_images import Form

_KEYS = {"model": "graphkiln.model", "version": "graphkiln.version", "contract": "graphkiln.contract"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What made vectors.

    Attributes:
        model: The model's name.
        version: Its version; empty where the server does not say.
        contract: Digest of what the version says of its images, such as their preprocessing; empty where it says
            nothing. Weights are not in it.
    """

    model: str
    version: str
    contract: str

    def __str__(self) -> str:
        said = [f"'{self.model}'", *([f"version {self.version}"] if self.version else [])]
        return " ".join([*said, *([f"(contract {self.contract})"] if self.contract else [])])

    def to_metadata(self) -> dict[str, str]:
        """As it stands in the metadata of a Parquet schema."""
        return {key: getattr(self, name) for name, key in _KEYS.items()}

    @classmethod
    def from_metadata(cls, metadata: Mapping[bytes, bytes]) -> Origin:
        """What `to_metadata` wrote.

        Raises:
            ManifestError: It is not there.
        """
        said = {name: metadata.get(key.encode(), b"").decode("utf-8", "replace") for name, key in _KEYS.items()}
        if not said["model"]:
            raise ManifestError(
                f"its metadata has no {_KEYS['model']}, which says what made the vectors",
                hint="write the file with: graphkiln embed IMAGES --model NAME --out FILE",
            )
        return cls(**said)

    def check(self, asked: Origin) -> None:
        """Checks that another vector is of this origin.

        Raises:
            InvalidInput: It is not.
        """
        if self != asked:
            raise InvalidInput(
                f"the vectors in the file were made by {self}, the image's would be by {asked}: "
                "they cannot be compared",
                hint="embed the images again with --out, or compare them all the same with --allow-other",
            )


def identify(client: Client, name: str, version: str, form: Form = "auto") -> tuple[Model, Origin]:
    """The version of a model that answers, pinned: no other one takes its place while it is used.

    Args:
        client: To the server.
        name: The model's name.
        version: Its version; empty for the server's choice.
        form: How its images travel.

    Raises:
        ClientError: A request failed.
    """
    from graphkiln_client.metadata import published_contracts
    from graphkiln_client.served_version import newest_version

    version = version or newest_version(client.model(name).metadata)
    model = client.model(name, version, images=form)
    contracts = published_contracts(name, model.config)
    contract = contracts.find(version) if contracts else None
    return model, Origin(model=name, version=version, contract=contract.digest if contract else "")
