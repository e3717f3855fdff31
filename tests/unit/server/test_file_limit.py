"""The limit of open files: raised as far as it can be, and refused where that is too little."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server import limits as module
from graphkiln_backend.server.limits import check_files, raise_file_limit

ANY = module.resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The limits of this process, the last ones now in force."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(module.resource, "getrlimit", lambda _: found[-1])
    monkeypatch.setattr(module.resource, "setrlimit", lambda _, pair: found.append(pair))
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), (4096, 4096)),
        ((64, 1 << 30), (65_536, 1 << 30)),
        ((1024, ANY), (65_536, ANY)),
        ((ANY, ANY), (ANY, ANY)),
        ((100_000, 100_000), (100_000, 100_000)),
        ((256, 256), (256, 256)),
    ],
)
def test_it_is_raised_as_far_as_it_may_be(
    limits: list[tuple[int, int]], before: tuple[int, int], after: tuple[int, int]
) -> None:
    limits.append(before)
    raise_file_limit()
    assert limits[-1] == after


def test_too_little_is_one_line_with_the_fix(limits: list[tuple[int, int]]) -> None:
    limits.append((32, 64))
    with pytest.raises(ServerSetupError, match=r"no more than 64 files .* needs 256, .*ulimit -n 4096.*nofile"):
        raise_file_limit()


def test_hundreds_of_instances_need_more(limits: list[tuple[int, int]]) -> None:
    limits.append((512, 512))
    check_files(85)
    with pytest.raises(ServerSetupError, match=r"no more than 512 files .* of 86 model instances needs 514, .*-n 4096"):
        check_files(86)
    with pytest.raises(ServerSetupError, match=r"ulimit -n 6512.*nofile=6512:6512"):
        check_files(1000)
    for unlimited in ((ANY, ANY), (1024, ANY)):
        limits.append(unlimited)
        check_files(1000)
