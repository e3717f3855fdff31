"""tritonserver's flags: read, completed, checked, and otherwise left as typed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from running import free_ports

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server.flags import ControlMode, ListenAddress, TritonFlags

KNOWN = {
    **dict.fromkeys(("http-port", "http-address", "grpc-port", "allow-http", "backend-config", "log-file"), True),
    **dict.fromkeys(("backend-directory", "model-repository", "reuse-http-port", "log-verbose"), True),
    "disable-auto-complete-config": False,
}


def test_arguments_stay_as_typed() -> None:
    typed = ["--http-port", "9000", "--backend-config=a,b=c", "--log-file=a b=c", "--disable-auto-complete-config"]
    flags = TritonFlags.parse(typed, KNOWN)
    assert list(flags.arguments) == typed
    assert flags.values["backend-config"] == "a,b=c"
    assert flags.values["log-file"] == "a b=c"


def test_model_stores_are_taken_out() -> None:
    flags = TritonFlags.parse(["--model-repository", "a", "--model-repository=b"], KNOWN)
    assert flags.stores == (Path("a"), Path("b"))
    assert flags.arguments == ()


def test_the_last_value_counts() -> None:
    address = TritonFlags.parse(["--http-port=1", "--http-port=2"], KNOWN).listen_address("http")
    assert address is not None
    assert address.port == 2


def test_services_that_are_switched_off_listen_nowhere() -> None:
    flags = TritonFlags.parse(["--allow-http=false", "--grpc-port=7"], KNOWN)
    assert [(a.protocol, a.port) for a in flags.listen_addresses()] == [("gRPC", 7), ("metrics", 8002)]


def test_a_port_that_may_be_shared_is_not_checked() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        others = ["--allow-grpc=false", "--allow-metrics=false"]
        known = {**KNOWN, "allow-grpc": True, "allow-metrics": True}
        TritonFlags.parse([f"--http-port={port}", "--reuse-http-port=true", *others], known).check_ports()
        with pytest.raises(ServerSetupError, match=f"port {port} "):
            TritonFlags.parse([f"--http-port={port}", *others], known).check_ports()


ALL = {
    **KNOWN,
    **dict.fromkeys(("allow-grpc", "allow-metrics", "grpc-address", "metrics-port", "metrics-address"), True),
    **dict.fromkeys(("model-store", "reuse-grpc-port", "model-control-mode"), True),
}
NO_OTHERS = ["--allow-grpc=false", "--allow-metrics=false"]


class TestParse:
    @pytest.mark.parametrize(
        ("arguments", "message", "hint"),
        [
            (["--http-prt=9"], "neither graphkiln nor tritonserver has a flag '--http-prt'", "'--http-port'"),
            (["--model-repositry", "a"], "has a flag '--model-repositry'", "'--model-repository'"),
            (["--zzzzzzzz"], "has a flag '--zzzzzzzz'", "graphkiln serve --help"),
            (["models"], "unexpected argument 'models'", "--model-store models"),
            (["-v"], "unexpected argument '-v'", "--model-store -v"),
            (["--log-file"], "--log-file needs a value", "--log-file=VALUE"),
            (["--disable-auto-complete-config", "yes"], "unexpected argument 'yes'", "--model-store yes"),
        ],
    )
    def test_a_mistake_is_an_error_with_its_hint(self, arguments: list[str], message: str, hint: str) -> None:
        with pytest.raises(ServerSetupError) as raised:
            TritonFlags.parse(arguments, ALL)
        assert message in raised.value.message
        assert hint in raised.value.hint

    def test_a_value_may_look_like_a_flag(self) -> None:
        flags = TritonFlags.parse(["--log-file", "--http-port"], ALL)
        assert flags.values == {"log-file": "--http-port"}

    def test_a_value_may_be_empty_or_hold_signs_of_equality(self) -> None:
        flags = TritonFlags.parse(["--log-file=", "--backend-config=a,b==c"], ALL)
        assert flags.values == {"log-file": "", "backend-config": "a,b==c"}

    @pytest.mark.parametrize("arguments", [["--backend-directory", "b"], ["--backend-directory=b"]])
    def test_the_backend_directory_is_taken_out(self, arguments: list[str]) -> None:
        flags = TritonFlags.parse([*arguments, "--log-verbose=1"], ALL)
        assert flags.backends == Path("b")
        assert flags.arguments == ("--log-verbose=1",)


class TestListenAddress:
    def test_defaults_are_tritons(self) -> None:
        addresses = TritonFlags.parse([], ALL).listen_addresses()
        assert [(a.protocol, a.host, a.port) for a in addresses] == [
            ("HTTP", "127.0.0.1", 8000),
            ("gRPC", "127.0.0.1", 8001),
            ("metrics", "127.0.0.1", 8002),
        ]

    @pytest.mark.parametrize("value", ["web", "", "-1", "0", "65536", "80.0", "8000 "])
    def test_a_port_that_is_none_is_an_error(self, value: str) -> None:
        with pytest.raises(ServerSetupError, match="--grpc-port must be a port number") as raised:
            TritonFlags.parse([f"--grpc-port={value}"], ALL).listen_address("grpc")
        assert raised.value.hint == "--grpc-port=8001"

    def test_metrics_follow_the_http_address_unless_they_have_their_own(self) -> None:
        flags = TritonFlags.parse(["--http-address=10.0.0.1"], ALL)
        assert [a.host for a in flags.listen_addresses()] == ["10.0.0.1", "127.0.0.1", "10.0.0.1"]
        flags = TritonFlags.parse(["--http-address=10.0.0.1", "--metrics-address=10.0.0.2"], ALL)
        assert [a.host for a in flags.listen_addresses()] == ["10.0.0.1", "127.0.0.1", "10.0.0.2"]

    def test_this_machine_reaches_all_addresses_by_loopback(self) -> None:
        assert ListenAddress(protocol="HTTP", host="0.0.0.0", port=1).local_address == ("127.0.0.1", 1)
        assert ListenAddress(protocol="HTTP", host="10.0.0.1", port=1).local_address == ("10.0.0.1", 1)


class TestCheckPorts:
    def test_a_busy_port_is_an_error_with_a_free_one(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as holder:
            port = holder.getsockname()[1]
            flags = TritonFlags.parse([f"--http-port={port}", "--http-address=127.0.0.1", *NO_OTHERS], ALL)
            with pytest.raises(ServerSetupError, match=rf"port {port} \(HTTP\) is in use") as raised:
                flags.check_ports()
        suggested = int(raised.value.hint.rpartition("=")[2])
        assert suggested != port
        with socket.create_server(("127.0.0.1", suggested)):
            pass

    def test_a_port_whose_last_connection_just_ended_is_free(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port)):
                server.accept()[0].close()  # the side that closes first keeps the port in TIME_WAIT
        TritonFlags.parse([f"--http-port={port}", "--http-address=127.0.0.1", *NO_OTHERS], ALL).check_ports()

    def test_an_address_of_another_machine_is_an_error(self) -> None:
        (port,) = free_ports(1)
        flags = TritonFlags.parse([f"--http-port={port}", "--http-address=192.0.2.1", *NO_OTHERS], ALL)
        with pytest.raises(ServerSetupError, match=rf"cannot listen on 192.0.2.1:{port} \(HTTP\)") as raised:
            flags.check_ports()
        assert "--http-address" in raised.value.hint

    @pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
    def test_one_port_for_two_services_is_an_error_before_one_of_them_has_it(self, host: str) -> None:
        (port,) = free_ports(1)
        arguments = [f"--http-port={port}", f"--grpc-port={port}", f"--http-address={host}", "--allow-metrics=false"]
        with pytest.raises(ServerSetupError, match=rf"HTTP and gRPC cannot both listen on port {port}") as raised:
            TritonFlags.parse(arguments, ALL).check_ports()
        assert raised.value.hint.startswith("--grpc-port=")

    def test_the_page_has_a_port_of_its_own(self) -> None:
        (port,) = free_ports(1)
        page = ListenAddress(protocol="page", host="127.0.0.1", port=port)
        with pytest.raises(ServerSetupError, match=rf"page and HTTP cannot both listen on port {port}"):
            TritonFlags.parse([f"--http-port={port}", *NO_OTHERS], ALL).check_ports(page)
        with socket.create_server(("127.0.0.1", port)):  # checked where the page is opened
            TritonFlags.parse(["--allow-http=false", *NO_OTHERS], ALL).check_ports(page)

    def test_one_port_at_two_addresses_is_two(self) -> None:
        (port,) = free_ports(1)
        hosts = [f"--http-port={port}", f"--grpc-port={port}", "--grpc-address=127.0.0.2", "--allow-metrics=false"]
        TritonFlags.parse(hosts, ALL).check_ports()


def test_words_of_other_options_are_set_aside() -> None:
    flags = TritonFlags.parse(
        ["a:1", "--http-port", "9", ":2"], KNOWN, is_other=lambda word: ":" in word or word == "9"
    )
    assert (flags.others, flags.values) == (("a:1", ":2"), {"http-port": "9"})


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        (("127.0.0.1", 1), ("localhost", 1), True),
        (("127.0.0.1", 1), ("0.0.0.0", 1), True),
        (("::", 1), ("127.0.0.1", 1), True),
        (("127.0.0.1", 1), ("127.0.0.1", 2), False),
        (("127.0.0.1", 1), ("::1", 1), False),
    ],
)
def test_addresses_that_exclude_each_other(one: tuple[str, int], other: tuple[str, int], overlap: bool) -> None:
    first, second = (ListenAddress(protocol="", host=host, port=port) for host, port in (one, other))
    assert first.overlaps(second) == second.overlaps(first) == overlap


def test_addresses_have_the_forms_that_their_libraries_want() -> None:
    six = TritonFlags.parse([], KNOWN, "::1")
    assert six.addresses == {"http-address": "ipv6:::1", "grpc-address": "[::1]"}
    assert {address.host for address in six.listen_addresses()} == {"::1"}
    assert TritonFlags.parse(["--http-address=1.2.3.4"], KNOWN).addresses == {"grpc-address": "127.0.0.1"}


@pytest.mark.parametrize("text", ["::1", "ipv6:::1", "[::1]"])
def test_addresses_are_read_in_the_forms_of_their_libraries(text: str) -> None:
    given = TritonFlags.parse([f"--http-address={text}"], KNOWN)
    assert [address.host for address in given.listen_addresses()] == ["::1", "127.0.0.1", "::1"]


@pytest.mark.parametrize(("host", "public"), [("::1", False), ("127.0.0.1", False), ("::", True), ("0.0.0.0", True)])
def test_which_addresses_other_machines_reach(host: str, public: bool) -> None:
    assert {address.is_public for address in TritonFlags.parse([], KNOWN, host).listen_addresses()} == {public}


def test_a_folder_that_is_misspelled(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    with pytest.raises(ServerSetupError, match=r"unexpected argument .* \(did you mean '.*/models'"):
        TritonFlags.parse([str(tmp_path / "model")], {}, "")


# What the user's `--model-control-mode` means for Triton.

MODE_FLAGS = dict.fromkeys(
    (
        *("model-control-mode", "load-model", "repository-poll-secs", "allow-http", "allow-grpc"),
        *("strict-model-config", "model-config-name"),
    ),
    True,
) | {"disable-auto-complete-config": False}


def read(*arguments: str) -> ControlMode:
    return ControlMode.read(TritonFlags.parse(arguments, MODE_FLAGS))


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
