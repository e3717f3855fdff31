"""In which ways the service is soaked one after the other, and which faults fit each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from soaking.disk_faults import CACHE_BYTES, TEMPORARY_BYTES, FullCache, FullTemporary, cache_folder, small_disk
from soaking.fault import Fault
from soaking.hostile import hostile_requests
from soaking.process_faults import process_faults
from soaking.reaching import Certificates
from soaking.service import Service
from soaking.store_faults import store_faults

STORE = "store"
LIMIT_FLAGS = ("--compute-limit=10",)
"""Below the deadline of a request, so that one that would compute for ever gets an error before."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """One way to run the service.

    Attributes:
        name: In the report.
        flags: Of `graphkiln serve`.
        explicit: Whether the server loads nothing before it is told to.
        secure: Whether both protocols are reached with mutual TLS.
    """

    name: str
    flags: tuple[str, ...]
    explicit: bool = False
    secure: bool = False


MODES = (
    Mode(name="polling", flags=("--model-control-mode=poll", "--repository-poll-secs=1", *LIMIT_FLAGS)),
    Mode(
        name="explicit, with mutual TLS",
        flags=("--model-control-mode=explicit", "--load-model=*", *LIMIT_FLAGS),
        explicit=True,
        secure=True,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Set:
    """What a soak of one mode begins with.

    Attributes:
        service: Not yet started.
        disks: Faults that need a disk of their own, as far as one could be mounted.
        notes: What could not be done here.
    """

    service: Service
    disks: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def faults(self, mode: Mode, *, heavy: bool) -> list[Fault]:
        """Every kind of fault that can be injected here.

        Args:
            mode: How the service runs.
            heavy: Whether faults that restart the service are among them.
        """
        every = [*process_faults(), *store_faults(explicit=mode.explicit), *hostile_requests(), *self.disks]
        return [fault for fault in every if heavy or not fault.heavy]


@contextmanager
def stage(folder: Path, mode: Mode) -> Iterator[Set]:
    """Makes disks, certificates and the service of one mode; ends the service.

    Args:
        folder: Of the soak; holds the models in `STORE`.
        mode: How the service is to run.
    """
    with ExitStack() as stack:
        disks: list[Fault] = []
        if stack.enter_context(small_disk(cache_folder(folder), CACHE_BYTES)):
            disks.append(FullCache())
        if stack.enter_context(small_disk(folder / "tmp", TEMPORARY_BYTES)):
            disks.append(FullTemporary())
        certificates = Certificates.issue(folder / "pki") if mode.secure else None
        environment = {"GRAPHKILN_CACHE": str(cache_folder(folder))}
        service = Service(folder, folder / STORE, *mode.flags, certificates=certificates, environment=environment)
        stack.callback(service.end)
        notes = [] if len(disks) == 2 else ["no disks of its own could be mounted: none was ever full"]
        yield Set(service=service, disks=disks, notes=notes)
