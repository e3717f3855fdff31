"""The same start on the wheel's release of Triton and on one of 2026, as a program that refuses what they refuse."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server import installation as finding
from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.server.installation import Installation, find_installation
from graphkiln_backend.server.launch import Launch
from graphkiln_backend.server.run_folder import RunFolder
from graphkiln_backend.triton.features import VERSION_VARIABLE, Feature, TritonFeatures, release_of

MakeContainer = Callable[..., Path]


@pytest.fixture(params=["2.51.0", "2.72.0"])
def ground(
    request: pytest.FixtureRequest, make_container: MakeContainer, monkeypatch: pytest.MonkeyPatch
) -> Installation:
    """A server of some release, found by the variable that names its folder."""
    root = make_container()
    (root / "TRITON_VERSION").write_text(f"{request.param}\n")
    (root / "bin" / "tritonserver").unlink()
    (root / "bin" / "tritonserver").write_text(Path(__file__).with_name("triton_of_release.py").read_text())
    (root / "bin" / "tritonserver").chmod(0o755)
    monkeypatch.setenv("GRAPHKILN_TRITONSERVER", str(root))
    return find_installation()


@pytest.fixture
def folder() -> Iterator[RunFolder]:
    with RunFolder() as folder:
        yield folder


def start(ground: Installation, folder: RunFolder, store: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start the server as `serve` would, and wait for its end."""
    launch = Launch(installation=ground, stores=[store], flags=TritonFlags.parse(arguments, ground.flags))
    return run(launch.prepare(folder))


def run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("mode", ["none", "poll", "explicit"])
def test_a_model_with_labels_is_served(ground: Installation, folder: RunFolder, digits: Path, mode: str) -> None:
    done = start(ground, folder, digits.parent, f"--model-control-mode={mode}")
    assert done.stderr == ""
    assert json.loads(done.stdout) == {"shared memory": True}


def test_linked_labels_are_refused_since_26_02(ground: Installation, digits: Path, tmp_path: Path) -> None:
    """The fault that the test before would find."""
    model = tmp_path / "store" / "digits"
    model.mkdir(parents=True)
    (model / "config.pbtxt").write_text('output { name: "y" label_filename: "labels.txt" }')
    (model / "labels.txt").symlink_to(digits / "labels.txt")
    refused = "outside model directory" in run([str(ground.binary), f"--model-repository={model.parent}"]).stderr
    assert refused is (ground.features.release >= "26.02")


def test_no_client_can_register_the_memory_of_an_instance(ground: Installation, folder: RunFolder) -> None:
    """Since 25.08 Triton refuses clients' regions of names that begin so."""
    launch = Launch(installation=ground, stores=[], flags=TritonFlags.parse([], ground.flags))
    (prefix,) = [word.rpartition("=")[2] for word in launch.prepare(folder) if "shm-region-prefix-name" in word]
    assert prefix == f"triton_python_backend_shm_region_{folder.path.name}-"


def test_the_users_word_on_shared_memory_counts(ground: Installation, folder: RunFolder, digits: Path) -> None:
    if "allow-client-shm" not in ground.flags:
        with pytest.raises(ServerSetupError, match="allow-client-shm"):
            start(ground, folder, digits.parent, "--allow-client-shm=false")
    else:
        done = start(ground, folder, digits.parent, "--allow-client-shm=false")
        assert json.loads(done.stdout) == {"shared memory": False}


def test_instances_know_the_release(ground: Installation, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(installation=ground, stores=[], flags=TritonFlags.parse([], ground.flags))
    monkeypatch.setenv(VERSION_VARIABLE, launch._environment(folder)[VERSION_VARIABLE])
    assert TritonFeatures.of_this_stub().has(Feature.TEXTS_IN_CPP) is (ground.version == "2.72.0")


def test_numpy_2_needs_stubs_that_know_it(ground: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stubs of 24.10 take every array of numpy 2 for one of 0 bytes, which clients would get."""
    monkeypatch.setattr(finding, "version", lambda _: "2.4.6")
    if ground.version == "2.51.0":
        with pytest.raises(ServerSetupError, match=r"24\.10.* support numpy 1 only"):
            find_installation()
    else:
        assert find_installation() == ground


@pytest.mark.parametrize(
    ("version", "release"),
    [
        *(("2.51.0", "24.10"), ("2.54.0", "25.01"), ("2.59.0", "25.06"), ("2.59.1", "25.07"), ("2.60.0", "25.08")),
        *(
            ("2.65.0", "26.01"),
            ("2.72.0", "26.08"),
            ("2.73.0dev", "26.09"),
            ("2.77.1", "27.01"),
            ("", ""),
            ("main", ""),
        ),
    ],
)
def test_releases_of_versions(version: str, release: str) -> None:
    """Source: the tags of Triton's repository and the releases that their README names."""
    assert release_of(version) == release


def test_an_unknown_version_counts_as_the_oldest() -> None:
    assert not any(map(TritonFeatures("").has, Feature))


def test_a_folder_without_a_server_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRAPHKILN_TRITONSERVER", str(tmp_path))
    with pytest.raises(ServerSetupError, match="contains no tritonserver"):
        find_installation()
