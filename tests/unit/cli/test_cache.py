"""`graphkiln cache`: list, prune and verify a cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from commands import RunVerb, table_rows

from graphkiln.cli.cache import cache_settings, parse_size
from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.graph.errors import ServerSetupError


def add(folder: Path, model: str, size: int, used_s: float = 0.0) -> Path:
    """Add an entry and return its folder."""

    def build(target: Path) -> None:
        (target / "model.blob").write_bytes(b"x" * size)

    with ArtifactCache(folder) as cache:
        path = cache.get("openvino", model, {"graph": model}, build)
    if used_s:
        os.utime(folder / "locks" / path.name, (used_s, used_s))
    return path


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A cache with an old entry of 3,000 bytes and a new one of 500."""
    add(tmp_path / "cache", "digits/1", 3000, used_s=1_700_000_000)
    add(tmp_path / "cache", "cats/2", 500, used_s=1_750_000_000)
    return tmp_path / "cache"


class TestList:
    def test_last_used_entry_is_first(self, run: RunVerb, filled: Path) -> None:
        out = run("cache", "list", "--cache", filled).out
        rows = table_rows(out)
        assert [row[1] for row in rows] == ["cats/2", "digits/1"]
        assert [row[2] for row in rows] == ["500 bytes", "2.93 KiB"]
        assert all(row[0].startswith("openvino-") for row in rows)
        assert "3.418 KiB in" in out.replace("\n", " ")

    def test_folder_from_the_environment(self, run: RunVerb, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GRAPHKILN_CACHE", str(filled))
        assert "digits/1" in run("cache", "list").out


class TestPrune:
    @pytest.mark.parametrize(
        ("words", "line"),
        [
            ([], "removed 2 of 2 entries, 0 bytes are left"),
            (["--to", "1K"], "removed 1 of 2 entries, 500 bytes are left"),  # the least recently used goes first
            (["--to", "1G"], "removed 0 of 2 entries, 3.418 KiB are left"),
        ],
    )
    def test_prune_to_a_size(self, run: RunVerb, filled: Path, words: list[str], line: str) -> None:
        assert run("cache", "prune", *words, "--cache", filled).out == f"{line} in {filled}\n"

    def test_entries_in_use_are_kept(self, run: RunVerb, filled: Path) -> None:
        with ArtifactCache(filled) as cache:
            cache.get("openvino", "digits/1", {"graph": "digits/1"}, lambda _: pytest.fail("it is there"))
            assert run("cache", "prune", "--cache", filled).out.startswith("removed 1 of 2 entries")

    def test_invalid_size_removes_nothing(self, run: RunVerb, filled: Path) -> None:
        finished = run("cache", "prune", "--to", "much", "--cache", filled)
        assert finished.code == 2
        assert "'much' is not a size" in finished.err
        assert len(list((filled / "entries").iterdir())) == 2


class TestVerify:
    def test_whole_and_damaged_entries(self, run: RunVerb, filled: Path) -> None:
        finished = run("cache", "verify", "--cache", filled)
        assert (finished.code, finished.out) == (0, "2 of 2 entries are whole\n")
        path = add(filled, "dogs/1", 100)
        (path / "model.blob").write_bytes(b"y" * 100)
        finished = run("cache", "verify", "--cache", filled)
        assert finished.code == 1
        assert finished.out.splitlines()[0].startswith(f"{path}: ")
        assert finished.out.splitlines()[1] == "1 damaged"


class TestSettings:
    def test_folder_is_absolute(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        settings = cache_settings("here", 7)
        assert settings.folder == tmp_path / "here"
        assert not (tmp_path / "here").exists()

    def test_tilde_is_the_home_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Shells do not expand the tilde in `--cache=~/kiln`."""
        monkeypatch.setenv("HOME", "/home/somebody")
        assert cache_settings("~/kiln", 7).folder == Path("/home/somebody/kiln")
        assert cache_settings("~no-such-user/kiln", 7).folder == Path("~no-such-user/kiln").absolute()

    def test_no_cache_without_home_folder(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def refuse() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", refuse)
        assert cache_settings("", 7).folder is None

        error = capsys.readouterr().err
        assert error.startswith("graphkiln: no artifact cache: this user has no home folder")

        assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("1.5k", 1536), ("500M", 500 << 20), ("20GiB", 20 << 30), (" 2T ", 2 << 40), ("7B", 7)]
)
def test_sizes_are_powers_of_1024(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1 2", "1P", "9" * 400])
def test_invalid_sizes(text: str) -> None:
    with pytest.raises(ServerSetupError, match=r"is not a size.*500M or 20G"):
        parse_size(text)
