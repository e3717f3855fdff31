"""The limits that this process and its children run under."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass

from graphkiln.doctor.finding import Finding, Level, Request, format_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A limit of the kernel.

    Attributes:
        subject: What it limits.
        resource: The kernel's number of it.
        least: The least that serving needs.
        flag: That of `ulimit`.
        is_size: Whether it is a number of bytes.
    """

    subject: str
    resource: int
    least: int
    flag: str
    is_size: bool = False


# Each connection is an open file; each instance some threads; runtimes reserve tens of GB of addresses.
LIMITS = (
    Limit(subject="open files", resource=resource.RLIMIT_NOFILE, least=1024, flag="-n"),
    Limit(subject="processes", resource=resource.RLIMIT_NPROC, least=512, flag="-u"),
    Limit(subject="address space", resource=resource.RLIMIT_AS, least=64 << 30, flag="-v", is_size=True),
    Limit(subject="file size", resource=resource.RLIMIT_FSIZE, least=4 << 30, flag="-f", is_size=True),
)


def check_limits(_: Request) -> Iterator[Finding]:
    """Each limit, and whether it is enough."""
    for limit in LIMITS:
        yield find_limit(limit, resource.getrlimit(limit.resource)[0])


def find_limit(limit: Limit, value: int) -> Finding:
    """One limit.

    Args:
        limit: Which.
        value: What it is now; -1 for none.
    """
    unlimited = value == resource.RLIM_INFINITY
    low = not unlimited and value < limit.least
    shown = format_size(value) if limit.is_size else str(value)
    return Finding(
        subject=limit.subject,
        level=Level.WARNING if low else Level.OK,
        message="no limit" if unlimited else f"at most {shown}",
        hint=f"ulimit {limit.flag} unlimited; in a container: docker run --ulimit; serving may need more"
        if low
        else "",
        facts={"limit": None if unlimited else value},
    )
