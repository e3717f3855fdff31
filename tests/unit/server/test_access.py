"""Which endpoints need a key."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server.access import Access, AdminKey, PublishedKey
from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.system.admin_key import GRPC_HEADER, HTTP_HEADER, find_key, key_folders

KNOWN = dict.fromkeys(("http-restricted-api", "grpc-restricted-protocol"), True)
KEY = AdminKey("abc")


def plan(*arguments: str, key: AdminKey | None = KEY) -> Access:
    """The access of a server with these flags."""
    return Access.plan(TritonFlags.parse(arguments, KNOWN), key)


def test_everything_that_changes_the_server_needs_the_key() -> None:
    access = plan()
    endpoints = "model-repository,shared-memory,trace,logging"
    assert access.arguments == (
        f"--http-restricted-api={endpoints}:{HTTP_HEADER}=abc",
        f"--grpc-restricted-protocol={endpoints}:{HTTP_HEADER}=abc",
    )
    assert access.http_headers == {HTTP_HEADER: "abc"}
    assert access.grpc_metadata == ((GRPC_HEADER, "abc"),)
    assert access.open_endpoints == ()
    assert "abc" not in repr(access)


def test_the_users_own_restrictions_win() -> None:
    access = plan("--http-restricted-api", "health,model-repository:X-Mine=z=1", "--http-restricted-api=trace:b=2")
    assert access.arguments[0] == f"--http-restricted-api=shared-memory,logging:{HTTP_HEADER}=abc"
    assert access.http_headers == {HTTP_HEADER: "abc", "X-Mine": "z=1", "b": "2"}
    assert access.grpc_metadata == ((GRPC_HEADER, "abc"),)


@pytest.mark.parametrize(("host", "warned"), [("0.0.0.0", True), ("::1", False), ("10.1.1.1", True)])
def test_an_open_server_is_loud_on_public_addresses_only(
    host: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    flags = TritonFlags.parse([], KNOWN, host)
    Access.plan(flags, None).warn_if_open(flags)
    assert ("DANGER" in caplog.text) is warned
    caplog.clear()
    Access.plan(flags, KEY).warn_if_open(flags)
    assert not caplog.text


def test_services_that_know_no_key_are_loud(caplog: pytest.LogCaptureFixture) -> None:
    flags = TritonFlags.parse(["--allow-sagemaker=true"], {"allow-sagemaker": True})
    Access.plan(flags, KEY).warn_if_open(flags)
    assert "sagemaker" in caplog.text


def test_a_server_that_is_open_on_purpose() -> None:
    access = plan(key=None)
    assert access.arguments == ()
    assert not access.http_headers
    assert len(access.open_endpoints) == 8


# How the admin key is made and published.

FLAGS = TritonFlags(arguments=(), values={}, stores=(), backends=None)
OTHER = TritonFlags(arguments=(), values={"http-port": "9000", "allow-grpc": "false"}, stores=(), backends=None)


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))


def mode(path: Path) -> int:
    """Permission bits."""
    return stat.S_IMODE(path.stat().st_mode)


class TestObtaining:
    def test_a_missing_file_is_made_and_kept(self, tmp_path: Path) -> None:
        key = AdminKey.obtain(tmp_path / "key")
        assert mode(tmp_path / "key") == 0o600
        assert AdminKey.obtain(tmp_path / "key") == key
        assert [path.name for path in tmp_path.iterdir()] == ["key"]

    def test_a_file_that_others_can_read_is_a_warning(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "key").write_text("abc")
        (tmp_path / "key").chmod(0o644)
        assert AdminKey.obtain(tmp_path / "key").value == "abc"
        assert "chmod 600" in caplog.text

    @pytest.mark.parametrize(("permissions", "named"), [(0o440, False), (0o444, True)])
    def test_a_pod_may_read_a_secret_as_its_group(
        self,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
        permissions: int,
        named: bool,
    ) -> None:
        (tmp_path / "key").write_text("abc")
        (tmp_path / "key").chmod(permissions)
        monkeypatch.setattr("os.geteuid", lambda: (tmp_path / "key").stat().st_uid + 1)
        assert AdminKey.obtain(tmp_path / "key").value == "abc"
        assert ("chmod 600" in caplog.text) is named

    @pytest.mark.parametrize("name", ["missing/key", "."])
    def test_a_file_that_cannot_be(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ServerSetupError, match=r"No such file or directory|Is a directory") as raised:
            AdminKey.obtain(tmp_path / name)
        assert str(tmp_path / name) in str(raised.value)
        assert "(" in str(raised.value), "with a hint"


class TestPublishing:
    def test_this_user_finds_it_until_the_server_ends(self) -> None:
        with PublishedKey(AdminKey("abc"), FLAGS):
            assert find_key("localhost", 8000) == find_key("127.0.0.1", 8001) == "abc"
            file = next(key_folders()) / "8000"
            assert (mode(file), mode(file.parent)) == (0o600, 0o700)
        assert find_key("localhost", 8000) == ""

    def test_a_home_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "state").touch()
        with PublishedKey(AdminKey("abc"), FLAGS):
            assert find_key("localhost", 8000) == "abc"

    def test_nowhere(self, caplog: pytest.LogCaptureFixture) -> None:
        for folder in key_folders():
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.touch()
        with PublishedKey(AdminKey("abc"), FLAGS):
            assert find_key("localhost", 8000) == ""
        assert "--admin-key-file" in caplog.text

    def test_a_folder_that_others_can_write_is_not_used(self) -> None:
        first, second = key_folders()
        first.mkdir(parents=True)
        first.chmod(0o777)
        with PublishedKey(AdminKey("abc"), FLAGS):
            assert not list(first.iterdir())
            assert (second / "8000").exists()

    def test_what_a_killed_server_left_is_replaced(self) -> None:
        PublishedKey(AdminKey("old"), FLAGS)
        with PublishedKey(AdminKey("new"), FLAGS):
            assert find_key("localhost", 8000) == "new"
        with PublishedKey(None, FLAGS):
            assert find_key("localhost", 8000) == ""

    def test_another_servers_key_stays(self) -> None:
        old = PublishedKey(AdminKey("old"), FLAGS)
        with PublishedKey(AdminKey("new"), FLAGS):
            old.close()
            assert find_key("localhost", 8000) == "new"

    def test_the_next_server_removes_those_of_killed_ones_whatever_their_ports(self) -> None:
        folder = next(key_folders())
        with PublishedKey(AdminKey("living"), FLAGS):
            (folder / "7000").write_text("dead")
            (folder / ".7000.ab12").write_text("half")
            with PublishedKey(AdminKey("abc"), OTHER):
                assert sorted(path.name for path in folder.iterdir()) == ["8000", "8001", "9000"]
            assert find_key("localhost", 8000) == "living"

    def test_no_empty_folder_stays(self, tmp_path: Path) -> None:
        """Neither for each name of a pod whose home is shared, nor among temporary files."""
        state, temporary = key_folders()
        with PublishedKey(AdminKey("abc"), FLAGS):
            with PublishedKey(AdminKey("abc"), OTHER):
                assert (state / "9000").exists()
            assert state.exists()
        assert not state.exists()
        state.touch()
        with PublishedKey(AdminKey("abc"), FLAGS):
            assert (temporary / "8000").exists()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]
