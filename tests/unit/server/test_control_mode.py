"""What the user's `--model-control-mode` means for Triton."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server.flags import ControlMode, TritonFlags

KNOWN = dict.fromkeys(
    (
        *("model-control-mode", "load-model", "repository-poll-secs", "allow-http", "allow-grpc"),
        *("strict-model-config", "model-config-name"),
    ),
    True,
) | {"disable-auto-complete-config": False}


def read(*arguments: str) -> ControlMode:
    return ControlMode.read(TritonFlags.parse(arguments, KNOWN))


@pytest.mark.parametrize("arguments", [(), ("--model-control-mode=none",), ("--model-control-mode", "poll")])
def test_none_and_poll_are_done_by_us(arguments: tuple[str, ...]) -> None:
    mode = read(*arguments)
    assert mode.managed
    assert mode.after_flags() == ("--model-control-mode=explicit", "--load-model=*")
    assert mode.before_flags() == ("--exit-on-error=false",)


def test_explicit_mode_is_the_users() -> None:
    mode = read("--model-control-mode=explicit", "--load-model=m")
    assert not mode.managed
    assert mode.after_flags() == ()
    assert mode.before_flags() == ("--exit-on-error=false",)


@pytest.mark.parametrize("arguments", [("--load-model=m",), ("--allow-http=false", "--allow-grpc=false")])
def test_what_we_cannot_do_is_left_to_triton(arguments: tuple[str, ...]) -> None:
    mode = read(*arguments)
    assert not mode.managed
    assert mode.before_flags() == mode.after_flags() == ()


@pytest.mark.parametrize(
    "flag", ["--disable-auto-complete-config", "--strict-model-config=true", "--model-config-name=x"]
)
def test_configurations_stay_as_they_are_where_the_user_says_so(flag: str) -> None:
    assert not read(flag).completes
    assert read().completes


def test_the_interval() -> None:
    assert read().poll_s == 15
    assert read("--repository-poll-secs=2").poll_s == 2


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_an_interval_that_is_none(text: str) -> None:
    with pytest.raises(ServerSetupError, match="repository-poll-secs"):
        read(f"--repository-poll-secs={text}")


def test_a_mode_that_is_none_does_not_print_all_of_tritons_flags() -> None:
    with pytest.raises(ServerSetupError, match=r"unknown --model-control-mode 'pol' \(did you mean 'poll'"):
        read("--model-control-mode=pol")
