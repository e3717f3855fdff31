"""Which version of which model made vectors: only vectors of one origin can be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from graphkiln_backend.graph.errors import InvalidInput, ManifestError

if TYPE_CHECKING:
    from graphkiln_client import Client, Model
    from graphkiln_client.encoded_images import Form

_KEYS = {
    "model": "graphkiln.model",
    "version": "graphkiln.version",
    "contract": "graphkiln.contract",
    "graph": "graphkiln.graph",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What made vectors.

    Attributes:
        model: The model's name.
        version: Its version; empty where the server does not say.
        contract: Digest of what the version says of its images, such as their preprocessing; empty where it says
            nothing.
        graph: Digest of its graph and weights; empty where the server, or an older file, says nothing of them.
    """

    model: str
    version: str
    contract: str
    graph: str = ""

    def __str__(self) -> str:
        said = [f"'{self.model}'", *([f"version {self.version}"] if self.version else [])]
        known = {"contract": self.contract, "graph": self.graph}
        digests = ", ".join(f"{what} {digest}" for what, digest in known.items() if digest)
        return " ".join([*said, *([f"({digests})"] if digests else [])])

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
        known = asked if self.graph and asked.graph else replace(asked, graph=self.graph)
        if self != known:
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
    from graphkiln_client.metadata import published_contracts, published_graph
    from graphkiln_client.served_version import newest_version

    version = version or newest_version(client.model(name).metadata)
    model = client.model(name, version, images=form)
    contracts = published_contracts(name, model.config)
    contract = contracts.find(version) if contracts else None
    graph = published_graph(name, model.config, version)
    return model, Origin(model=name, version=version, contract=contract.digest if contract else "", graph=graph)
