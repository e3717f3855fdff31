"""How the admin key is made and published."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server import access as module
from graphkiln_backend.server.access import AdminKey, PublishedKey
from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.system.admin_key import find_key, key_folders

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
    def test_every_start_has_its_own(self) -> None:
        first, second = AdminKey.obtain(None), AdminKey.obtain(None)
        assert first.value != second.value
        assert len(first.value) == 64
        assert first.value not in repr(first)

    def test_a_missing_file_is_made_and_kept(self, tmp_path: Path) -> None:
        key = AdminKey.obtain(tmp_path / "key")
        assert mode(tmp_path / "key") == 0o600
        assert AdminKey.obtain(tmp_path / "key") == key
        assert [path.name for path in tmp_path.iterdir()] == ["key"]

    def test_a_file_for_everybody_is_named(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        (tmp_path / "key").write_text("abc")
        (tmp_path / "key").chmod(0o644)
        assert AdminKey.obtain(tmp_path / "key").value == "abc"
        assert "chmod 600" in caplog.text

    @pytest.mark.parametrize(("permissions", "named"), [(0o440, False), (0o444, True)])
    def test_the_group_of_somebody_elses_file_is_how_a_pod_reads_a_secret(
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
        assert "name a file" in str(raised.value)

    def test_an_empty_file(self, tmp_path: Path) -> None:
        (tmp_path / "key").touch()
        with pytest.raises(ServerSetupError, match="letters, digits"):
            AdminKey.obtain(tmp_path / "key")


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

    def test_a_home_that_cannot_even_be_looked_at(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As another user's is; here its name is longer than any."""
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ("x" * 300)))
        with pytest.raises(OSError, match="too long"):
            next(key_folders()).is_dir()
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

    def test_a_folder_that_another_server_removes_as_an_empty_one_is_made_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder, write, removals = next(key_folders()), module._write_new, iter(range(2))

        def write_later(file: Path, key: str) -> int:
            if file.name == "8000" and next(removals, None) is not None:
                folder.rmdir()
            return write(file, key)

        monkeypatch.setattr(module, "_write_new", write_later)
        with PublishedKey(AdminKey("abc"), FLAGS):
            assert (folder / "8000").exists()
