"""What a fault is, and what it may use."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from soaking.ledger import Ledger
from soaking.service import Service
from soaking.traffic import Versions

Over = Callable[[], bool]
"""Whether what was hit is gone or back, so that the service may be asked whether it has recovered."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """Where faults are injected.

    Attributes:
        service: The service.
        folder: Of the soak.
        store: The model store that is served.
        versions: Which versions may answer.
        ledger: Where requests are counted.
        chance: All random choices.
        explicit: Whether the server loads nothing before it is told to.
    """

    service: Service
    folder: Path
    store: Path
    versions: Versions
    ledger: Ledger
    chance: random.Random
    explicit: bool = False

    def publish(self, model: str) -> str:
        """Tells a server that must be told what the store now holds; returns why it cannot be loaded, or nothing."""
        return self.service.load(model) if self.explicit else ""


class Fault(ABC):
    """One kind of fault.

    Attributes:
        name: In the report.
        heavy: Whether the whole service restarts; the short soak of the tests has none of these.
        cause: Of the restart that it must lead to, as `graphkiln_restarts_total` names it; empty for none.
        hold_s: How long it stays before it is undone.
        begins_anew: Whether the supervisor itself ends and is started again, which begins its metrics anew.
    """

    name: str
    heavy: bool = True
    cause: str = ""
    hold_s: float = 0.0
    begins_anew: bool = False

    @abstractmethod
    def inject(self, field: Field) -> Over:
        """Does the damage; returns when the service may be asked whether it has recovered."""

    def undo(self, field: Field) -> None:  # noqa: B027 - most leave nothing to be taken back
        """Takes back what stays: files in the store."""


def at_once() -> bool:
    """For faults that hit nothing which must be replaced first."""
    return True
