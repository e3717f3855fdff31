"""Finding and validating the admin key."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.system.admin_key import (
    KEY_FILE_VARIABLE,
    KEY_VARIABLE,
    check_key,
    find_key,
    is_local,
    key_folders,
    read_key,
)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Both folders for keys, private and empty."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    folders = list(key_folders())
    for folder in folders:
        folder.mkdir(parents=True, mode=0o700)
    return folders


class TestFinding:
    @pytest.mark.parametrize("index", [0, 1])
    def test_key_is_found_in_either_folder_by_port(self, folders: list[Path], index: int) -> None:
        (folders[index] / "8000").write_text("secret\n")
        assert find_key("localhost", 8000) == "secret"
        assert find_key("localhost", 8001) == ""

    def test_key_file_is_not_used_for_other_machines(self, folders: list[Path]) -> None:
        (folders[0] / "8000").write_text("secret\n")
        assert find_key("example.org", 8000) == ""

    def test_environment_takes_precedence(
        self, folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (folders[0] / "8000").write_text("secret\n")
        (tmp_path / "key").write_text("from-file\n")
        monkeypatch.setenv(KEY_FILE_VARIABLE, str(tmp_path / "key"))
        assert find_key("example.org", 8000) == "from-file"
        monkeypatch.setenv(KEY_VARIABLE, "from-variable")
        assert find_key("localhost", 8000) == "from-variable"

    def test_file_writable_by_others_is_not_trusted(self, folders: list[Path]) -> None:
        key = folders[0] / "8000"
        key.write_text("planted\n")
        key.chmod(0o666)
        assert find_key("localhost", 8000) == ""
        key.chmod(0o600)
        folders[0].chmod(0o777)
        assert find_key("localhost", 8000) == ""

    def test_truncated_file_is_ignored(self, folders: list[Path]) -> None:
        (folders[0] / "8000").touch()
        assert find_key("localhost", 8000) == ""


@pytest.mark.parametrize("text", ["", "two words", "a\nb", "a,b", "a=b", "ä"])
def test_invalid_key_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    with pytest.raises(InvalidInput, match="admin key"):
        read_key(tmp_path / "key")


def test_error_does_not_show_the_key() -> None:
    with pytest.raises(InvalidInput) as caught:
        check_key("se cret", "FILE")
    assert "cret" not in str(caught.value).replace("secrets", "")


@pytest.mark.parametrize(
    ("host", "local"),
    [("localhost", True), ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("10.0.0.1", False), ("x.y", False)],
)
def test_is_local(host: str, local: bool) -> None:
    assert is_local(host) is local
